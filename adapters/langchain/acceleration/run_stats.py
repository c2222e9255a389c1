"""Statistics of one run of an accelerated chain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class PlanMiss(NamedTuple):
    """A call that did not match the plan."""

    place: str
    """Place of the planned call that the call probably corresponds to; empty without one."""
    why: str


@dataclass(slots=True)
class RunStats:
    """Counts and outcomes of the calls of one run."""

    program: str = ""
    """Id of its first program; empty if nothing was sent."""
    num_planned: int = 0
    num_in_first_program: int = 0
    """Calls of the chain that its first program answered."""
    num_served: int = 0
    """Calls of the chain that were answered from the plan."""
    misses: list[PlanMiss] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Messages of the server about planned calls that it rejected."""
    wasted: list[str] = field(default_factory=list)
    """Places of calls that the server ran and the chain did not make."""
