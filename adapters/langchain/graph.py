"""The program that a chain turns into, while it is being read.

Knows how calls, client steps and views become nodes and variables, and gives each a name
that says where it stands in the chain. Refuses to know Runnables.

Kept true: names are unique and depend on the chain alone, so the same chain always gives
the same program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

from ..names import fresh
from .bodies import Body, Exit, Late
from .messages import decode
from .revival import is_of_one_form, reviver
from .values import (
    KINDS,
    Answer,
    Call,
    Constant,
    Either,
    Local,
    Many,
    Record,
    Rendered,
    Source,
    Text,
    Value,
    ViewKind,
)

T = TypeVar("T")


class Place(NamedTuple):
    """Where in a chain something stands, for names and for errors."""

    path: str
    hint: str
    config: Mapping[str, Any] = {}

    def step(self, index: int, hint: str) -> Place:
        """One step of a sequence."""
        return self._replace(path=f"{self.path}.steps[{index}]", hint=hint)

    def part(self, path: str, hint: str) -> Place:
        """A part of what stands here, as Python would name it."""
        return self._replace(path=f"{self.path}{path}", hint=f"{self.hint}_{hint}")

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


@dataclass(eq=False, slots=True)
class Graph:
    """Nodes and variables of one chain's program."""

    name: str
    root: Source = field(default_factory=lambda: Source("input"))
    """The chain's input."""
    steps: list[ClientStep] = field(default_factory=list)
    prefix: str = ""
    """Of all names, where several graphs become one program."""
    _body: Body = field(default_factory=Body)
    """Where nodes go now."""
    _read: dict[tuple[int, str], tuple[Body, str]] = field(default_factory=dict)
    """What views are called in bodies that read them, by body and variable."""
    _taken: set[str] = field(default_factory=set)
    _given: dict[tuple[int, bool], tuple[Value, str]] = field(default_factory=dict)
    """Variables of values that left their bodies, by identity, and whether they are printed."""

    def __post_init__(self) -> None:
        self.root.home = self._body

    @contextlib.contextmanager
    def inside(self, body: Body) -> Iterator[None]:
        """What is added in this block stands in a body."""
        around, self._body = self._body, body
        try:
            yield
        finally:
            self._body = around

    def add(self, node: Late) -> None:
        """Add a node."""
        self._body.add(node)

    def bodies(self, hint: str, num_bodies: int) -> Exit:
        """New bodies, and the way out of them.

        Args:
            hint: what their values are named after.
            num_bodies: of one node.
        """
        return Exit(hint, tuple(Body() for _ in range(num_bodies)), self.fresh)

    def fresh(self, hint: str) -> str:
        """A name like `hint` that nothing has yet."""
        return fresh(f"{self.prefix}{hint}", self._taken)

    def view(self, local: Local, kind: ViewKind) -> str:
        """The variable that carries a local value where nodes go now."""
        source = local.source
        is_sure = source.home is None or source.home is self._body
        view = source.view(local, kind, self.fresh, is_sure=is_sure)
        if view.is_sure:
            return view.variable
        key = (id(self._body), view.variable)
        if key not in self._read:
            variable, node_id = self.fresh(view.variable), self.fresh(f"{view.variable}_read")
            self._read[key] = (self._body, variable)
            self.add(lambda: {"id": node_id, "op": "expr", "expr": view.read(), "output": variable})
        return self._read[key][1]

    def source(self, hint: str) -> Source:
        """What is made where nodes go now, at the client."""
        return Source(hint, self._body)

    def each(self, value: Either | Many, of: Callable[[Value], T]) -> list[T]:
        """What a function makes of values in bodies, each where it was made."""
        made = []
        for body, part in zip(value.exit.bodies, value.values, strict=True):
            with self.inside(body):
                made.append(of(part))
        return made

    def call(self, hint: str, node: Callable[[str, str, str], Json]) -> Call:
        """Add a call.

        Args:
            hint: what it is named after.
            node: makes the node of its id, its variable and the form of its value.
        """
        call = Call(self.fresh(hint))
        node_id = self.fresh(f"{hint}_call")
        self.add(lambda: node(node_id, call.variable, "message" if call.is_message else "text"))
        return call

    def computed(self, hint: str, expression: Late) -> Call:
        """Add an expression that makes a text.

        Args:
            hint: what it is named after.
            expression: of the text.
        """
        variable, node_id = self.fresh(hint), self.fresh(f"{hint}_step")
        self.add(lambda: {"id": node_id, "op": "expr", "expr": expression(), "output": variable})
        return Call(variable)

    def client_step(
        self, name: str, runnables: tuple[Any, ...], value: Value, place: Place
    ) -> Local:
        """Add a step that runs at the client; returns what it will make."""
        args, revive = self._arguments(value, place)
        source = self.source(f"{place.hint}_{name}")
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

        self.add(node)
        self.unpack(source, step.output)
        return Local(source, lambda made: made)

    def unpack(self, source: Source, whole: str) -> None:
        """What is needed of a source, from the variable that has all of it."""

        def nodes() -> list[Json]:
            views = source.views if len(source.views) > 1 else []
            return [
                {
                    "id": self.fresh(f"{view.variable}_part"),
                    "op": "expr",
                    "expr": {"get": [{"var": whole}, view.variable]},
                    "output": view.variable,
                }
                for view in views
            ]

        self._body.add_last(nodes)

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
        if isinstance(value, Record):
            return self._object(value, place, is_printed=is_printed)
        if isinstance(value, Either | Many):
            name = self.given(value, place, is_printed=is_printed)
            return lambda: {"var": name}
        if isinstance(value, Rendered) and not is_printed:
            return value.expression
        raise unsupported(
            place,
            f"{KINDS[type(value)]} object is used as a value; put `| StrOutputParser()` behind "
            "the model",
        )

    def given(self, value: Either | Many, place: Place, *, is_printed: bool = False) -> str:
        """The variable that has a value outside of the bodies in which it is made.

        Args:
            value: of bodies.
            place: where it is needed.
            is_printed: as in `expression`.
        """
        found = self._given.get((id(value), is_printed))
        if found is None:
            lates = self.each(
                value, lambda part: self.expression(part, place, is_printed=is_printed)
            )
            if not is_printed and not is_of_one_form(value.values):
                lates = [_tagged(index, late) for index, late in enumerate(lates)]
            found = self._given[id(value), is_printed] = (value, value.exit.give(lates))
        return found[1]

    def _object(self, record: Record, place: Place, *, is_printed: bool) -> Late:
        fields = {
            key: self.expression(item, place, is_printed=is_printed)
            for key, item in record.fields.items()
        }
        if record.rest is None:
            return lambda: {"object": {key: late() for key, late in fields.items()}}
        if is_printed:
            raise unsupported(
                place,
                "a dict whose keys are not all known is printed; name its keys with "
                "to_program(..., inputs=[...]) or .pick([...])",
            )
        rest = self.expression(record.rest, place)
        return lambda: {
            "object": {
                "rest": rest(),
                "fields": {"object": {key: late() for key, late in fields.items()}},
            }
        }

    def constant(self, value: Constant) -> Local:
        """A constant as a local value."""
        made = value.value
        return Local(self.root, lambda root: made() if callable(made) else made, path=None)

    def write(self, outputs: list[str]) -> dict[str, Json]:
        """The program, now that all of the chain is read."""
        return {
            "name": self.name,
            "variables": {view.variable: {} for view in self.root.views},
            "nodes": self._body.write(),
            "outputs": outputs,
        }

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


def _tagged(index: int, late: Late) -> Late:
    return lambda: {"object": {"of": index, "value": late()}}
