"""What became of the calls of one run of an accelerated chain.

Records only. Refuses to know plans, events and connections: a board counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Miss(NamedTuple):
    """A call that was not in the plan."""

    place: str
    """Of the planned call that it may have been; empty if there is none."""
    why: str


@dataclass(slots=True)
class Tally:
    """What became of the calls of one run."""

    program: str = ""
    """Its id on the server; empty if nothing was sent."""
    num_planned: int = 0
    num_served: int = 0
    """Planned, and asked for by the chain."""
    misses: list[Miss] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """What the server said to plans that it did not take."""
    wasted: list[str] = field(default_factory=list)
    """Places of calls that the server began and the chain never asked for."""
