"""The six workloads on real engines: the same application, sent in several ways.

    requests     HTTP, one request for each call, to Conure
    whole        HTTP, one program, to Conure
    langchain    a LangChain chain on `ChatConure`
    openai       the same chain on `ChatOpenAI`, to Conure
    accelerated  the chain on `ChatConure` with `accelerate`
    program      the chain on `ChatConure`, compiled by `to_program`
    peer         the chain on `ChatOpenAI`, to vLLM (--peer)

    whole-without-order, -holds, -order-and-holds, -starts-between-ends
                 `whole` without the order by remaining work, without held programs, without both,
                 and with waiting calls that start only when another call ends

The working set is the maximum number of blocks that `requests` holds at once with unlimited memory.
The pool is a percentage of the working set, but has room for the longest call. Each system has its
own server with equal options, all get the same prompts in a round and write the same number of
tokens, and no two rounds have texts in common. Systems take turns in an order that alternates. The
first round is not counted. Systems that share an engine and send the same prompts must write the
same texts; a difference ends the benchmark, unless the logits of the model's two best tokens differ
by rounding only (`ties`). The record has the number of such texts.

`openai` and `peer` need the package `langchain-openai` beside Conure. vLLM gets the same folder,
type of weights, threads and number of KV blocks.

    python benchmarks/matrix/run.py [--only WORKLOAD] [--system NAME] [--programs N ...]
        [--pool PERCENT ...] [--round-trip MS ...] [--rounds N] [--simulated]
        [--model FOLDER] [--peer PYTHON] [--option=OPTION ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from apps.client import AppAnswer, AppClient
from apps.scaled_workloads import CONTEXT_LEN, SCALED, ScheduledProgram, at_once
from conure.engine.testing import random_model
from matrix import ties
from matrix.page import ratios
from matrix.systems import OPENAI_CLIENTS, SAME_PROMPTS, SYSTEMS, WITHOUT, Side, side_of
from matrix.vllm_server import vllm_counters, vllm_served
from temporary_server import served

BLOCK = 16
ROOMY = 8_192
"""Blocks of an engine whose memory is never full."""
UNBOUNDED = ("--max-wait-s", "0")
"""Eight programs at once, request by request, would be refused: they wait for over two seconds."""
REAL = ("--engine", "local", "--dtype", "float32", "--threads", "1", *UNBOUNDED)
SIMULATED = (
    *("--engine", "fake", *UNBOUNDED, "--time-per-prompt-token", "1e-4", "--max-sequences", "16"),
    *("--time-per-output-token", "3.5e-3", "--step-tokens", "512"),
)
"""Steps sleep about as long as those of the seeded model take."""


class CellSetting(NamedTuple):
    """What all systems of a cell have in common."""

    workload: str
    programs: int
    pool: int
    """Percent of the working set; 100 is memory that is never full."""
    blocks: int
    round_trip_ms: float


class Work(NamedTuple):
    """What a server has done since its start."""

    steps: int
    computed: int
    """Prompt tokens that were computed for the first time."""
    recomputed: int | None
    """Tokens that were computed again; None for vLLM, which does not report them."""

    def since(self, before: Work) -> Work:
        """Return the work after an earlier state."""
        recomputed = None
        if self.recomputed is not None and before.recomputed is not None:
            recomputed = self.recomputed - before.recomputed
        return Work(self.steps - before.steps, self.computed - before.computed, recomputed)


class Round(NamedTuple):
    """One round of one system."""

    answers: list[AppAnswer]
    wall_s: float
    work: Work


def measure(
    side: Side, sent: Sequence[ScheduledProgram], text_seed: str, loop: asyncio.Runner
) -> Round:
    """Run programs once on one system; their texts are generated from `text_seed`."""

    async def run() -> tuple[list[AppAnswer], float]:
        began = time.perf_counter()
        answers = await side.run(sent, text_seed)
        return answers, time.perf_counter() - began

    before = work_of(side.url)
    answers, wall_s = loop.run(run())
    return Round(answers, wall_s, work_of(side.url).since(before))


def work_of(url: str) -> Work:
    """Return the work of a Conure server or of vLLM since its start."""
    found = httpx.get(f"{url}/v1/engines", timeout=30)
    if found.is_success:
        engines = [each["counters"] for each in found.json()["engines"]]
        names = ("num_steps", "num_computed_tokens", "num_recomputed_tokens")
        return Work(*(sum(each[name] for each in engines) for name in names))
    return Work(*vllm_counters(url), None)


# --- working sets ----------------------------------------------------------------------------


def working_set(engine: Sequence[str], name: str, programs: int) -> int:
    """Return the most blocks that `requests` holds when memory is unlimited."""
    with served(*engine, "--num-blocks", str(ROOMY)) as url:
        return asyncio.run(_peak_held(url, name, programs))


async def _peak_held(url: str, name: str, programs: int) -> int:
    peak = 0
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        client = AppClient(http, whole=False, round_trip_s=0.0)
        running = asyncio.create_task(client.run(at_once(name, 0, programs), "peak"))
        while not running.done():
            engines = (await http.get("/v1/engines")).json()["engines"]
            peak = max([peak, *(engine["counters"]["num_held"] for engine in engines)])
            await asyncio.sleep(0.01)
        await running
    return peak


def longest_call(name: str, programs: int) -> int:
    """Return the blocks that the longest call of a workload needs by itself."""
    calls = (
        call.num_prompt + call.num_output + 1
        for sent in at_once(name, 0, programs)
        for call in sent.plan.blueprint.calls.values()
    )
    return math.ceil(max(calls) * 1.15 / BLOCK)


# --- cells --------------------------------------------------------------------------------


def summary(results: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of one system over all rounds; seconds of a program by kind and of all."""
    kinds = dict.fromkeys(answer.kind for result in results for answer in result.answers)
    cell: dict[str, Any] = {
        "wall_s": _spread([result.wall_s for result in results]),
        "walls": [result.wall_s for result in results],
        "steps": statistics.median(result.work.steps for result in results),
        "computed": statistics.median(result.work.computed for result in results),
        "recomputed": _median([result.work.recomputed for result in results]),
        "programs": {},
    }
    for kind in [*kinds, "all"]:
        taken = [
            sorted(a.took_s for a in result.answers if kind in ("all", a.kind))
            for result in results
        ]
        every = sorted(took_s for each in taken for took_s in each)
        cell["programs"][kind] = {
            "mean_s": _spread([statistics.fmean(each) for each in taken]),
            "p50_s": statistics.median(every),
            "p99_s": every[math.ceil(0.99 * len(every)) - 1],
            "means": [statistics.fmean(each) for each in taken],
        }
    return cell


