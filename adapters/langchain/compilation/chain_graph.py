"""Builds the program of a chain during compilation.

Responsibility: turn calls, client steps and views into nodes and variables, with names that show
their position in the chain. A view is the variable that carries a client value to the server in one
form.

Out of scope: Runnables.

Invariants: names are unique and depend on the chain alone, so equal chains give equal programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

from ...names import unique_name
from ..chat.json_values import decode
from .bodies import BodyOutputs, DeferredJson, GraphBody
from .deserializers import deserializer, have_same_form
from .values import (
    VALUE_KINDS,
    AnswerTextValue,
    AnswerValue,
    BranchedValue,
    CallValue,
    ClientValue,
    Constant,
    MappedValue,
    PromptTurnsValue,
    Record,
    Source,
    Value,
    ViewKind,
)

T = TypeVar("T")


class ChainPosition(NamedTuple):
    """A position in a chain, for names and errors."""

    path: str
    hint: str
    config: Mapping[str, Any] = {}

    def step(self, index: int, hint: str) -> ChainPosition:
        """Return the position of a step of a sequence."""
        return self._replace(path=f"{self.path}.steps[{index}]", hint=hint)

    def child(self, path: str, hint: str) -> ChainPosition:
        """Return the position of a part of this Runnable; `path` is its Python expression."""
        return self._replace(path=f"{self.path}{path}", hint=f"{self.hint}_{hint}")

    def branch(self, key: str) -> ChainPosition:
        """Return the position of a branch of a parallel step."""
        return self._replace(path=f"{self.path}[{key!r}]", hint=key)


class UnsupportedPartError(ProgramError):
    """A part of a chain has no equivalent in a program."""

    def __init__(self, position: ChainPosition, reason: str) -> None:
        super().__init__("to_program.unsupported", f"{position.path}: {reason}", path=position.path)
        self.reason = reason
        """The message without the position."""


def unsupported(position: ChainPosition, reason: str) -> UnsupportedPartError:
    """Return the error of a chain that cannot become a program."""
    return UnsupportedPartError(position, reason)


@dataclass(frozen=True, eq=False, slots=True)
class ChainClientStep:
    """A client step, with the Runnables that it runs."""

    name: str
    output: str
    source: Source
    runnables: tuple[Any, ...]
    """Run one after the other."""
    deserialize: Callable[[Mapping[str, Json]], Any]
    """Converts the step's arguments to the input of the first Runnable."""


