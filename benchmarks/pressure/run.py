"""The six workloads where KV memory is short: the same application, sent in several ways.

    requests     HTTP, one request for each call, to Conure
    whole        HTTP, one program, to Conure
    langchain    a LangChain chain on `ChatConure`
    accelerated  the same chain with `accelerate`
    peer         the same chain on `ChatOpenAI` and another server (--peer)

    whole-without-order, -holds, -order-and-holds
                 `whole` without the order by remaining work, without held programs, without both

The pool is a share of the working set: the most blocks that `requests` holds at once when memory
is unlimited. Each system has its own server with equal options, all get the same prompts in
a round and write the same number of tokens, and no two rounds have texts in common. The first
round is not counted. Systems that share an engine must write the same texts.

    python benchmarks/pressure/run.py [--only WORKLOAD] [--system NAME] [--programs N ...]
        [--pool PERCENT ...] [--round-trip MS ...] [--rounds N] [--played]
        [--model FOLDER] [--peer URL] [--peer-model NAME] [--option=OPTION ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from apps.client import Answer, Client
from apps.scaled_workloads import CONTEXT_LEN, SCALED, ScheduledProgram, at_once
from temporary_server import served

BLOCK = 16
ROOMY = 8_192
"""Blocks of an engine whose memory is never full."""
SEEDED = ("seeded", "--engine", "local", "--dtype", "float32", "--threads", "1")
PLAYED = (
    *("--engine", "fake", "--time-per-prompt-token", "1e-4", "--max-sequences", "16"),
    *("--time-per-output-token", "3.5e-3", "--step-tokens", "512"),
)
"""Steps sleep about as long as those of the seeded model take."""
WITHOUT = "whole-without-"
SYSTEMS = (
    *("requests", "whole", "langchain", "accelerated", "peer"),
    *(f"{WITHOUT}{part}" for part in ("order", "holds", "order-and-holds")),
)
SAME_PROMPTS = (("requests", "whole"), ("langchain", "accelerated"))
"""Systems that send the same text to the same model."""

Run = Callable[[Sequence[ScheduledProgram], str], Awaitable[list[Answer]]]


class Setting(NamedTuple):
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
    recomputed: int


class Side(NamedTuple):
    """One system on its server."""

    name: str
    url: str
    run: Run


class Result(NamedTuple):
    """One round of one system."""

    answers: list[Answer]
    wall_s: float
    work: Work


def measure(side: Side, setting: Setting, seed: int) -> Result:
    """Run a workload once on one system."""
    sent = at_once(setting.workload, seed, setting.programs)
    texts = f"{setting} {seed}".replace(" ", "-")

    async def run() -> list[Answer]:
        return await side.run(sent, texts)

    before = work_of(side.url)
    began = time.perf_counter()
    answers = asyncio.run(run())
    wall_s = time.perf_counter() - began
    work = (after - then for after, then in zip(work_of(side.url), before, strict=True))
    return Result(answers, wall_s, Work(*work))


def work_of(url: str) -> Work:
    """Return the work of a server; of a foreign server, only the computed prompt tokens."""
    found = httpx.get(f"{url}/v1/engines", timeout=30)
    if found.is_success:
        engines = [each["counters"] for each in found.json()["engines"]]
        names = ("num_steps", "num_computed_tokens", "num_recomputed_tokens")
        return Work(*(sum(each[name] for each in engines) for name in names))
    metrics: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            metrics[name.partition("{")[0]] = float(value)
    cached = metrics.get("vllm:prefix_cache_hits_total", 0.0)
    return Work(0, round(metrics.get("vllm:prompt_tokens_total", 0.0) - cached), 0)


# --- systems ------------------------------------------------------------------------------


@contextmanager
def side_of(name: str, url: str, round_trip_s: float, peer_model: str | None) -> Iterator[Side]:
    """Yield a system; chains reach their server through a proxy that adds the round trip."""
    if name == "requests" or name.startswith("whole"):

        async def run(sent: Sequence[ScheduledProgram], seed: str) -> list[Answer]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
                client = Client(http, whole=name != "requests", round_trip_s=round_trip_s)
                return await client.run(sent, seed)

        yield Side(name, url, run)
        return
    from langchain_core.language_models import BaseChatModel

    from conure.adapters.client import Client as ConureClient
    from conure.adapters.langchain import ChatConure, accelerate
    from conure.cli.delayed_connection import delayed
    from pressure.chains import run_chains

    with ExitStack() as stack:
        far = stack.enter_context(delayed(url, round_trip_s)) if round_trip_s else url
        client = None if name == "peer" else stack.enter_context(ConureClient(far))

        def conure_model(max_tokens: int) -> BaseChatModel:
            return ChatConure(client=client, temperature=0, max_tokens=max_tokens, ignore_eos=True)

        def foreign_model(max_tokens: int) -> BaseChatModel:
            from langchain_openai import ChatOpenAI  # type: ignore[import-not-found,unused-ignore]

            found: BaseChatModel = ChatOpenAI(
                base_url=f"{far}/v1",
                api_key="none",
                model=peer_model or "default",
                temperature=0,
                max_tokens=max_tokens,
                extra_body={"ignore_eos": True},
                max_retries=0,
            )
            return found

        model = foreign_model if name == "peer" else conure_model

        async def run_all(sent: Sequence[ScheduledProgram], seed: str) -> list[Answer]:
            wrap = accelerate if name == "accelerated" else None
            return await run_chains(sent, seed, model, wrap)

        yield Side(name, url, run_all)


def _server(name: str, options: Sequence[str]) -> AbstractContextManager[str]:
    """Start the server of a system."""
    if name.startswith(WITHOUT):
        program = (str(Path(__file__).with_name("ablated_server.py")), name.removeprefix(WITHOUT))
        return served(*options, program=program)
    return served(*options)


def working_set(engine: Sequence[str], name: str, programs: int) -> int:
    """Return the most blocks that `requests` holds when memory is unlimited."""
    with served(*engine, "--num-blocks", str(ROOMY)) as url:
        return asyncio.run(_peak_held(url, name, programs))


async def _peak_held(url: str, name: str, programs: int) -> int:
    peak = 0
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        client = Client(http, whole=False, round_trip_s=0.0)
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


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of one system over all rounds; seconds of a program by kind and of all."""
    kinds = dict.fromkeys(answer.kind for result in results for answer in result.answers)
    cell: dict[str, Any] = {
        "wall_s": _spread([result.wall_s for result in results]),
        "steps": statistics.median(result.work.steps for result in results),
        "computed": statistics.median(result.work.computed for result in results),
        "recomputed": statistics.median(result.work.recomputed for result in results),
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


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def ratio(before: dict[str, Any], after: dict[str, Any], kind: str = "all") -> dict[str, float]:
    """Return how many times faster `after` is, from the mean seconds in the same round."""
    pairs = zip(before["programs"][kind]["means"], after["programs"][kind]["means"], strict=True)
    return _spread([old / new for old, new in pairs])


def check_texts(results: dict[str, Result]) -> None:
    """Raise unless systems that share an engine wrote the same texts."""
    for one, other in SAME_PROMPTS:
        if one in results and other in results:
            pairs = zip(results[one].answers, results[other].answers, strict=True)
            for ours, theirs in pairs:
                same = {name: ours.texts[name] for name in theirs.texts}
                if same != theirs.texts:
                    raise SystemExit(f"{one} and {other} wrote different texts")


def run_cell(sides: Sequence[Side], setting: Setting, rounds: int) -> dict[str, dict[str, Any]]:
    """Run all systems round by round, in an order that alternates."""
    found: dict[str, list[Result]] = {side.name: [] for side in sides}
    for seed in range(rounds + 1):
        results = {}
        for side in sides if seed % 2 else sides[::-1]:
            results[side.name] = measure(side, setting, seed)
        check_texts(results)
        if seed:
            for each, result in results.items():
                found[each].append(result)
    return {each: summary(results) for each, results in found.items()}


def line_of(setting: Setting, cell: dict[str, dict[str, Any]]) -> str:
    """Return one line for the terminal."""
    name, programs, pool, _, round_trip_ms = setting
    parts = [f"{name:26} x{programs} {pool:3} % {round_trip_ms:g} ms"]
    first = next(iter(cell.values()))
    for system, figures in cell.items():
        for kind, seconds in figures["programs"].items():
            if len(figures["programs"]) > 2 or kind == "all":
                text = f"{system} {kind} {seconds['mean_s']['median']:.3f}"
                if figures is not first:
                    text += f" ({ratio(first, figures, kind)['median']:.2f}x)"
                parts.append(text)
        counted = f"{figures['steps']:g} steps {figures['computed']:g}+{figures['recomputed']:g}"
        parts.append(f"wall {figures['wall_s']['median']:.2f} {counted}")
    return " | ".join(parts)


def settings_of(options: argparse.Namespace, engine: Sequence[str]) -> Iterator[Setting]:
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
                yield Setting(name, programs, pool, blocks, round_trip_ms)


class Servers:
    """The servers of all systems; those with full memory are kept for other workloads."""

    def __init__(self, engine: Sequence[str], peer: str | None, stack: ExitStack) -> None:
        self._engine = engine
        self._peer = peer
        self._roomy = stack
        self._small = stack.enter_context(ExitStack())
        self._urls: dict[tuple[str, int], str] = {}

    def url(self, system: str, blocks: int) -> str:
        """Return the server of a system, started if it does not run."""
        if system == "peer":
            assert self._peer is not None, "checked with the options"
            return self._peer
        if (system, blocks) not in self._urls:
            context_len = min(CONTEXT_LEN, blocks * BLOCK)
            limits = ("--num-blocks", str(blocks), "--context-len", str(context_len))
            stack = self._roomy if blocks == ROOMY else self._small
            server = _server(system, (*self._engine, *limits))
            self._urls[system, blocks] = stack.enter_context(server)
        return self._urls[system, blocks]

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
    model = (options.model, *SEEDED[1:]) if options.model else SEEDED
    engine = (*(PLAYED if options.played else model), *options.option)
    record: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = Servers(engine, options.peer, stack)
        latest = ROOMY
        for setting in settings_of(options, engine):
            if setting.blocks != latest:
                servers.end_small()
            latest = setting.blocks
            trip_s = setting.round_trip_ms / 1e3
            with ExitStack() as chains:
                sides = [
                    chains.enter_context(
                        side_of(each, servers.url(each, latest), trip_s, options.peer_model)
                    )
                    for each in systems
                ]
                cell = run_cell(sides, setting, options.rounds)
            print(line_of(setting, cell), flush=True)
            record.append({**setting._asdict(), "systems": cell})
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=tuple(SCALED), action="append")
    parser.add_argument("--system", choices=SYSTEMS, action="append")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pool", type=int, nargs="+", default=[100, 66, 40])
    parser.add_argument("--round-trip", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--played", action="store_true", help="engines that play their model")
    parser.add_argument("--model", help="a folder; default: the seeded model")
    parser.add_argument("--peer", help="URL of an OpenAI-compatible server on the same folder")
    parser.add_argument("--peer-model", help="the name under which it serves the model")
    parser.add_argument("--option", action="append", default=[], help="passed to `conure serve`")
    parser.add_argument("--out", type=Path, help="where the record goes, as JSON")
    options = parser.parse_args(arguments)
    if (options.peer is not None) != ("peer" in (options.system or ())):
        parser.error("--peer and --system peer need each other")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
