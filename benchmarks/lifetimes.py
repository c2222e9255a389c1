"""KV lifetimes and recomputed tokens, relative to an oracle with all future calls.

The multi-agent workload runs as whole programs on the real server and engine core, with scripted
text and fixed step times, in two thirds of the KV memory that it uses when memory is unlimited.
The engine records the blocks of each step; the oracles read the whole trace.

    python benchmarks/lifetimes.py [--programs N] [--files N] [--share X]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import conure.server.executor as executor_module
from apps.oracle import (
    StepTrace,
    block_seconds,
    last_use_block_seconds,
    next_use_num_recomputed,
)
from apps.programs import coding
from conure.server.config import Config
from conure.server.engines.command_line import EngineCommandLine
from conure.server.executor import Executor
from conure.server.program.ir import Submission

ENGINE = Path(__file__).parent / "apps" / "recorded_engine.py"
BLOCK = 16


@dataclass(frozen=True)
class RecordedCommandLine:
    """The command line of a recorded engine."""

    command: EngineCommandLine
    file: Path

    def argv(self, descriptor: int, heartbeat: int, epoch: int) -> list[str]:
        """See `EngineCommandLine.argv`."""
        python, _, _, *rest = self.command.argv(descriptor, heartbeat, epoch)
        return [python, str(ENGINE), str(self.file), *rest]


async def record(
    programs: list[dict[str, Any]], num_blocks: int | None, context_len: int
) -> list[StepTrace]:
    """Run all programs at once and return the trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace"

        def recorded(config: Config) -> Any:
            return RecordedCommandLine(EngineCommandLine(config), file)

        executor_module.EngineCommandLine = recorded  # type: ignore[attr-defined,assignment]
        config = Config(
            data=Path(folder) / "data",
            engine="fake",
            num_blocks=num_blocks,
            context_len=context_len,
            time_per_prompt_token=2e-5,
            time_per_output_token=2e-3,
        )
        executor = Executor(config)
        await executor.start()
        await asyncio.gather(*(_run(executor, program) for program in programs))
        await executor.stop()
        trace: list[StepTrace] = pickle.loads(file.read_bytes())
        return trace


async def _run(executor: Executor, program: dict[str, Any]) -> None:
    body = msgspec.json.encode({"program": program})
    submission = msgspec.json.decode(body, type=Submission)
    accepted, _ = await executor.submit(submission, body=body, tenant="t")
    for output in accepted.outputs:
        found = await executor.get(accepted.id, output, tenant="t", wait_s=300)
        assert found.status == "done", found


def main() -> None:
    """Record twice and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=2)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--share", type=float, default=2 / 3)
    arguments = parser.parse_args()
    plan = coding(arguments.files, 2, scale=8)
    programs = [plan.written(str(number)) for number in range(arguments.programs)]
    longest = max(call.num_prompt + call.num_output for call in plan.blueprint.calls.values())
    context_len = math.ceil((longest + 1) / BLOCK) * BLOCK
    trace = asyncio.run(record(programs, None, context_len))
    peak = max(step.num_held for step in trace)
    num_blocks = max(math.ceil(peak * arguments.share), context_len // BLOCK)
    for capacity, found in (
        (None, trace),
        (num_blocks, asyncio.run(record(programs, num_blocks, context_len))),
    ):
        held, best = block_seconds(found), last_use_block_seconds(found)
        refilled = sum(step.num_refilled for step in found)
        fewest = 0 if capacity is None else next_use_num_recomputed(found, capacity)
        computed = sum(len(step.computed) for step in found)
        print(
            f"{capacity or 'unbounded'} blocks ({peak} held at most): {len(found)} steps; held "
            f"{held:.1f} block-seconds, to the last use {best:.1f} ({held / best:.3f}); refilled "
            f"{refilled} tokens, by next use {fewest * BLOCK}",
            f"of {computed} uses that computed",
        )


if __name__ == "__main__":
    main()
