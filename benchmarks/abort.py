"""Time from a decision to the abort frame for the losing call of a race, on a busy server.

A race consists of a long call and a client step; the client's answer decides it. Other programs run
at the same time to keep the event loop busy. The measured time begins before the winner's value is
committed in memory, and ends after the abort frame is written. (A running engine step is not
included, because the engine reads frames between steps.)

    python benchmarks/abort.py [--races N] [--beside N]

The processor time of the event loop's thread is reported as well: unlike the elapsed time, it
excludes the time in which other processes run.

The benchmark runs in one process with the server, on the fake engine at 5 ms per step.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from conure.engine import protocol
from conure.server.config import Config
from conure.server.engines.connection import EngineConnection
from conure.server.executor import Executor
from conure.server.program.ir import Submission
from conure.server.program.status import PutValue
from conure.server.runtime.node_context import NodeContext

TENANT = "t"
TARGET_MS = 5.0
WAIT_S = 30.0


class AbortTimer:
    """Measures the time from the decision of each race to its abort frame."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.processor_s: list[float] = []
        self._decided: dict[str, tuple[float, float]] = {}
        publish, flush = NodeContext.publish, EngineConnection._flush

        def timed_publish(context: NodeContext, variable: str, *rest: Any, **named: Any) -> Any:
            if variable == "fast":
                self._decided[context.state.id] = (time.perf_counter(), time.thread_time())
            return publish(context, variable, *rest, **named)

        def timed_flush(engine: EngineConnection) -> None:
            num_aborts = sum(isinstance(each, protocol.Abort) for each in engine._outgoing)
            flush(engine)
            now, processor_now = time.perf_counter(), time.thread_time()
            for race in list(self._decided)[:num_aborts]:
                at_s, processor_at_s = self._decided.pop(race)
                self.took_s.append(now - at_s)
                self.processor_s.append(processor_now - processor_at_s)

        setattr(NodeContext, "publish", timed_publish)  # noqa: B010 - mypy forbids an assignment
        setattr(EngineConnection, "_flush", timed_flush)  # noqa: B010


def _say(name: str, text: str, num_tokens: int) -> dict[str, Any]:
    output = {"output": name, "max_tokens": num_tokens, "ignore_eos": True}
    return {"id": name, "op": "generate", "prompt": [{"text": text}, output]}


RACE: dict[str, Any] = {
    "nodes": [
        _say("slow", "Tell me everything. ", 4_000),
        {"id": "ask", "op": "client", "name": "ask", "output": "fast"},
        {"id": "first", "op": "wait", "variables": ["slow", "fast"], "mode": "any"},
        {"id": "loser", "op": "kill", "targets": ["slow"], "after": ["first"]},
        {"id": "pick", "op": "expr", "expr": {"var": "fast"}, "output": "pick"},
    ],
    "outputs": ["pick"],
}
BACKGROUND: dict[str, Any] = {
    "nodes": [_say(f"c{i}", f"Item {i} of many. " * 20, 40) for i in range(16)],
    "outputs": [f"c{i}" for i in range(16)],
}


async def submit(executor: Executor, program: dict[str, Any]) -> str:
    """Submit a program; return its id."""
    raw = msgspec.json.encode({"program": program})
    accepted, _ = await executor.submit(
        msgspec.json.decode(raw, type=Submission), body=raw, tenant=TENANT
    )
    return accepted.id


async def race(executor: Executor) -> None:
    """Run one race: the client answers once the losing call generates text."""
    program = await submit(executor, RACE)
    asked = None
    async for event in executor.events(program, tenant=TENANT, after=0):
        if event.type == "client.requested":
            asked = str(event.data["request_id"])
        if event.type == "node.delta" and asked is not None:
            await executor.put(
                program, "fast", PutValue(value="won", request_id=asked), tenant=TENANT
            )
            asked = None
    status = await executor.status(program, tenant=TENANT)
    if status.nodes["slow"].status != "killed":
        raise SystemExit(f"the loser was not killed but {status.nodes['slow'].status}")


async def work(executor: Executor) -> None:
    """Run programs one after another until cancelled."""
    while True:
        program = await submit(executor, BACKGROUND)
        for name in BACKGROUND["outputs"]:
            await executor.get(program, name, tenant=TENANT, wait_s=WAIT_S)


async def measure(num_races: int, num_background: int) -> AbortTimer:
    """Return the timer, with the seconds from decision to frame for every race."""
    watch = AbortTimer()
    with tempfile.TemporaryDirectory(prefix="conure-") as data:
        config = Config(data=Path(data), engine="fake", time_per_output_token=0.005)
        executor = Executor(config)
        await executor.start()
        background = [asyncio.create_task(work(executor)) for _ in range(num_background)]
        try:
            for _ in range(num_races):
                await race(executor)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await executor.stop()
    return watch


def main() -> int:
    """Print the figures; return 0 if the 99th percentile meets its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--races", type=int, default=300, help="at least 2 (300)")
    parser.add_argument("--beside", type=int, default=4, help="programs of 16 calls each")
    arguments = parser.parse_args()
    if arguments.races < 2:
        parser.error("--races must be at least 2")
    watch = asyncio.run(measure(arguments.races, arguments.beside))
    took_ms = [1e3 * s for s in watch.took_s]
    if len(took_ms) != arguments.races:
        raise SystemExit(f"{len(took_ms)} aborts were seen of {arguments.races} races")
    p99 = statistics.quantiles(took_ms, n=100)[98]
    verdict = "met" if p99 <= TARGET_MS else "MISSED"
    print(
        f"decision to frame, {arguments.races} races next to {arguments.beside} programs of 16 "
        f"calls: median {statistics.median(took_ms):.2f} ms, p99 {p99:.2f}, "
        f"max {max(took_ms):.2f}; target {TARGET_MS:g}: {verdict}"
    )
    processor_ms = [1e3 * s for s in watch.processor_s]
    print(
        f"of this, processor time of the loop: median {statistics.median(processor_ms):.2f} ms, "
        f"p99 {statistics.quantiles(processor_ms, n=100)[98]:.2f}, max {max(processor_ms):.2f}"
    )
    return int(p99 > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
