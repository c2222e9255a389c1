"""The report of one run of an accelerated app, call by call."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallReport:
    """How one call of the app was answered."""

    path: str
    """The active parts of the app, outermost first."""
    is_planned: bool
    """Whether the call was answered from the plan."""
    reason: str = ""
    """Why the call was not answered from the plan."""


@dataclass(slots=True)
class Report:
    """The calls of one run of an accelerated app."""

    calls: list[CallReport] = field(default_factory=list)
    num_wasted: int = 0
    """Planned calls that the app did not make."""
    notes: list[str] = field(default_factory=list)
    """Parts that were not planned, and why."""
    programs: list[str] = field(default_factory=list)
    """Ids of the programs."""

    @property
    def num_planned(self) -> int:
        """Calls that were answered from the plan."""
        return sum(call.is_planned for call in self.calls)

    def __str__(self) -> str:
        lines = [
            f"{len(self.calls)} calls: {self.num_planned} from the plan, "
            f"{len(self.calls) - self.num_planned} made by the app, {self.num_wasted} wasted"
        ]
        lines += [
            f"  {'plan' if call.is_planned else 'call'}  {call.path}"
            + (f"  ({call.reason})" if call.reason else "")
            for call in self.calls
        ]
        lines += [f"  note  {note}" for note in self.notes]
        return "\n".join(lines)