@dataclass(eq=False, slots=True)
class ChainGraph:
    """Nodes and variables of one chain's program."""

    name: str
    root: Source = field(default_factory=lambda: Source("input"))
    """The chain's input."""
    steps: list[ChainClientStep] = field(default_factory=list)
    prefix: str = ""
    """Prefix of all names, for several graphs in one program."""
    names: set[str] = field(default_factory=set)
    """Names of nodes and variables."""
    _body: GraphBody = field(default_factory=GraphBody)
    """The current body: new nodes are added to it."""
    _read_variables: dict[tuple[int, str], tuple[GraphBody, str]] = field(default_factory=dict)
    """Variables that a body computes from a view whose value may be an error, by body and view."""
    _exports: dict[tuple[int, bool], tuple[Value, str]] = field(default_factory=dict)
    """Exported variables of values in bodies, by the value's identity and `is_printed`."""

    def __post_init__(self) -> None:
        self.root.body = self._body

    @contextlib.contextmanager
    def in_body(self, body: GraphBody) -> Iterator[None]:
        """Add nodes to a body inside the `with` block."""
        outer, self._body = self._body, body
        try:
            yield
        finally:
            self._body = outer

    def add(self, node: DeferredJson) -> None:
        """Add a node to the current body."""
        self._body.add(node)

    def new_bodies(self, hint: str, num_bodies: int) -> BodyOutputs:
        """Return new bodies of one node, with their exports.

        Args:
            hint: prefix of the exported names.
            num_bodies: number of bodies.
        """
        return BodyOutputs(hint, tuple(GraphBody() for _ in range(num_bodies)), self.fresh_name)

    def fresh_name(self, hint: str) -> str:
        """Return an unused name that starts with `hint`."""
        return unique_name(f"{self.prefix}{hint}", self.names)

    def view_variable(self, value: ClientValue, kind: ViewKind) -> str:
        """Return the variable that carries a client value in the current body."""
        source = value.source
        is_always_needed = source.body is None or source.body is self._body
        view = source.view(value, kind, self.fresh_name, is_always_needed=is_always_needed)
        if view.is_always_needed:
            return view.variable
        key = (id(self._body), view.variable)
        if key not in self._read_variables:
            variable, node_id = (
                self.fresh_name(view.variable),
                self.fresh_name(f"{view.variable}_read"),
            )
            self._read_variables[key] = (self._body, variable)
            self.add(
                lambda: {
                    "id": node_id,
                    "op": "expr",
                    "expr": view.read_expression(),
                    "output": variable,
                }
            )
        return self._read_variables[key][1]

    def new_source(self, hint: str) -> Source:
        """Return a source of client values in the current body."""
        return Source(hint, self._body)

    def map_bodies(
        self, value: BranchedValue | MappedValue, function: Callable[[Value], T]
    ) -> list[T]:
        """Apply a function to each of the values, while its own body is the current body."""
        result = []
        for body, part in zip(value.outputs.bodies, value.values, strict=True):
            with self.in_body(body):
                result.append(function(part))
        return result

    def add_call(self, hint: str, node: Callable[[str, str, str], Json]) -> CallValue:
        """Add a call.

        Args:
            hint: prefix of its names.
            node: builds the node from its id, its variable and the form of its value.
        """
        call = CallValue(self.fresh_name(hint))
        node_id = self.fresh_name(f"{hint}_call")
        self.add(lambda: node(node_id, call.variable, "message" if call.is_message else "text"))
        return call

    def add_expression(self, hint: str, expression: DeferredJson) -> CallValue:
        """Add an expression whose value is a text, used like the answer of a call.

        Args:
            hint: prefix of its names.
            expression: expression of the text.
        """
        variable, node_id = self.fresh_name(hint), self.fresh_name(f"{hint}_step")
        self.add(lambda: {"id": node_id, "op": "expr", "expr": expression(), "output": variable})
        return CallValue(variable)

    def add_client_step(
        self, name: str, runnables: tuple[Any, ...], value: Value, position: ChainPosition
    ) -> ClientValue:
        """Add a client step, and return its symbolic output."""
        args, deserialize = self._arguments(value, position)
        source = self.new_source(f"{position.hint}_{name}")
        step = ChainClientStep(
            self.fresh_name(name),
            self.fresh_name(f"{source.hint}_value"),
            source,
            runnables,
            deserialize,
        )
        node_id = self.fresh_name(f"{source.hint}_step")
        self.steps.append(step)

        def node() -> Json:
            return {
                "id": node_id,
                "op": "client",
                "name": step.name,
                "args": {key: expression() for key, expression in args.items()},
                "output": source.views[0].variable if len(source.views) == 1 else step.output,
            }

        self.add(node)
        self.add_unpacking(source, step.output)
        return ClientValue(source, lambda result: result)

    def add_unpacking(self, source: Source, variable: str) -> None:
        """Add nodes that read the views of a source from the variable that contains all of them."""

        def nodes() -> list[Json]:
            views = source.views if len(source.views) > 1 else []
            return [
                {
                    "id": self.fresh_name(f"{view.variable}_part"),
                    "op": "expr",
                    "expr": {"get": [{"var": variable}, view.variable]},
                    "output": view.variable,
                }
                for view in views
            ]

        self._body.add_at_end(nodes)

    def expression(
        self, value: Value, position: ChainPosition, *, is_printed: bool = False
    ) -> DeferredJson:
        """Return an expression for a value.

        Args:
            value: the symbolic value.
            position: where the value is used.
            is_printed: the value is printed by `str()` rules, so every part of it must have the
                same form in JSON as in Python.
        """
        if isinstance(value, Constant):
            value = self.client_value(value)
        if isinstance(value, ClientValue):
            variable = self.view_variable(value, "printed" if is_printed else "value")
            return lambda: {"var": variable}
        if isinstance(value, AnswerTextValue) and (is_printed or not value.is_sent_as_message):
            return value.call.text
        if isinstance(value, AnswerTextValue | AnswerValue) and not is_printed:
            call = value.call
            call.is_message = True
            return lambda: {"var": call.variable}
        if isinstance(value, Record):
            return self._object(value, position, is_printed=is_printed)
        if isinstance(value, BranchedValue | MappedValue):
            name = self.exported_variable(value, position, is_printed=is_printed)
            return lambda: {"var": name}
        if isinstance(value, PromptTurnsValue) and not is_printed:
            return prompt_expression(value, position)
        if isinstance(value, PromptTurnsValue):
            advice = "a model and `| StrOutputParser()` after the prompt"
        else:
            advice = "`| StrOutputParser()` after the model"
        raise unsupported(
            position, f"{VALUE_KINDS[type(value)]} object is used as a value; add {advice}"
        )

    def exported_variable(
        self,
        value: BranchedValue | MappedValue,
        position: ChainPosition,
        *,
        is_printed: bool = False,
    ) -> str:
        """Return the variable that carries a value outside of the bodies that produce it.

        Args:
            value: a value of bodies.
            position: where the value is used.
            is_printed: as in `expression`.
        """
        export = self._exports.get((id(value), is_printed))
        if export is None:
            expressions = self.map_bodies(
                value, lambda part: self.expression(part, position, is_printed=is_printed)
            )
            if not is_printed and not have_same_form(value.values):
                expressions = [
                    _with_tag(index, expression) for index, expression in enumerate(expressions)
                ]
            export = self._exports[id(value), is_printed] = (
                value,
                value.outputs.export(expressions),
            )
        return export[1]

    def _object(self, record: Record, position: ChainPosition, *, is_printed: bool) -> DeferredJson:
        fields = {
            key: self.expression(item, position, is_printed=is_printed)
            for key, item in record.fields.items()
        }
        if record.rest is None:
            return lambda: {"object": {key: expression() for key, expression in fields.items()}}
        if is_printed:
            raise unsupported(
                position,
                "a dict with unknown keys is printed; name its keys with "
                "to_program(..., inputs=[...]) or .pick([...])",
            )
        rest = self.expression(record.rest, position)
        return lambda: {
            "object": {
                "rest": rest(),
                "fields": {"object": {key: expression() for key, expression in fields.items()}},
            }
        }

    def client_value(self, value: Constant) -> ClientValue:
        """Return a constant as a client value."""
        result = value.value
        return ClientValue(
            self.root, lambda root: result() if callable(result) else result, path=None
        )

    def build(self, outputs: list[str]) -> dict[str, Json]:
        """Return the program. Call this after compilation."""
        return {
            "name": self.name,
            "variables": {view.variable: {} for view in self.root.views},
            "nodes": self._body.build(),
            "outputs": outputs,
        }

    def _arguments(
        self, value: Value, position: ChainPosition
    ) -> tuple[dict[str, DeferredJson], Callable[[Mapping[str, Json]], Any]]:
        """Return the arguments of a client step, and the function that restores its input."""
        if not isinstance(value, Record):
            deserialize = deserializer(value)
            return (
                {"input": self.expression(value, position)},
                lambda args: deserialize(args["input"]),
            )
        args = {key: self.expression(item, position) for key, item in value.fields.items()}
        deserializers = {key: deserializer(item) for key, item in value.fields.items()}
        rest_key = "input"
        while rest_key in args:
            rest_key += "_"
        if value.rest is not None:
            args[rest_key] = self.expression(value.rest, position)

        def deserialize_record(arguments: Mapping[str, Json]) -> Any:
            rest = decode(arguments[rest_key]) if rest_key in args else {}
            return {**rest, **{key: part(arguments[key]) for key, part in deserializers.items()}}

        return args, deserialize_record


def prompt_expression(value: PromptTurnsValue, position: ChainPosition) -> DeferredJson:
    """Return the expression of a prompt's message list.

    Raises:
        ProgramError: if a message has content other than text.
    """
    if not value.is_text_only:
        raise unsupported(
            position,
            "a message of the prompt has content other than text, such as an image, which a "
            "program cannot pass on; let a function return the message",
        )
    return value.expression


def _with_tag(index: int, expression: DeferredJson) -> DeferredJson:
    return lambda: {"object": {"of": index, "value": expression()}}
