"""What a run of an accelerated app came to, call by call.

Knows where each call of the app got its answer; refuses to know how.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallReport:
    """Where one call of the app got its answer."""

    path: str
    """The parts of the app that were at work, from the outside in."""
    is_planned: bool
    reason: str = ""
    """Why it was not served from the plan."""


@dataclass(slots=True)
class Report:
    """What a run of an accelerated app came to."""

    calls: list[CallReport] = field(default_factory=list)
    num_wasted: int = 0
    """Calls that ran and that the app did not ask for."""
    notes: list[str] = field(default_factory=list)
    """Parts that were looked at and not planned, and why."""
    programs: list[str] = field(default_factory=list)

    @property
    def num_planned(self) -> int:
        """Calls that were served from the plan."""
        return sum(call.is_planned for call in self.calls)

    def __str__(self) -> str:
        lines = [
            f"{len(self.calls)} calls: {self.num_planned} from the plan, "
            f"{len(self.calls) - self.num_planned} made when asked for, {self.num_wasted} wasted"
        ]
        lines += [
            f"  {'plan' if call.is_planned else 'call'}  {call.path}"
            + (f"  ({call.reason})" if call.reason else "")
            for call in self.calls
        ]
        lines += [f"  note  {note}" for note in self.notes]
        return "\n".join(lines)
