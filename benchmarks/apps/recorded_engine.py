"""An engine that writes down which blocks every step uses: `recorded_engine.py FILE ARGUMENTS`.

The arguments are those of `python -m conure.engine`. When its server leaves, the trace lies in
the file, pickled. A full block is named by a hash of all tokens up to its end under its salt; the
last, partial block of a context by the context and its place.
"""

from __future__ import annotations

import pickle
import sys
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conure.engine import __main__ as process
from conure.engine import api
from conure.engine.engine import Engine
from conure.engine.runner import Handle, Row
from oracle import Block, StepTrace

TRACE: list[StepTrace] = []


class RecordedEngine(Engine):
    """The engine, with a look at its rows."""

    def __init__(self, runner: Any, epoch: int, **options: Any) -> None:
        """Listen in on the runner."""
        super().__init__(runner, epoch, **options)
        self._start_rows = runner.start
        runner.start = self._listen
        self._rows: list[Row] = []
        self._changes: list[tuple[float, int]] = []
        self._chains: dict[int, list[bytes]] = {}
        self._seen: set[bytes] = set()

    def apply(self, command: api.Command) -> None:
        """A command; what it lets go of is not held until the next step."""
        super().apply(command)
        if TRACE and TRACE[-1].num_held != self._memory.pool.num_held:
            self._changes.append((time.monotonic(), self._memory.pool.num_held))

    def step(self) -> api.Step | None:
        """One step, written down if it ran anything."""
        began_s = time.monotonic()
        self._rows = []
        step = super().step()
        if self._rows:
            uses, computed = self._blocks()
            held = self._memory.pool.num_held
            refilled = sum(self._refilled(row) for row in self._rows)
            self._changes = []
            ended_s = time.monotonic()
            TRACE.append(StepTrace(began_s, ended_s, uses, computed, held, refilled, self._changes))
        return step

    def _listen(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]]) -> Handle:
        self._rows = [
            Row(row.context, list(row.ids), row.start, row.num_new, list(row.blocks))
            for row in rows
        ]
        handle: Handle = self._start_rows(rows, copies)
        return handle

    def _blocks(self) -> tuple[frozenset[Block], frozenset[Block]]:
        uses: set[Block] = set()
        computed: set[Block] = set()
        size = self._memory.block_size
        for row in self._rows:
            end = row.start + row.num_new
            chain = self._chains.setdefault(row.context, [])
            for index in range(len(chain), end // size):
                digest = blake2b(chain[-1] if chain else b"", digest_size=16)
                digest.update(array("q", row.ids[index * size : (index + 1) * size]).tobytes())
                chain.append(digest.digest())
            names: list[Block] = [*chain[: end // size]]
            if end % size:
                names.append((row.context, end // size))
            uses.update(names)
            # The last token of a prompt runs for its logits, whatever is there.
            is_only_last = row.num_new == 1 and end == len(row.ids)
            if not is_only_last:
                computed.update(names[row.start // size :])
        return frozenset(uses), frozenset(computed)

    def _refilled(self, row: Row) -> int:
        """Tokens of whole blocks that were computed before, behind the same tokens."""
        size = self._memory.block_size
        end = row.start + row.num_new
        whole = self._chains[row.context][-(-row.start // size) : end // size]
        count = sum(name in self._seen for name in whole)
        self._seen.update(whole)
        return count * size


def main() -> int:
    """Run, then write."""
    setattr(process, "Engine", RecordedEngine)  # noqa: B010 - mypy forbids the plain one
    code = process.main(sys.argv[2:])
    Path(sys.argv[1]).write_bytes(pickle.dumps(TRACE))
    return code


if __name__ == "__main__":
    sys.exit(main())
