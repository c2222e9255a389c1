"""Gain and cost of `accelerate` for a LangChain app, measured in the app.

    wide     RunnableParallel of 20 calls, followed by one call that reads them
    chain    8 calls, each reading the previous one
    real     the same on the built-in model, with answers of 16 tokens
    map      `.map()` over 4 inputs whose slow call is the first or the second of two
    call     processor time of the app per additional call, relative to the same chain on a
             model that answers immediately in the same process
    token    the same per additional token of a streamed answer

    python benchmarks/accelerated.py [--repeats N] [--round-trip S] [--scale N] [--only NAME]

A server is `conure serve --engine fake`, except in `real`, with a proxy
(`conure.cli.delayed_connection`) that adds the round trip. A call takes 20 ms; in `map` it takes as
long as its answer. The ideal is the time of consecutive calls plus one round trip. For `chain`, the
saved round trips alone make 1.95 (360 ms to 185 ms); the plain chain also has the work of its other
requests. Plain and accelerated chain run in turns; nothing is
subtracted from times, and the first pair is not counted. `--scale` multiplies all simulated times,
so that the processor time of a busy machine is a smaller part of them. Processor times are measured
without the proxy; the cost is the difference to the same chain with an in-process model.

A figure of `wide`, `chain`, `real` or `map` is reported only if the accelerated chain returns the
plain chain's output and all of its calls were planned.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from conure.cli.delayed_connection import delayed
from temporary_server import served

CALL_S = 0.020
WIDTH = 20
LENGTH = 8
TOKEN_S = 0.005
SLOW, QUICK = 32, 8
"""Tokens of the answers in `map`, including the end of the answer."""
NUM_TOKENS = 400
REAL_TOKENS = 16


class Figure(NamedTuple):
    """Figures of one measurement; `bound` is the promised bound of `value`."""

    name: str
    value: float
    unit: str
    bound: str
    is_met: bool
    detail: str

    def line(self) -> str:
        """Return one line of the table."""
        verdict = "met" if self.is_met else "MISSED"
        figure = f"{self.name:6} {self.value:7.2f} {self.unit:14} {self.bound:8} {verdict:7}"
        return f"{figure} {self.detail}"


def ask(template: str, llm: BaseChatModel) -> Runnable[Any, str]:
    """Return a prompt, the model and a text parser."""
    return PromptTemplate.from_template(template) | llm | StrOutputParser()


def wide(llm: BaseChatModel) -> Runnable[Any, str]:
    """Return many parallel calls, and one that reads them."""
    sides = {f"p{i}": ask(f"Side {i} of {{topic}}", llm) for i in range(WIDTH)}
    return RunnableParallel(sides) | ask(" ".join(f"{{p{i}}}" for i in range(WIDTH)), llm)


def chain(llm: BaseChatModel, length: int = LENGTH) -> Runnable[Any, str]:
    """Return a chain of consecutive calls."""
    whole = ask("Begin with {topic}", llm)
    for _ in range(length - 1):
        whole = {"text": whole} | ask("Go on: {text}", llm)
    return whole


def mapped(llm: BaseChatModel) -> Runnable[Any, list[str]]:
    """Return two calls for each input."""
    first = RunnablePassthrough.assign(draft=ask("First {first}", llm))
    return (first | ask("Second {second} {draft}", llm)).map()


UNEVEN = [
    {"first": speeds[0], "second": speeds[1], "item": i}
    for i, speeds in enumerate([("slow", "quick"), ("quick", "slow")] * 2)
]
SCRIPT = [
    {"match": "(First|Second) slow", "text": "s" * (SLOW - 1)},
    {"text": "q" * (QUICK - 1)},
]


@contextmanager
def model(
    round_trip_s: float, *options: str, engine: str = "fake", max_tokens: int = 2 * NUM_TOKENS
) -> Iterator[ChatConure]:
    """Yield a model on a temporary server with the given round trip."""
    with (
        served("--engine", engine, *options) as url,
        delayed(url, round_trip_s) as proxied_url,
        Client(proxied_url if round_trip_s else url) as client,
    ):
        yield ChatConure(client=client, temperature=0, max_tokens=max_tokens)


def clocked(run: Callable[[], Any]) -> float:
    """Return the seconds of a run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compared(
    make: Callable[[ChatConure], Runnable[Any, Any]], llm: ChatConure, given: Any, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of the plain and of the accelerated chain, which run in turns."""
    plain, fast = make(llm), accelerate(make(llm), model=llm)
    if plain.invoke(given) != fast.invoke(given):
        raise SystemExit("the accelerated chain's output differs from the plain chain's")
    plain_s, fast_s = [], []
    for _ in range(repeats):
        plain_s.append(clocked(lambda: plain.invoke(given)))
        fast_s.append(clocked(lambda: fast.invoke(given)))
    for run in fast.explain().runs:
        if run.misses or run.refusals or run.num_served != run.num_planned:
            raise SystemExit(
                f"some calls of the accelerated chain were not planned:\n{fast.explain()}"
            )
    return plain_s, fast_s


def ratio_to_ideal(
    name: str, ideal_s: float, most: float, times: tuple[list[float], list[float]]
) -> Figure:
    """Return the ratio of the accelerated chain to its ideal time."""
    plain, fast = times
    ratio = statistics.median(fast) / ideal_s
    detail = f"{_ms(fast)}; ideal {1000 * ideal_s:.0f}; plain {_ms(plain)}"
    return Figure(name, ratio, "x the ideal", f"<= {most:g}", ratio <= most, detail)


def _ms(taken: Sequence[float]) -> str:
    middle = statistics.median(taken)
    return f"{1000 * middle:.1f} ms ({1000 * min(taken):.1f} to {1000 * max(taken):.1f})"


class MeasurementSetting(NamedTuple):
    """What a measurement simulates."""

    repeats: int
    round_trip_s: float
    scale: float

    @property
    def call_s(self) -> float:
        """Time of a call."""
        return self.scale * CALL_S

    @property
    def token_s(self) -> float:
        """Time of an output token in `map`."""
        return self.scale * TOKEN_S


def measure_wide(setting: MeasurementSetting) -> Figure:
    """Measure a wide stage and a call that reads it."""
    with model(setting.round_trip_s, "--time-per-call", str(setting.call_s)) as llm:
        times = compared(wide, llm, {"topic": "tea"}, setting.repeats)
    return ratio_to_ideal("wide", 2 * setting.call_s + setting.round_trip_s, 1.3, times)


def measure_chain(setting: MeasurementSetting) -> Figure:
    """Measure consecutive calls; the promise is the speedup."""
    with model(setting.round_trip_s, "--time-per-call", str(setting.call_s)) as llm:
        return _speedup_of_chain("chain", llm, setting)


def measure_real(setting: MeasurementSetting) -> Figure:
    """Measure consecutive calls on the built-in model; only the round trip is simulated."""
    with model(setting.round_trip_s, engine="local", max_tokens=REAL_TOKENS) as llm:
        return _speedup_of_chain("real", llm, setting)


def _speedup_of_chain(name: str, llm: ChatConure, setting: MeasurementSetting) -> Figure:
    plain, fast = compared(chain, llm, {"topic": "tea"}, setting.repeats)
    gain = statistics.median(p / f for p, f in zip(plain, fast, strict=True))
    detail = f"{_ms(fast)}; plain {_ms(plain)}"
    return Figure(name, gain, "x as fast", ">= 2", gain >= 2, detail)


def measure_map(setting: MeasurementSetting) -> Figure:
    """Measure uneven items, which must not wait for the slow step of another item."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as script:
        json.dump(SCRIPT, script)
        script.flush()
        options = ("--time-per-output-token", str(setting.token_s), "--script", script.name)
        with model(setting.round_trip_s, *options) as llm:
            times = compared(mapped, llm, UNEVEN, setting.repeats)
    ideal_s = (SLOW + QUICK) * setting.token_s + setting.round_trip_s
    return ratio_to_ideal("map", ideal_s, 1.2, times)


def measure_call(setting: MeasurementSetting) -> Figure:
    """Measure the processor time of the app for an additional call."""
    with model(0.0) as llm:
        fast = accelerate(wide(llm), model=llm)
        answer = fast.invoke({"topic": "tea"})
        ours = _processor_s(lambda: fast.invoke({"topic": "tea"}), setting.repeats)
    here = wide(GenericFakeChatModel(messages=itertools.repeat(AIMessage(answer))))
    theirs = _processor_s(lambda: here.invoke({"topic": "tea"}), setting.repeats)
    added_ms = 1000 * (ours - theirs) / (WIDTH + 1)
    detail = f"{1e3 * ours:.1f} ms for {WIDTH + 1} calls; {1e3 * theirs:.1f} ms without a server"
    return Figure("call", added_ms, "ms added", "<= 1", added_ms <= 1, detail)


def measure_token(setting: MeasurementSetting) -> Figure:
    """Measure the processor time of the app for an additional streamed token.

    Tokens arrive as fast as the server produces them. Tokens that arrive one by one cost more,
    one wake-up each; the detail reports that figure too.
    """
    paced_ms, num_pieces = _streamed_ms("0.002", setting.repeats)
    ours_ms, _ = _streamed_ms("0", setting.repeats)
    here = GenericFakeChatModel(
        messages=itertools.repeat(AIMessage(" ".join(["a"] * (num_pieces // 2))))
    )
    num_here = sum(1 for _ in here.stream("tea"))
    theirs_ms = 1000 * _processor_s(lambda: list(here.stream("tea")), setting.repeats) / num_here
    added_ms = ours_ms - theirs_ms
    detail = f"{theirs_ms:.3f} ms each without a server; {paced_ms:.3f} ms at one in 2 ms"
    return Figure("token", added_ms, "ms added", "<= 0.1", added_ms <= 0.1, detail)


def _streamed_ms(time_per_token: str, repeats: int) -> tuple[float, int]:
    """Return the processor time of the app per streamed token in ms, and the number of chunks."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as script:
        json.dump([{"text": "abc " * (NUM_TOKENS // 4)}], script)
        script.flush()
        options = ("--script", script.name, "--time-per-output-token", time_per_token)
        with model(0.0, *options) as llm:
            num_pieces = sum(1 for _ in llm.stream("tea"))
            taken_s = _processor_s(lambda: list(llm.stream("tea")), min(repeats, 5))
    return 1000 * taken_s / NUM_TOKENS, num_pieces


def _processor_s(run: Callable[[], Any], repeats: int) -> float:
    """Return the median processor time of this process, all threads, after one run."""
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


MEASUREMENTS: dict[str, Callable[[MeasurementSetting], Figure]] = {
    "wide": measure_wide,
    "chain": measure_chain,
    "real": measure_real,
    "map": measure_map,
    "call": measure_call,
    "token": measure_token,
}


def main(arguments: Sequence[str]) -> int:
    """Measure and print; return 0 if every bound is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="counted runs (15)")
    parser.add_argument("--round-trip", type=float, default=0.025, help="seconds (0.025)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of simulated times (1)")
    parser.add_argument("--only", choices=tuple(MEASUREMENTS), action="append")
    options = parser.parse_args(arguments)
    if options.repeats < 3:
        parser.error("--repeats must be at least 3")
    setting = MeasurementSetting(options.repeats, options.scale * options.round_trip, options.scale)
    results = []
    for name in options.only or MEASUREMENTS:
        results.append(MEASUREMENTS[name](setting))
        print(results[-1].line(), flush=True)
    return int(not all(result.is_met for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