def _median(numbers: Sequence[int | None]) -> float | None:
    counted = [number for number in numbers if number is not None]
    return statistics.median(counted) if counted else None


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def different_texts(results: dict[str, Round]) -> Iterator[tuple[str, str, int]]:
    """Yield each pair of systems that send the same prompts, with the index of an application for
    which their texts differ.
    """
    for group in SAME_PROMPTS:
        first, *others = [name for name in group if name in results] or [""]
        for other in others:
            pairs = zip(results[first].answers, results[other].answers, strict=True)
            for number, (ours, theirs) in enumerate(pairs):
                if any(ours.texts[name] != text for name, text in theirs.texts.items()):
                    yield first, other, number


def count_ties(
    results: dict[str, Round],
    sent: Sequence[ScheduledProgram],
    text_seed: str,
    urls: dict[str, str],
) -> int:
    """Return how many texts differ by rounding alone.

    Args:
        results: of one round, by system.
        sent: the programs of the round, in the order of the answers.
        text_seed: the seed of their texts.
        urls: the systems' servers.

    Raises:
        SystemExit: if a text differs by more than rounding, or if the systems are LangChain chains,
            whose prompts are not known.
    """
    num_ties = 0
    for first, second, number in different_texts(results):
        found: int | None = None
        if first == "requests":
            program = sent[number].plan.written(text_seed)
            theirs = ties.texts_of(urls[second], results[second].answers[number].program)
            ours = results[first].answers[number].texts
            found = ties.count_ties(urls[first], program, ours, theirs)
        if found is None:
            raise SystemExit(f"{first} and {second} wrote different texts")
        num_ties += found
    return num_ties


def run_cell(
    sides: Sequence[Side], setting: CellSetting, rounds: int, loop: asyncio.Runner
) -> tuple[dict[str, dict[str, Any]], int]:
    """Run all systems round by round, in an order that alternates.

    Returns:
        The figures of each system, and the number of texts that differ by rounding.
    """
    found: dict[str, list[Round]] = {side.name: [] for side in sides}
    urls = {side.name: side.url for side in sides}
    num_ties = 0
    for seed in range(rounds + 1):
        sent = at_once(setting.workload, seed, setting.programs)
        text_seed = "-".join(str(part) for part in (*setting, seed))
        results = {}
        for side in sides if seed % 2 else sides[::-1]:
            results[side.name] = measure(side, sent, text_seed, loop)
        num_ties += count_ties(results, sent, text_seed, urls)
        if seed:
            for each, result in results.items():
                found[each].append(result)
    return {each: summary(results) for each, results in found.items()}, num_ties


def line_of(setting: CellSetting, cell: dict[str, dict[str, Any]]) -> str:
    """Return one line for the terminal."""
    name, programs, pool, _, round_trip_ms = setting
    parts = [f"{name:26} x{programs} {pool:3} % {round_trip_ms:g} ms"]
    first = next(iter(cell.values()))
    for system, figures in cell.items():
        for kind, seconds in figures["programs"].items():
            if len(figures["programs"]) > 2 or kind == "all":
                text = f"{system} {kind} {seconds['mean_s']['median']:.3f}"
                if figures is not first:
                    text += f" ({statistics.median(ratios(first, figures, kind)):.2f}x)"
                parts.append(text)
        counted = f"{figures['steps']:g} steps {figures['computed']:g}+{figures['recomputed']}"
        parts.append(f"wall {figures['wall_s']['median']:.2f} {counted}")
    return " | ".join(parts)


