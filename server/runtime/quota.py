"""What one program may hold in memory and write to the journal.

Invariant: a limit is checked before a value is kept or a record is written. The record of a
program's end has no limit.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..program.errors import RunError
from ..program.expressions.budget import MAX_STEPS
from ..program.graph.extension import MAX_EXPANDED_NODES
from ..program.status import QuotaUse

MAX_LIVE_BYTES: Final = 64 * 1024 * 1024
"""JSON of all values of a program."""
MAX_JOURNAL_BYTES: Final = 256 * 1024 * 1024
"""JSON of all records of a program except the last."""
MAX_EVENTS: Final = 2_000_000


class QuotaLimits(NamedTuple):
    """The limits of every program."""

    live_bytes: int = MAX_LIVE_BYTES
    journal_bytes: int = MAX_JOURNAL_BYTES
    events: int = MAX_EVENTS


class ProgramQuota:
    """The bytes and events of one program."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.live_bytes = 0
        self.journal_bytes = 0
        self.num_events = 0
        self._limits = limits

    def hold(self, size: int) -> None:
        """Count the bytes of a value that the program keeps.

        Raises:
            RunError: `quota.live_bytes` if they do not fit.
        """
        if self.live_bytes + size > self._limits.live_bytes:
            raise _exceeded("live_bytes", "bytes of values in memory", self._limits.live_bytes)
        self.live_bytes += size

    def check_journal(self, size: int) -> None:
        """Check that records of this size may be written.

        Raises:
            RunError: `quota.journal_bytes` or `quota.events` if they do not fit.
        """
        if self.journal_bytes + size > self._limits.journal_bytes:
            raise _exceeded("journal_bytes", "bytes in the journal", self._limits.journal_bytes)
        if self.num_events >= self._limits.events:
            raise _exceeded("events", "events", self._limits.events)

    def usage(self, *, num_nodes: int, steps: int) -> dict[str, QuotaUse]:
        """Return the use and the limit of each quota, for a program with `num_nodes` nodes and
        `steps` steps.
        """
        limits = self._limits
        return {
            "steps": QuotaUse(used=steps, limit=MAX_STEPS),
            "nodes": QuotaUse(used=num_nodes, limit=MAX_EXPANDED_NODES),
            "live_bytes": QuotaUse(used=self.live_bytes, limit=limits.live_bytes),
            "journal_bytes": QuotaUse(used=self.journal_bytes, limit=limits.journal_bytes),
            "events": QuotaUse(used=self.num_events, limit=limits.events),
        }


def _exceeded(quota: str, unit: str, limit: int) -> RunError:
    return RunError(
        f"quota.{quota}", f"a program can have at most {limit:,} {unit}: split it up", status=413
    )
