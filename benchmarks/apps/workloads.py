"""The six workloads of the paper: submissions, settings and measured quantities.

Each workload is a function of a seed that yields `Point`s. A point is one bar or mark of a
figure: the paper's ratio, and the simulated metrics of the baseline and of Conure. Lower metrics
are better, except for rates.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from conure.server.scheduling.scheduler import MAX_LOOKAHEAD_CALLS
from simulation.engine import LinearCosts
from simulation.simulation import ProgramOutcome, Simulation, SimulationConfig

from .programs import Plan, chain, logged_coding, map_reduce, single
from .setting import (
    A100_7B_PAGED,
    A100_7B_READ_ONCE,
    A100_13B,
    A6000_7B,
    CODING_LATENCY,
    CODING_LATENCY_AGAIN,
    CODING_OURS,
    CODING_THROUGHPUT,
    baseline,
    latency_tokens,
    ours,
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


Sent = Sequence[tuple[Plan, float]]

ARTICLE_TOKENS = (40_000, 85_000)
"""Tokens of an article.

Chosen so that a chain in chunks of 1,024 has 61 calls on average, which matches the difference
between the systems of figure 11 at 244 ms per round trip: 0.69 tokens per character for its
articles of 58,000 to 124,000 characters.
"""
SHORT_ARTICLE_TOKENS = (35_000, 60_000)
"""Tokens of an article of figure 12b, by the same factor (51,000 to 87,000 characters)."""


def outcomes(setting: SimulationConfig, sent: Sent) -> list[ProgramOutcome]:
    """Simulate programs that are submitted at given times."""
    simulation = Simulation(setting)
    found = [simulation.submit(plan.blueprint, at_s) for plan, at_s in sent]
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


def chain_summary(seed: int) -> Iterator[Point]:
    """Figure 11: one chain at a time, on one A100."""
    paper = [1.38, 1.21, 1.14, 1.11, 1.21, 1.20, 1.19]
    for (out, chunk), ratio in zip(SWEEP, paper, strict=True):
        before, after = (
            statistics.fmean(
                mean_s(outcomes(setting, [(chain(tokens // chunk, chunk, out), 0.0)]))
                for tokens in _articles(seed, 10)
            )
            for setting in (
                baseline(A100_13B, seed, capacity=4_096),
                ours(A100_13B, seed, capacity=4_096),
            )
        )
        yield Point(f"output {out}, chunk {chunk}", ratio, before, after)


def chain_with_background(seed: int) -> Iterator[Point]:
    """Figure 12a: one chain at a time, while single requests arrive at a given rate."""
    for rate, ratio in ((0.0, 1.21), (1.0, 1.19), (2.0, 1.31), (3.0, 1.79), (3.5, 2.38)):
        means = []
        for make in (baseline, ours):
            setting = make(A100_13B, seed, capacity=4_096)
            took = []
            for i, tokens in enumerate(_articles(seed, 10)):
                draw = random.Random(f"background {seed} {i}")
                sent = [(chain(tokens // 1_024, 1_024, 50), 0.0)]
                at_s = draw.expovariate(rate) if rate else math.inf
                while at_s < 400:
                    sent.append((single("", 0, 512, 50, 0), at_s))
                    at_s += draw.expovariate(rate)
                took.append(outcomes(setting, sent)[0].took_s)
            means.append(statistics.fmean(took))
        yield Point(f"{rate:g} background requests/s", ratio, means[0], means[1])


def many_chains(seed: int) -> Iterator[Point]:
    """Figure 12b: chains of different articles, all at once.

    Both systems have a capacity of 10,000 tokens, the largest that the authors' notes name for
    their baselines. That is four calls, with which both systems reproduce the paper's times (112.8,
    171.9, 234.7 and 292.9 s, and 81.7 to 174.6 s).
    """
    for number, ratio in ((10, 1.38), (15, 1.52), (20, 1.63), (25, 1.68)):
        sent = [
            (chain(tokens // 2_048, 2_048, 50, article), 0.0)
            for article, tokens in enumerate(_articles(seed, number, SHORT_ARTICLE_TOKENS))
        ]
        before, after = (
            mean_s(outcomes(make(A100_13B, seed, capacity=10_000), sent))
            for make in (baseline, ours)
        )
        yield Point(f"{number} apps", ratio, before, after)


def map_reduce_summary(seed: int) -> Iterator[Point]:
    """Figure 14: the baseline is limited to 4,096 tokens for latency; Conure needs no limit."""
    paper = [1.70, 2.04, 2.22, 2.37, 1.96, 2.07, 2.16]
    for (out, chunk), ratio in zip(SWEEP, paper, strict=True):
        before, after = (
            statistics.fmean(
                mean_s(outcomes(setting, [(map_reduce(tokens // chunk, chunk, out), 0.0)]))
                for tokens in _articles(seed, 10)
            )
            for setting in (
                baseline(A100_13B, seed, capacity=4_096),
                ours(A100_13B, seed, capacity=45_000, latency_tokens=latency_tokens(A100_13B)),
            )
        )
        yield Point(f"output {out}, chunk {chunk}", ratio, before, after)


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


def shared_system_prompt(seed: int) -> Iterator[Point]:
    """Figure 15: 64 requests with one long system prompt, in batches, on one A100.

    The baselines keep the prompt once but read it for every request, or keep it for every request.
    The figure has no network. Step times are those of the paper with a kernel that reads the prompt
    once, and with one that does not.
    """
    lengths = [pair[:2] for pair in COPILOT for _ in range(pair[2])]
    random.Random(f"copilot {seed}").shuffle(lengths)
    # The prompt is prefilled before any request arrives, as in the paper.
    sent = [(single("copilot", COPILOT_SYSTEM, 1, 1, -1), 0.0)]
    sent += [
        (single("copilot", COPILOT_SYSTEM, prompt - COPILOT_SYSTEM, output, i), COPILOT_LATER_S)
        for i, (prompt, output) in enumerate(lengths)
    ]

    def running_s(setting: SimulationConfig) -> float:
        return statistics.fmean(found.decode_s for found in outcomes(setting, sent)[1:])

    paper = {8: (1.1, 1.8), 16: (1.3, 2.4), 32: (1.4, math.nan), 64: (1.7, math.nan)}
    for batch, ratios in paper.items():
        common = {
            "max_sequences": batch - MAX_LOOKAHEAD_CALLS,
            "capacity": 10**9,
            "round_trip_s": lambda: 0.0,
        }
        after = running_s(ours(A100_7B_READ_ONCE, seed, **common))
        kept = common | {"policy": "conure", "has_prefix_cache": True}
        before = running_s(baseline(A100_7B_PAGED, seed, **kept))
        yield Point(f"batch {batch}, prefix stored once", ratios[0], before, after)
        if batch <= 16:  # With larger batches the paper's baseline ran out of memory.
            before = running_s(baseline(A100_7B_PAGED, seed, **common))
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


def gpts(seed: int) -> Iterator[Point]:
    """Figure 17: four applications with different system prompts, on four A6000.

    The highest rate within 300 ms per token, measured in two ways. As in the paper, 500 requests,
    an equal number of each application, are sent at the rate. Or the later half of ten minutes of
    requests counts, which is stricter, because a short run ends before a queue has grown.
    """

    def by_number(setting: SimulationConfig) -> float:
        return highest_rate(lambda rate: per_token_s(outcomes(setting, gpts_sent(seed, rate))))

    def by_time(setting: SimulationConfig) -> float:
        def late_s(rate: float) -> float:
            sent = gpts_sent(seed, rate, round(GPTS_S * rate))
            return per_token_s(outcomes(setting, sent)[len(sent) // 2 :])

        return highest_rate(late_s)

    common = {"num_engines": 4, "max_sequences": 120}
    settings = (
        ours(A6000_7B, seed, **common, capacity=48_000),
        baseline(A6000_7B, seed, **common, capacity=30_000),
        ours(A6000_7B, seed, **common, capacity=48_000, reads_shared_once=False),
    )
    for label, highest in (("500 requests", by_number), ("for ten minutes", by_time)):
        after, before, paged = map(highest, settings)
        kept = {"is_rate": True, "is_least": after >= GPTS_RATE}
        yield Point(f"rate at 300 ms a token, {label}", 12.0, before, after, **kept)
        yield Point(f"prefixes read for every request, {label}", 2.4, paged, after, **kept)


def gpts_sent(seed: int, rate: float, number: int = GPTS_NUMBER) -> list[tuple[Plan, float]]:
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


def multi_agent_coding(seed: int) -> Iterator[Point]:
    """Figure 18: files written, reviewed and revised in rounds, on one A100.

    Each system has its own step times from that figure.
    """
    points = list(_coding(seed, CODING_OURS, CODING_LATENCY, CODING_THROUGHPUT))
    yield from points
    again = _coding_s(baseline(CODING_LATENCY_AGAIN, seed, capacity=7_096), 16)
    yield Point("16 files, latency baseline, second run", 8.9, again, points[-1].after)


def coding_alike(seed: int) -> Iterator[Point]:
    """Figure 18 with one cost model for all systems, that of figures 10 and 14."""
    return _coding(seed, A100_13B, dict.fromkeys(CODING, A100_13B), A100_13B)


def _coding(
    seed: int,
    own: LinearCosts,
    latency_costs: Mapping[int, LinearCosts],
    throughput_cost: LinearCosts,
) -> Iterator[Point]:
    for num_files, (latency, throughput) in CODING.items():
        after = _coding_s(ours(own, seed, capacity=64_000), num_files)
        slow = _coding_s(baseline(latency_costs[num_files], seed, capacity=7_096), num_files)
        wide = _coding_s(baseline(throughput_cost, seed, capacity=64_000), num_files)
        yield Point(f"{num_files} files, latency baseline", latency, slow, after)
        yield Point(f"{num_files} files, throughput baseline", throughput, wide, after)


def _coding_s(setting: SimulationConfig, num_files: int) -> float:
    return mean_s(outcomes(setting, [(logged_coding(num_files), 0.0)]))


def mixed(seed: int) -> Iterator[Point]:
    """Figure 19: one chat per second during bursts of map-reduce, on four A6000.

    A burst is three applications half a second apart. The next burst starts ten seconds after the
    last one. The first burst starts with the chats: the artifact starts its second client 15 s
    after the first because that client has its data to load.
    """
    draw = random.Random(f"mixed {seed}")
    chats: list[tuple[Plan, float]] = []
    while len(chats) < 40:
        prompt = round(draw.lognormvariate(4.5, 1.3))
        output = round(draw.lognormvariate(5.2, 0.9))
        if prompt >= 4 and output >= 4 and prompt <= 1_024 and prompt + output <= 2_048:
            chats.append((single("", 0, prompt, output, len(chats)), float(len(chats))))
    tokens = draw.randint(*ARTICLE_TOKENS)
    bursts = [
        (map_reduce(tokens // 1_024, 1_024, 50, burst * 3 + i), at_s + 0.5 * i)
        for burst, at_s in enumerate((0.0, 11.0, 22.0))
        for i in range(3)
    ]
    common = {"num_engines": 4}
    settings = {
        "latency": baseline(A6000_7B, seed, **common, capacity=4_096),
        "throughput": baseline(A6000_7B, seed, **common, capacity=53_000),
        "ours": ours(
            A6000_7B, seed, **common, capacity=53_000, latency_tokens=latency_tokens(A6000_7B)
        ),
    }
    chat_s, batch_s = {}, {}
    for name, setting in settings.items():
        found = outcomes(setting, [*chats, *bursts])
        chat_s[name] = per_token_s(found[: len(chats)])
        batch_s[name] = mean_s(found[len(chats) :])
    for name, chat, batch in (("latency", 5.5, 3.7), ("throughput", 1.23, 1.05)):
        yield Point(f"chat, {name} baseline", chat, chat_s[name], chat_s["ours"])
        yield Point(f"map-reduce, {name} baseline", batch, batch_s[name], batch_s["ours"])


WORKLOADS: dict[str, Callable[[int], Iterator[Point]]] = {
    "chain summary": chain_summary,
    "chain summary with background load": chain_with_background,
    "many chain summaries at once": many_chains,
    "map-reduce summary": map_reduce_summary,
    "shared system prompt": shared_system_prompt,
    "four GPTs applications": gpts,
    "multi-agent coding": multi_agent_coding,
    "multi-agent coding, costs alike": coding_alike,
    "mixed chat and map-reduce": mixed,
}