def settings_of(options: argparse.Namespace, engine: Sequence[str]) -> Iterator[CellSetting]:
    """Yield the settings; a working set is measured where a pool depends on it."""
    names: Sequence[str] = options.only or tuple(SCALED)
    numbers: Sequence[int] = options.programs
    for name, programs in itertools.product(names, numbers):
        peak = 0
        if min(options.pool) < 100:
            peak = working_set((*engine, "--context-len", str(CONTEXT_LEN)), name, programs)
        for pool in options.pool:
            share = max(math.ceil(peak * pool / 100), longest_call(name, programs))
            for round_trip_ms in options.round_trip:
                blocks = ROOMY if pool == 100 else share
                yield CellSetting(name, programs, pool, blocks, round_trip_ms)


class Servers:
    """The servers of all systems. Servers with `ROOMY` blocks are kept for other workloads."""

    def __init__(self, model: str, engine: Sequence[str], peer: str, stack: ExitStack) -> None:
        self._model = model
        self._engine = engine
        self._peer = peer
        self._roomy = stack
        self._small = stack.enter_context(ExitStack())
        self._urls: dict[tuple[str, int], str] = {}

    def url(self, system: str, blocks: int) -> str:
        """Return the server of a system, started if it does not run."""
        if (system, blocks) not in self._urls:
            stack = self._roomy if blocks == ROOMY else self._small
            server = self._started(system, blocks, min(CONTEXT_LEN, blocks * BLOCK))
            self._urls[system, blocks] = stack.enter_context(server)
        return self._urls[system, blocks]

    def _started(self, system: str, blocks: int, context_len: int) -> AbstractContextManager[str]:
        if system == "peer":
            return vllm_served(
                self._peer,
                Path(self._model),
                num_tokens=blocks * BLOCK,
                context_len=context_len,
                dtype="float32",
                threads=1,
            )
        limits = ("--num-blocks", str(blocks), "--context-len", str(context_len))
        options = (*self._engine, *limits)
        if system.startswith(WITHOUT):
            script = str(Path(__file__).with_name("ablated_server.py"))
            return served(*options, program=(script, system.removeprefix(WITHOUT)))
        return served(*options)

    def end_small(self) -> None:
        """Stop the servers with little memory."""
        self._small.close()
        self._urls = {key: url for key, url in self._urls.items() if key[1] == ROOMY}


def main(arguments: Sequence[str]) -> int:
    """Run the cells, print a line each, write the record."""
    options = _parse(arguments)
    # `timeout` sends SIGTERM; the servers must end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    systems = options.system or ["requests", "whole"]
    model = options.model or str(random_model.create_cached())
    settings = (*(SIMULATED if options.simulated else REAL), *options.option)
    engine = settings if options.simulated else (model, *settings)
    record = {**machine(), "engine": settings, "model": options.model, "rounds": options.rounds}
    record["cells"] = []
    with ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner())
        servers = Servers(model, engine, options.peer, stack)
        latest = ROOMY
        for setting in settings_of(options, engine):
            if setting.blocks != latest:
                servers.end_small()
            latest = setting.blocks
            trip_s = setting.round_trip_ms / 1e3
            with ExitStack() as chains:
                sides = [
                    chains.enter_context(side_of(each, servers.url(each, latest), trip_s, loop))
                    for each in systems
                ]
                load = os.getloadavg()[0]
                cell, num_ties = run_cell(sides, setting, options.rounds, loop)
            print(line_of(setting, cell), flush=True)
            if num_ties:
                print(f"{num_ties} texts differ by rounding", flush=True)
            counted = {"load": load, "ties": num_ties}
            record["cells"].append({**setting._asdict(), **counted, "systems": cell})
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def machine() -> dict[str, Any]:
    """Return the processor and the number of its cores."""
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {"processor": next(names, platform.machine()), "cores": os.cpu_count()}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=tuple(SCALED), action="append")
    parser.add_argument("--system", choices=SYSTEMS, action="append")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pool", type=int, nargs="+", default=[100, 66, 40])
    parser.add_argument("--round-trip", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulated", action="store_true", help="simulated engines")
    parser.add_argument("--model", help="a folder; default: the seeded model")
    parser.add_argument(
        "--peer", metavar="PYTHON", help="Python interpreter of an environment with vLLM"
    )
    parser.add_argument("--option", action="append", default=[], help="passed to `conure serve`")
    parser.add_argument("--out", type=Path, help="where the record goes, as JSON")
    options = parser.parse_args(arguments)
    systems = options.system or ()
    if (options.peer is not None) != ("peer" in systems):
        parser.error("--peer and --system peer need each other")
    if any(name in systems for name in OPENAI_CLIENTS) and not find_spec("langchain_openai"):
        parser.error("the systems openai and peer need the package langchain-openai")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
