"""The program that a chain turns into, while it is being read.

Knows how calls, client steps and views become nodes and variables, and gives each a name
that says where it stands in the chain. Refuses to know Runnables.

Kept true: names are unique and depend on the chain alone, so the same chain always gives
the same program; nodes are written down only when all of the chain is read, because only
then is it known in what forms a value is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

from ..names import fresh
from .messages import decode, from_wire
from .values import (
    KINDS,
    Answer,
    Call,
    Constant,
    Local,
    Record,
    Source,
    Text,
    Value,
    ViewKind,
)

Late: TypeAlias = Callable[[], Json]
"""JSON that can be written down once all of the chain is read."""


class Place(NamedTuple):
    """Where in a chain something stands, for names and for errors."""

    path: str
    hint: str
    config: Mapping[str, Any] = {}

    def step(self, index: int, hint: str) -> Place:
        """One step of a sequence."""
        return self._replace(path=f"{self.path}.steps[{index}]", hint=hint)

    def branch(self, key: str) -> Place:
        """One branch of a parallel step."""
        return self._replace(path=f"{self.path}[{key!r}]", hint=key)


def unsupported(place: Place, message: str) -> ProgramError:
    """The error of a chain that does not become a program."""
    return ProgramError("to_program.unsupported", f"{place.path}: {message}", path=place.path)


@dataclass(frozen=True, eq=False, slots=True)
class ClientStep:
    """A step of the chain that runs where the chain was submitted."""

    name: str
    output: str
    source: Source
    runnables: tuple[Any, ...]
    """Run one after the other."""
    revive: Callable[[Mapping[str, Json]], Any]
    """Makes the first one's input of the arguments."""

    def answer(self, made: Any) -> Json:
        """The step's value on the wire: everything that the chain needs of what was made."""
        views = self.source.views
        if len(views) == 1:
            return views[0].encode(made)
        return {view.variable: view.encode(made) for view in views}


@dataclass(eq=False, slots=True)
class Graph:
    """Nodes and variables of one chain's program."""

    name: str
    root: Source = field(default_factory=lambda: Source("input"))
    """The chain's input."""
    steps: list[ClientStep] = field(default_factory=list)
    prefix: str = ""
    """Of all names, where several graphs become one program."""
    _nodes: list[Late] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def fresh(self, hint: str) -> str:
        """A name like `hint` that nothing has yet."""
        return fresh(f"{self.prefix}{hint}", self._taken)

    def view(self, local: Local, kind: ViewKind) -> str:
        """The variable that carries a local value."""
        return local.source.view(local, kind, self.fresh).variable

    def call(self, hint: str, node: Callable[[str, str, str], Json]) -> Call:
        """Add a call.

        Args:
            hint: what it is named after.
            node: makes the node of its id, its variable and the form of its value.
        """
        call = Call(self.fresh(hint))
        node_id = self.fresh(f"{hint}_call")
        self._nodes.append(
            lambda: node(node_id, call.variable, "message" if call.is_message else "text")
        )
        return call

    def client_step(
        self, name: str, runnables: tuple[Any, ...], value: Value, place: Place
    ) -> Local:
        """Add a step that runs at the client; returns what it will make."""
        args, revive = self._arguments(value, place)
        source = Source(f"{place.hint}_{name}")
        step = ClientStep(
            self.fresh(name), self.fresh(f"{source.hint}_value"), source, runnables, revive
        )
        node_id = self.fresh(f"{source.hint}_step")
        self.steps.append(step)

        def node() -> Json:
            return {
                "id": node_id,
                "op": "client",
                "name": step.name,
                "args": {key: late() for key, late in args.items()},
                "output": source.views[0].variable if len(source.views) == 1 else step.output,
            }

        self._nodes.append(node)
        return Local(source, lambda made: made)

    def expression(self, value: Value, place: Place, *, is_printed: bool = False) -> Late:
        """An expression for a value.

        Args:
            value: what it is for.
            place: where it is needed.
            is_printed: Python's print of it is wanted, so it may hold nothing that does
                not travel as itself.
        """
        if isinstance(value, Constant):
            value = self.constant(value)
        if isinstance(value, Local):
            variable = self.view(value, "value")
            return lambda: {"var": variable}
        if isinstance(value, Text):
            return value.call.text
        if isinstance(value, Answer) and not is_printed:
            call = value.call
            call.is_message = True
            return lambda: {"var": call.variable}
        if isinstance(value, Record) and value.rest is None:
            fields = {
                key: self.expression(item, place, is_printed=is_printed)
                for key, item in value.fields.items()
            }
            return lambda: {"object": {key: late() for key, late in fields.items()}}
        if isinstance(value, Record):
            raise unsupported(
                place,
                "a dict whose keys are not all known is used as one value; name its keys with "
                "to_program(..., inputs=[...]) or .pick([...])",
            )
        raise unsupported(
            place,
            f"{KINDS[type(value)]} object is used as a value; put `| StrOutputParser()` behind "
            "the model",
        )

    def constant(self, value: Constant) -> Local:
        """A constant as a local value."""
        made = value.value
        return Local(self.root, lambda root: made() if callable(made) else made, path=None)

    def write(self, outputs: list[str]) -> dict[str, Json]:
        """The program, now that all of the chain is read."""
        nodes = [late() for late in self._nodes]
        for step in self.steps:
            if len(step.source.views) > 1:
                nodes.extend(self._unpacked(step))
        return {
            "name": self.name,
            "variables": {view.variable: {} for view in self.root.views},
            "nodes": nodes,
            "outputs": outputs,
        }

    def _unpacked(self, step: ClientStep) -> list[Json]:
        return [
            {
                "id": self.fresh(f"{view.variable}_part"),
                "op": "expr",
                "expr": {"get": [{"var": step.output}, view.variable]},
                "output": view.variable,
            }
            for view in step.source.views
        ]

    def _arguments(
        self, value: Value, place: Place
    ) -> tuple[dict[str, Late], Callable[[Mapping[str, Json]], Any]]:
        """Arguments of a client step, and what makes its input of them again."""
        if not isinstance(value, Record):
            revive = reviver(value)
            return (
                {"input": self.expression(value, place)},
                lambda args: revive(args["input"]),
            )
        args = {key: self.expression(item, place) for key, item in value.fields.items()}
        parts = {key: reviver(item) for key, item in value.fields.items()}
        rest_key = "input"
        while rest_key in args:
            rest_key += "_"
        if value.rest is not None:
            args[rest_key] = self.expression(value.rest, place)

        def revive_record(given: Mapping[str, Json]) -> Any:
            rest = decode(given[rest_key]) if rest_key in args else {}
            return {**rest, **{key: part(given[key]) for key, part in parts.items()}}

        return args, revive_record


def reviver(value: Value, program: str = "") -> Callable[[Json], Any]:
    """What makes a value of the chain of the JSON that its expression gave."""
    if isinstance(value, Answer):
        return lambda given: from_wire(given, program=program)
    if isinstance(value, Record):
        parts = {key: reviver(item, program) for key, item in value.fields.items()}
        return lambda given: {key: part(given[key]) for key, part in parts.items()}
    return decode
