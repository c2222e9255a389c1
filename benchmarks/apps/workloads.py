"""The six workloads of the paper: submissions, settings and measured quantities.

Each workload is a function of a seed that yields `Point`s. A point is one bar or mark of a
figure: the paper's ratio, and the simulated metrics of the baseline and of Conure. Lower metrics
are better, except for rates.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from conure.server.scheduling.scheduler import MAX_LOOKAHEAD_CALLS
from simulation.engine import CostModel, LinearCosts
from simulation.simulation import ProgramOutcome, Simulation, SimulationConfig

from .programs import AppPlan, chain, logged_coding, map_reduce, single
from .scenario import HEAD, Scenario, Settings
from .setting import (
    A100_7B_PAGED,
    A100_7B_READ_ONCE,
    CODING_LATENCY,
    CODING_LATENCY_AGAIN,
    CODING_OURS,
    CODING_THROUGHPUT,
)


class Point(NamedTuple):
    """One comparison."""

    label: str
    paper: float
    """The ratio that the paper reports; nan if it reports none."""
    before: float
    after: float
    is_rate: bool = False
    is_least: bool = False
    """Conure met the limit at the highest rate that was tried, so the true ratio may be higher."""

    @property
    def ratio(self) -> float:
        """The advantage of Conure."""
        return self.after / self.before if self.is_rate else self.before / self.after


Sent = Sequence[tuple[AppPlan, float]]

ARTICLE_TOKENS = (40_000, 85_000)
"""Tokens of an article.

Chosen so that a chain in chunks of 1,024 has 61 calls on average, which matches the difference
between the systems of figure 11 at 244 ms per round trip: 0.69 tokens per character for its
articles of 58,000 to 124,000 characters.
"""
SHORT_ARTICLE_TOKENS = (35_000, 60_000)
"""Tokens of an article of figure 12b, by the same factor (51,000 to 87,000 characters)."""


def outcomes(
    setting: SimulationConfig, sent: Sent, scenario: Scenario = HEAD
) -> list[ProgramOutcome]:
    """Simulate programs that are submitted at given times."""
    simulation = Simulation(setting)
    found = [simulation.submit(scenario.plan(plan).blueprint, at_s) for plan, at_s in sent]
    simulation.run()
    return found


def mean_s(found: Sequence[ProgramOutcome]) -> float:
    """Return the mean time of programs, as seen by their clients."""
    return statistics.fmean(outcome.took_s for outcome in found)


def per_token_s(found: Sequence[ProgramOutcome]) -> float:
    """Return the mean time per output token."""
    return statistics.fmean(outcome.took_s / outcome.num_output for outcome in found)


def _articles(seed: int, number: int, tokens: tuple[int, int] = ARTICLE_TOKENS) -> list[int]:
    draw = random.Random(f"articles {seed}")
    return [draw.randint(*tokens) for _ in range(number)]


SWEEP = [(out, 1_024) for out in (25, 50, 75, 100)] + [(50, size) for size in (512, 1_536, 2_048)]
"""Output tokens and tokens of a chunk."""
CHAIN = dict(zip(SWEEP, (1.38, 1.21, 1.14, 1.11, 1.21, 1.20, 1.19), strict=True))
MAP_REDUCE = dict(zip(SWEEP, (1.70, 2.04, 2.22, 2.37, 1.96, 2.07, 2.16), strict=True))
BACKGROUND = {0.0: 1.21, 1.0: 1.19, 2.0: 1.31, 3.0: 1.79, 3.5: 2.38}
MANY = {10: 1.38, 15: 1.52, 20: 1.63, 25: 1.68}
"""The paper's ratios."""


