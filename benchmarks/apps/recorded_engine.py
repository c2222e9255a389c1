"""An engine that records the blocks of every step: `recorded_engine.py FILE ARGUMENTS`.

The arguments are those of `python -m conure.engine`. When the server disconnects, the engine
writes the pickled trace to the file.
"""

from __future__ import annotations

import pickle
import sys
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from apps.oracle import Block, StepTrace
from conure.engine import __main__ as process
from conure.engine import protocol
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import Handle, ScheduledSequence


class BlockNames:
    """The names of blocks; see `oracle`.

    The name of a full block is a hash of all tokens up to its end.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[int, list[bytes]] = {}

    def uses(self, row: ScheduledSequence) -> list[Block]:
        """Return the blocks of a row. A partial block is a pair of its context and index."""
        size, end = self._block_size, row.start + row.num_new
        chain = self._chains.setdefault(row.context, [])
        for index in range(len(chain), end // size):
            digest = blake2b(chain[-1] if chain else b"", digest_size=16)
            digest.update(array("q", row.ids[index * size : (index + 1) * size]).tobytes())
            chain.append(digest.digest())
        names: list[Block] = [*chain[: end // size]]
        if end % size:
            names.append((row.context, end // size))
        return names

    def computed(self, row: ScheduledSequence) -> list[Block]:
        """Return the blocks of a row that are computed from their first token."""
        # The last token of a prompt always runs, for its logits.
        if row.num_new == 1 and row.start + 1 == len(row.ids):
            return []
        return self.uses(row)[-(-row.start // self._block_size) :]

    def complete(self, step: StepTrace) -> StepTrace:
        """Return a step of an ended run, with the names of the blocks that have become full."""
        full: dict[Block, Block] = {
            (context, index): name
            for context, chain in self._chains.items()
            for index, name in enumerate(chain)
        }
        uses, computed = (
            frozenset(full.get(name, name) for name in names)
            for names in (step.uses, step.computed)
        )
        return step._replace(uses=uses, computed=computed)


class RecordedEngine(EngineCore):
    """The engine core, recording the rows that it runs."""

    made: ClassVar[list[RecordedEngine]] = []
    """The engine of this process."""

    def __init__(self, runner: Any, epoch: int, **options: Any) -> None:
        """Wrap the runner's `start`."""
        super().__init__(runner, epoch, **options)
        self._start_rows = runner.start
        runner.start = self._listen
        self._rows: list[ScheduledSequence] = []
        self._changes: list[tuple[float, int]] = []
        self._steps: list[StepTrace] = []
        self._names = BlockNames(self._kv.block_size)
        self._seen: set[Block] = set()
        self.made.append(self)

    def trace(self) -> list[StepTrace]:
        """Return the steps; for the end of the run."""
        return [self._names.complete(step) for step in self._steps]

    def apply(self, command: protocol.Command) -> None:
        """Apply a command, and record the blocks that it frees before the next step."""
        super().apply(command)
        if self._steps and self._steps[-1].num_held != self._kv.pool.num_held:
            self._changes.append((time.monotonic(), self._kv.pool.num_held))

    def step(self) -> protocol.StepReport | None:
        """Run one step, and record it if it ran any row."""
        began_s = time.monotonic()
        self._rows = []
        step = super().step()
        if self._rows:
            uses = frozenset(name for row in self._rows for name in self._names.uses(row))
            computed = frozenset(name for row in self._rows for name in self._names.computed(row))
            held = self._kv.pool.num_held
            refilled = sum(self._refilled(row) for row in self._rows)
            self._changes = []
            ended_s = time.monotonic()
            self._steps.append(
                StepTrace(began_s, ended_s, uses, computed, held, refilled, self._changes)
            )
        return step

    def _listen(
        self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]
    ) -> Handle:
        self._rows = [
            ScheduledSequence(row.context, list(row.ids), row.start, row.num_new, list(row.blocks))
            for row in rows
        ]
        handle: Handle = self._start_rows(rows, copies)
        return handle

    def _refilled(self, row: ScheduledSequence) -> int:
        """Return the tokens of whole blocks that were computed before after the same tokens."""
        size = self._kv.block_size
        end = row.start + row.num_new
        whole = self._names.uses(row)[-(-row.start // size) : end // size]
        count = sum(name in self._seen for name in whole)
        self._seen.update(whole)
        return count * size


def main() -> int:
    """Run the engine, then write the trace."""
    setattr(process, "EngineCore", RecordedEngine)  # noqa: B010 - mypy forbids the plain one
    code = process.main(sys.argv[2:])
    (engine,) = RecordedEngine.made
    Path(sys.argv[1]).write_bytes(pickle.dumps(engine.trace()))
    return code


if __name__ == "__main__":
    sys.exit(main())
