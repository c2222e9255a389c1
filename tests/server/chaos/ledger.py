"""A ledger of all responses of a server, and the contradictions it detects.

Clients record responses while the server is killed and restarted. Raises ViolationError at the
first contradiction; `check_history` checks a whole program after its end.

    a variable has one value for ever       an event of a number is the same for ever
    a client step has one request id        a number belongs to one program
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .programs import RandomProgram, evaluate

Json = Any

RUNS = frozenset({"node.queued", "node.started", "node.restarted"})
"""Events of a call that is to run, or runs."""


class ViolationError(AssertionError):
    """The server violated a guarantee."""


class Heard(NamedTuple):
    """A journaled event."""

    seq: int
    type: str
    data: dict[str, Json]


class Ledger:
    """The responses that all clients of all programs have received."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], Json] = {}
        self.events: dict[str, dict[int, Heard]] = {}
        self.requests: dict[tuple[str, str], str] = {}
        self.programs: dict[str, RandomProgram] = {}
        """Accepted ones, by id."""
        self._program_of: dict[int, str] = {}

    def accepted(self, id_: str, program: RandomProgram) -> None:
        """A submission was answered 202 with this id."""
        if id_ in self.programs:
            raise ViolationError(f"two submissions got the id {id_}")
        self.programs[id_] = program
        self.events[id_] = {}
        for name, value in program.submission["inputs"].items():
            self.values[id_, name] = value

    def heard_value(self, id_: str, variable: str, value: Json) -> None:
        """Record a value that a client received."""
        before = self.values.setdefault((id_, variable), value)
        if before != value:
            raise ViolationError(f"{id_}: {variable} was {before!r} and is now {value!r}")

    def known(self, id_: str) -> frozenset[str]:
        """Return the variables of a program whose values clients have received."""
        return frozenset(name for owner, name in self.values if owner == id_)

    def heard_status(self, id_: str, status: dict[str, Json], *, known: frozenset[str]) -> None:
        """Record a status; `known` are the values received before the request was sent."""
        for name, variable in status["variables"].items():
            if variable["status"] == "done":
                self.heard_value(id_, name, variable["value"])
            elif name in known:
                raise ViolationError(f"{id_}: {name} had a value and is now {variable!r}")

    def heard_event(self, id_: str, event: Heard) -> None:
        """Record a journaled event."""
        if event.data.get("program", id_) != id_ or event.data.get("seq", event.seq) != event.seq:
            raise ViolationError(f"{id_}: event {event} names another program or number")
        owner = self._program_of.setdefault(event.seq, id_)
        if owner != id_:
            raise ViolationError(f"number {event.seq} belongs to {owner} and to {id_}")
        before = self.events[id_].setdefault(event.seq, event)
        if before != event:
            raise ViolationError(f"{id_}: event {before} is now {event}")
        if event.type == "variable.committed":
            self.heard_value(id_, event.data["variable"], event.data["value"])
        elif event.type == "client.requested":
            self._heard_request(id_, event)

    def _heard_request(self, id_: str, event: Heard) -> None:
        node, request = event.data["node"], event.data["request_id"]
        before = self.requests.setdefault((id_, node), request)
        if before != request:
            raise ViolationError(f"{id_}: {node} was asked as {before} and as {request}")

    def check_history(self, id_: str, history: list[Heard], status: dict[str, Json]) -> None:
        """Check the events of a program that has ended, read from the first one on."""
        for event in history:
            self.heard_event(id_, event)
        self.heard_status(id_, status, known=self.known(id_))
        numbers = [event.seq for event in history]
        if numbers != sorted(set(numbers)):
            raise ViolationError(f"{id_}: events out of order: {numbers}")
        missing = self.events[id_].keys() - set(numbers)
        if missing:
            raise ViolationError(f"{id_}: events {sorted(missing)} were told and are gone")
        types = [event.type for event in history]
        if types[0] != "program.accepted" or types.count("program.accepted") != 1:
            raise ViolationError(f"{id_}: does not begin with its acceptance: {types}")
        if types[-1] != "program.finished" or types.count("program.finished") != 1:
            raise ViolationError(f"{id_}: does not end with its end: {types}")
        if status["status"] != "done" or history[-1].data["status"] != "done":
            raise ViolationError(
                f"{id_}: ended as {status['status']}: {status.get('error')}, {types}"
            )
        if status["receipt"]["blocks_held"] != 0:
            raise ViolationError(f"{id_}: holds blocks after its end: {status['receipt']}")
        self._check_commits(id_, history)
        self._check_values(id_, history)

    def _check_commits(self, id_: str, history: list[Heard]) -> None:
        """Check that every variable is committed once and never computed again."""
        producer = {
            name: node for node, names in self.programs[id_].variables.items() for name in names
        }
        committed: set[str] = set()
        left = {node: set(names) for node, names in self.programs[id_].variables.items()}
        for event in history:
            if event.type == "variable.committed":
                name = event.data["variable"]
                if name in committed:
                    raise ViolationError(f"{id_}: {name} was committed twice")
                committed.add(name)
                if name in producer:
                    left[producer[name]].discard(name)
            elif event.type in RUNS and not left[event.data["node"]]:
                raise ViolationError(f"{id_}: {event} although everything it makes is committed")
        unmade = [name for names in left.values() for name in names]
        if unmade:
            raise ViolationError(f"{id_}: ended without committing {unmade}")

    def _check_values(self, id_: str, history: list[Heard]) -> None:
        """Check that computed and received values follow from the committed values."""
        program = self.programs[id_]
        values = {name: value for (owner, name), value in self.values.items() if owner == id_}
        for name, expr in program.exprs.items():
            expected = evaluate(expr, values)
            if values[name] != expected:
                raise ViolationError(f"{id_}: {name} is {values[name]!r}, not {expected!r}")
        for event in history:
            if event.type == "client.requested":
                args = program.client_args[event.data["node"]]
                expected = {name: evaluate(expr, values) for name, expr in args.items()}
                if event.data["args"] != expected:
                    raise ViolationError(
                        f"{id_}: {event} was asked with args other than {expected!r}"
                    )