def chain_summary(
    seed: int, scenario: Scenario = HEAD, sweep: Sequence[tuple[int, int]] = SWEEP
) -> Iterator[Point]:
    """Figure 11: one chain at a time, on one A100."""
    for out, chunk in sweep:
        before, after = (
            statistics.fmean(
                mean_s(outcomes(setting, [(chain(tokens // chunk, chunk, out), 0.0)], scenario))
                for tokens in _articles(seed, 10)
            )
            for setting in (
                make(scenario.a100_13b, seed, capacity=4_096)
                for make in (scenario.baseline, scenario.ours)
            )
        )
        yield Point(f"output {out}, chunk {chunk}", CHAIN[out, chunk], before, after)


def chain_with_background(
    seed: int, scenario: Scenario = HEAD, rates: Iterable[float] = tuple(BACKGROUND)
) -> Iterator[Point]:
    """Figure 12a: one chain at a time, while single requests arrive at a given rate."""
    for rate in rates:
        means = []
        for make in (scenario.baseline, scenario.ours):
            setting = make(scenario.a100_13b, seed, capacity=4_096)
            took = []
            for i, tokens in enumerate(_articles(seed, 10)):
                draw = random.Random(f"background {seed} {i}")
                sent = [(chain(tokens // 1_024, 1_024, 50), 0.0)]
                at_s = draw.expovariate(rate) if rate else math.inf
                while at_s < 400:
                    sent.append((single("", 0, 512, 50, 0), at_s))
                    at_s += draw.expovariate(rate)
                took.append(outcomes(setting, sent, scenario)[0].took_s)
            means.append(statistics.fmean(took))
        yield Point(f"{rate:g} background requests/s", BACKGROUND[rate], means[0], means[1])


def many_chains(
    seed: int, scenario: Scenario = HEAD, numbers: Iterable[int] = tuple(MANY)
) -> Iterator[Point]:
    """Figure 12b: chains of different articles, all at once.

    Both systems have a capacity of 10,000 tokens, the largest that the authors' notes name for
    their baselines.
    """
    for number in numbers:
        sent = many_chains_sent(seed, number)
        before, after = (
            mean_s(outcomes(make(scenario.a100_13b, seed, capacity=10_000), sent, scenario))
            for make in (scenario.baseline, scenario.ours)
        )
        yield Point(f"{number} apps", MANY[number], before, after)


def many_chains_sent(seed: int, number: int) -> Sent:
    """Return chains of different articles, all at once."""
    return [
        (chain(tokens // 2_048, 2_048, 50, article), 0.0)
        for article, tokens in enumerate(_articles(seed, number, SHORT_ARTICLE_TOKENS))
    ]


def map_reduce_summary(
    seed: int, scenario: Scenario = HEAD, sweep: Sequence[tuple[int, int]] = SWEEP
) -> Iterator[Point]:
    """Figure 14: the baseline is limited to 4,096 tokens for latency; Conure needs no limit."""
    cost = scenario.a100_13b
    for out, chunk in sweep:
        before, after = (
            statistics.fmean(
                mean_s(
                    outcomes(setting, [(map_reduce(tokens // chunk, chunk, out), 0.0)], scenario)
                )
                for tokens in _articles(seed, 10)
            )
            for setting in (
                scenario.baseline(cost, seed, capacity=4_096),
                scenario.limited(cost, seed, capacity=45_000),
            )
        )
        yield Point(f"output {out}, chunk {chunk}", MAP_REDUCE[out, chunk], before, after)


# fmt: off
COPILOT = [(5508, 183, 2), (5573, 191, 3), (5593, 192, 3), (5636, 192, 1), (5653, 195, 3),
           (5667, 196, 2), (5708, 209, 4), (5709, 212, 3), (5749, 232, 2), (5757, 232, 5),
           (5765, 248, 2), (5783, 251, 2), (5800, 256, 1), (5809, 269, 3), (5846, 303, 1),
           (5856, 313, 1), (5885, 351, 5), (5961, 360, 6), (5986, 393, 7), (6014, 619, 2),
           (6066, 800, 2), (6943, 800, 4)]
# fmt: on
"""Prompt and output tokens of figure 15's requests, and the number of each."""
COPILOT_SYSTEM = 5_107
COPILOT_LATER_S = 5.0
"""Time by which their system prompt is prefilled."""


COPILOT_RATIOS = {8: (1.1, 1.8), 16: (1.3, 2.4), 32: (1.4, math.nan), 64: (1.7, math.nan)}
"""The paper's ratios to a system that keeps the prompt once, and to one that does not."""


def shared_system_prompt(
    seed: int, scenario: Scenario = HEAD, batches: Iterable[int] = tuple(COPILOT_RATIOS)
) -> Iterator[Point]:
    """Figure 15: 64 requests with one long system prompt, in batches, on one A100.

    The baselines keep the prompt once but read it for every request, or keep it for every request.
    The figure has no network.
    """
    return _shared_prompt(seed, scenario, batches, scenario.a100_7b, scenario.a100_7b)


def recorded_shared_prompt(seed: int) -> Iterator[Point]:
    """Figure 15 with recorded step times: those of the paper with a kernel that reads the prompt
    once, and with one that does not.
    """
    return _shared_prompt(seed, HEAD, COPILOT_RATIOS, A100_7B_READ_ONCE, A100_7B_PAGED)


def _shared_prompt(
    seed: int,
    scenario: Scenario,
    batches: Iterable[int],
    read_once: CostModel,
    paged: CostModel,
) -> Iterator[Point]:
    lengths = [pair[:2] for pair in COPILOT for _ in range(pair[2])]
    random.Random(f"copilot {seed}").shuffle(lengths)
    # The prompt is prefilled before any request arrives, as in the paper.
    sent = [(single("copilot", COPILOT_SYSTEM, 1, 1, -1), 0.0)]
    sent += [
        (single("copilot", COPILOT_SYSTEM, prompt - COPILOT_SYSTEM, output, i), COPILOT_LATER_S)
        for i, (prompt, output) in enumerate(lengths)
    ]

    def running_s(setting: SimulationConfig) -> float:
        return statistics.fmean(found.decode_s for found in outcomes(setting, sent, scenario)[1:])

    for batch in batches:
        ratios = COPILOT_RATIOS[batch]
        common: Settings = {
            "max_sequences": batch - MAX_LOOKAHEAD_CALLS,
            "capacity": 10**9,
            "round_trip_s": lambda: 0.0,
        }
        after = running_s(scenario.ours(read_once, seed, **common))
        kept = common | {"policy": "conure", "has_prefix_cache": True}
        before = running_s(scenario.baseline(paged, seed, **kept))
        yield Point(f"batch {batch}, prefix stored once", ratios[0], before, after)
        if batch <= 16:  # With larger batches the paper's baseline ran out of memory.
            before = running_s(scenario.baseline(paged, seed, **common))
            yield Point(f"batch {batch}, nothing shared", ratios[1], before, after)


GPTS = {
    "productivity": (7_437, 7, 704),
    "image": (1_116, 8, 89),
    "programming": (1_694, 4, 631),
    "data": (2_031, 4, 416),
}
"""Tokens of system prompt, question and output."""
GPTS_NUMBER, GPTS_RATE = 500, 32.0
"""Requests that the paper sent per rate, and the highest rate that it tried. At 32 requests per
second all of them have arrived after 16 s.
"""
GPTS_S = 600.0
"""Duration of the arrivals when a rate is to be sustained. Only the later half counts, because
slow overload is visible by then.
"""
BOUND_S = 0.3
"""Limit in seconds per token; a rate that meets it is sustained."""

LASTING = ("500 requests", "for ten minutes")
"""Ways to measure a rate."""


def gpts(seed: int, scenario: Scenario = HEAD, lasting: Sequence[str] = LASTING) -> Iterator[Point]:
    """Figure 17: four applications with different system prompts, on four A6000.

    The highest rate within 300 ms per token, measured in two ways. As in the paper, 500 requests,
    an equal number of each application, are sent at the rate. Or the later half of ten minutes of
    requests counts, which is stricter, because a short run ends before a queue has grown.
    """

    def by_number(setting: SimulationConfig) -> float:
        return highest_rate(
            lambda rate: per_token_s(outcomes(setting, gpts_sent(seed, rate), scenario))
        )

    def by_time(setting: SimulationConfig) -> float:
        def late_s(rate: float) -> float:
            sent = gpts_sent(seed, rate, round(GPTS_S * rate))
            return per_token_s(outcomes(setting, sent, scenario)[len(sent) // 2 :])

        return highest_rate(late_s)

    cost = scenario.a6000_7b
    common: Settings = {"num_engines": 4, "max_sequences": 120}
    settings = (
        scenario.ours(cost, seed, **common, capacity=48_000),
        scenario.baseline(cost, seed, **common, capacity=30_000),
        scenario.ours(cost, seed, **common, capacity=48_000, reads_shared_once=False),
    )
    for label in lasting:
        after, before, paged = map(by_number if label == LASTING[0] else by_time, settings)
        kept = {"is_rate": True, "is_least": after >= GPTS_RATE}
        yield Point(f"rate at 300 ms a token, {label}", 12.0, before, after, **kept)
        yield Point(f"prefixes read for every request, {label}", 2.4, paged, after, **kept)


def gpts_sent(seed: int, rate: float, number: int = GPTS_NUMBER) -> list[tuple[AppPlan, float]]:
    """Return requests at random times, an equal number of each application, shuffled."""
    draw = random.Random(f"gpts {seed}")
    names = [name for name in GPTS for _ in range(number // len(GPTS))]
    draw.shuffle(names)
    sent, at_s = [], 0.0
    for i, name in enumerate(names):
        sent.append((single(name, *GPTS[name], i), at_s))
        at_s += draw.expovariate(rate)
    return sent


def highest_rate(per_token_s: Callable[[float], float]) -> float:
    """Return the highest rate that meets the limit (within 4 %), at most the paper's highest."""
    low, high = 0.5, 1.0
    while per_token_s(high) <= BOUND_S:
        if high >= GPTS_RATE:
            return high
        low, high = high, high * 2
    while high / low > 1.04:
        middle = math.sqrt(low * high)
        if per_token_s(middle) <= BOUND_S:
            low = middle
        else:
            high = middle
    return low


CODING = {4: (3.0, 1.27), 8: (4.9, 1.58), 12: (7.19, 2.03), 16: (11.7, 2.45)}
"""Ratios to the latency baseline and to the throughput baseline, by number of files."""


def multi_agent_coding(
    seed: int, scenario: Scenario = HEAD, numbers: Iterable[int] = tuple(CODING)
) -> Iterator[Point]:
    """Figure 18: files written, reviewed and revised in rounds, on one A100."""
    cost = scenario.a100_13b
    return _coding(seed, scenario, numbers, (cost, dict.fromkeys(CODING, cost), cost))


def recorded_coding(seed: int) -> Iterator[Point]:
    """Figure 18 with recorded step times: each system has its own from that figure."""
    points = list(_coding(seed, HEAD, CODING, (CODING_OURS, CODING_LATENCY, CODING_THROUGHPUT)))
    yield from points
    again = _coding_s(HEAD.baseline(CODING_LATENCY_AGAIN, seed, capacity=7_096), 16, HEAD)
    yield Point("16 files, latency baseline, second run", 8.9, again, points[-1].after)


def _coding(
    seed: int,
    scenario: Scenario,
    numbers: Iterable[int],
    costs: tuple[LinearCosts, Mapping[int, LinearCosts], LinearCosts],
) -> Iterator[Point]:
    own, latency_costs, throughput_cost = costs
    for num_files in numbers:
        latency, throughput = CODING[num_files]
        seconds = [
            _coding_s(setting, num_files, scenario)
            for setting in (
                scenario.ours(own, seed, capacity=64_000),
                scenario.baseline(latency_costs[num_files], seed, capacity=7_096),
                scenario.baseline(throughput_cost, seed, capacity=64_000),
            )
        ]
        yield Point(f"{num_files} files, latency baseline", latency, seconds[1], seconds[0])
        yield Point(f"{num_files} files, throughput baseline", throughput, seconds[2], seconds[0])


def _coding_s(setting: SimulationConfig, num_files: int, scenario: Scenario) -> float:
    return mean_s(outcomes(setting, [(logged_coding(num_files), 0.0)], scenario))


def mixed(seed: int, scenario: Scenario = HEAD) -> Iterator[Point]:
    """Figure 19: one chat per second during bursts of map-reduce, on four A6000.

    A burst is three applications half a second apart. The next burst starts ten seconds after the
    last one. The first burst starts 15 s after the first chat, as in the artifact.
    """
    chats, bursts = mixed_sent(seed, scenario)
    cost = scenario.a6000_7b
    settings = {
        "latency": scenario.baseline(cost, seed, num_engines=4, capacity=4_096),
        "throughput": scenario.baseline(cost, seed, num_engines=4, capacity=53_000),
        "ours": scenario.limited(cost, seed, num_engines=4, capacity=53_000),
    }
    chat_s, batch_s = {}, {}
    for name, setting in settings.items():
        found = outcomes(setting, [*chats, *bursts], scenario)
        chat_s[name] = per_token_s(found[: len(chats)])
        batch_s[name] = mean_s(found[len(chats) :])
    for name, chat, batch in (("latency", 5.5, 3.7), ("throughput", 1.23, 1.05)):
        yield Point(f"chat, {name} baseline", chat, chat_s[name], chat_s["ours"])
        yield Point(f"map-reduce, {name} baseline", batch, batch_s[name], batch_s["ours"])


def mixed_sent(
    seed: int, scenario: Scenario = HEAD
) -> tuple[list[tuple[AppPlan, float]], list[tuple[AppPlan, float]]]:
    """Return the chats and the map-reduce applications of figure 19."""
    draw = random.Random(f"mixed {seed}")
    chats: list[tuple[AppPlan, float]] = []
    while len(chats) < 40:
        prompt = round(draw.lognormvariate(4.5, 1.3))
        output = round(draw.lognormvariate(5.2, 0.9))
        if prompt >= 4 and output >= 4 and prompt <= 1_024 and prompt + output <= 2_048:
            chats.append((single("", 0, prompt, output, len(chats)), float(len(chats))))
    tokens = draw.randint(*ARTICLE_TOKENS)
    bursts = [
        (map_reduce(tokens // 1_024, 1_024, 50, burst * 3 + i), at_s + 0.5 * i)
        for burst in range(3)
        for i in range(3)
        for at_s in (scenario.burst_start_s + burst * (1.0 + scenario.burst_gap_s),)
    ]
    return chats, bursts


Workload = Callable[[int, Scenario], Iterator[Point]]
"""A workload for a seed in a scenario."""

WORKLOADS: dict[str, Workload] = {
    "chain summary": chain_summary,
    "chain summary with background load": chain_with_background,
    "many chain summaries at once": many_chains,
    "map-reduce summary": map_reduce_summary,
    "shared system prompt": shared_system_prompt,
    "four GPTs applications": gpts,
    "multi-agent coding": multi_agent_coding,
    "mixed chat and map-reduce": mixed,
}
RECORDED: dict[str, Callable[[int], Iterator[Point]]] = {
    "shared system prompt, recorded step times": recorded_shared_prompt,
    "multi-agent coding, recorded step times": recorded_coding,
}
"""The cross-check: each system with the step times that were recorded for it."""
