"""The fields of journaled events that recovery reads, and what it collects from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from ...program.decoding.typed_json import decode_record
from ...program.status import Phase, Problem
from ...store.journal import EventRecord, ValueRecord
from ..node_state import NodeUsage


class JournaledEvent(Struct, frozen=True):
    """The data of an event. A field that the event does not have keeps its default."""

    node: str | None = None
    nodes: tuple[str, ...] = ()
    variable: str = ""
    request_id: str = ""
    attempt: int = 0
    retry: bool = False
    truncated: bool = False
    code: str = ""
    message: str = ""
    cause: str = ""
    engine: str | None = None
    why: str = ""
    prefix_break: bool = False
    constraint_relaxed: bool = False
    started_at: float | None = None
    usage: NodeUsage | None = None


def decode_event(record: EventRecord) -> JournaledEvent:
    """Return the typed data of a journaled event."""
    return decode_record(record.data, JournaledEvent)


class ProgramStop(NamedTuple):
    """The end of a program before its nodes have ended by themselves."""

    phase: Phase
    problem: Problem


@dataclass(slots=True)
class RecoveredState:
    """The state of a program at the end of an earlier server process, besides its values."""

    outputs: dict[str, ValueRecord] = field(default_factory=dict)
    """Committed outputs of calls with their ids; a growing prompt continues after them."""
    requested: set[str] = field(default_factory=set)
    """Request ids of client steps that clients have received."""
    started: set[str] = field(default_factory=set)
    """Nodes that had started and not ended."""
    stop: ProgramStop | None = None
    """Why the program was ending early. Its end was not written."""


@dataclass(slots=True)
class ExpansionHistory:
    """How many nodes were added to bodies.

    The decisions do not say this: the program may have had no room for what was decided.
    """

    num_added: Counter[str] = field(default_factory=Counter)
    """Nodes added to the bodies of each node."""

    @classmethod
    def of(cls, events: Iterable[EventRecord]) -> ExpansionHistory:
        """Collect the history from the events of a program."""
        history = cls()
        for record in events:
            if record.type != "nodes.appended":
                continue
            event = decode_event(record)
            if event.node is not None:
                history.num_added[event.node] += len(event.nodes)
        return history
