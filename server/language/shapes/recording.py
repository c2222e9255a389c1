"""Recording: the nodes of a shape as JSON with holes, and what its statements do to the compiler.

A shape is lowered once with markers for its slots, by the same code as any statement. What it does
depends on its shape, and on what its names mean at this point of the text: `ShapeContext`. A
statement of the same shape and context has the same nodes, with other texts and names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ...program.content import Expression
from ...program.ir import Job
from ..errors import LanguageError
from ..lowering.blocks import LoopReads
from ..lowering.emitter import Emitter, Flow
from ..lowering.interfaces import Signatures
from ..lowering.scope import NameScope, NameUses
from ..lowering.statements import StatementLowerer
from ..lowering.values import Value
from ..syntax import NameReads
from .markers import may_have_marker, name_marker, number_of, split_at_markers
from .trees import Shape, SharingError

Reference: TypeAlias = int | str
"""The number of a marker, or a name as it is."""


class NameMeaning(NamedTuple):
    """What a name that a statement reads means at this point of the text."""

    fixed: Value | None
    """The value itself, if all statements of the shape read the same one."""
    kind: Any = "any"
    is_answer: bool = False
    is_assigned: bool = False
    """Whether the name of its variable is one that the text assigns."""
    is_input: bool = False


class ShapeContext(NamedTuple):
    """What a statement depends on besides its shape and slots."""

    meanings: tuple[tuple[int | str, NameMeaning], ...]
    """Of the slots that are read before they are assigned, and of other names."""
    barriers: tuple[int, ...]
    last: tuple[int, ...]
    """The order of the flow, as numbers of distinct nodes."""


class Recording(NamedTuple):
    """What a statement of one shape does.

    Markers are numbered in the order: slots, variables of the slots that are read, nodes of the
    flow, names that the statement creates, lines.
    """

    hints: list[Reference]
    """The names that the statement asks for."""
    lines: list[int]
    """The offsets of lines."""
    pieces: itemgetter[Any]
    """Selects the parts of the JSON from the values of markers and `literals`."""
    literals: list[str]
    num_nodes: int
    num_lowered: int
    jobs: list[tuple[Reference, Job]]
    outputs: list[list[Reference]]
    """The outputs that each `yield` adds, in the order of their names."""
    bindings: list[tuple[Reference, Reference | None, Value]]
    """Names, their variables if they are nothing else, and their values with markers."""
    versions: list[Reference]
    order: tuple[list[Reference], list[Reference]] | None
    """The barriers and last nodes of the flow after the statement, if they are others."""
    has_effects: bool
    has_waits: bool
    has_results: bool


class _Recorder(Emitter):
    """Creates the nodes of one statement, with markers for the names that it asks for."""

    def __init__(self, flow: Flow, first_name: int) -> None:
        super().__init__()
        self.hints: list[str] = []
        self.groups: list[list[str]] = []
        self.flow = flow
        self.first_name = first_name

    def unique(self, hint: str) -> str:
        self.hints.append(hint)
        return name_marker(self.first_name + len(self.hints) - 1)

    def add_outputs(self, names: Iterable[str]) -> None:
        self.groups.append(list(names))


def record(shape: Shape, context: ShapeContext, signatures: Signatures | None) -> Recording:
    """Return what statements of a shape do in a context.

    Raises:
        SharingError: if that is not certain.
    """
    body = shape.fill_markers()
    uses = NameUses(body)
    number = len(shape.markers)
    first_node = number + sum(meaning.fixed is None for _, meaning in context.meanings)
    nodes = max((*context.barriers, *context.last), default=-1) + 1
    flow = Flow(
        "main",
        tuple(name_marker(first_node + each) for each in context.barriers),
        tuple(name_marker(first_node + each) for each in context.last),
    )
    emitter = _Recorder(flow, first_node + nodes)
    scope = NameScope(emitter, uses)
    for key, meaning in context.meanings:
        value = meaning.fixed
        if value is None:
            value = Value({"var": name_marker(number)}, meaning.kind, is_answer=meaning.is_answer)
            number += 1
        scope.bind(shape.markers[key] if isinstance(key, int) else key, value)
        if meaning.is_assigned and value.variable is not None:
            uses.assigned.setdefault(value.variable, 0)
        if meaning.is_input and value.variable is not None:
            scope.inputs.add(value.variable)
    before = dict(scope.bindings)
    try:
        StatementLowerer(emitter, LoopReads(NameReads({})), signatures).run(body, scope)
    except LanguageError:
        raise SharingError from None
    bindings = {name: each for name, each in scope.bindings.items() if before.get(name) is not each}
    if scope.forward_reads:
        raise SharingError
    order = (
        [first_node + each for each in context.barriers],
        [first_node + each for each in context.last],
    )
    return _recording(shape, emitter, scope, bindings, order)


def _recording(
    shape: Shape,
    emitter: _Recorder,
    scope: NameScope,
    bindings: Mapping[str, Any],
    before: tuple[list[int], list[int]],
) -> Recording:
    if not all(isinstance(each, Value) for each in bindings.values()):
        raise SharingError
    if any(each.parent is not None for each in emitter.jobs.values()):
        raise SharingError
    parts = split_at_markers(msgspec.json.encode(emitter.block)[1:-1].decode())
    _check_counts(shape, parts, bindings, emitter.hints)
    lines = sorted({-1 - each for each in parts[1::2] if isinstance(each, int) and each < 0})
    first_line = emitter.first_name + len(emitter.hints)
    first_literal = first_line + len(lines)
    literals = [each for each in parts[::2] if isinstance(each, str)]
    indices: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            indices.append(first_literal + number // 2)
        else:
            indices.append(part if part >= 0 else first_line + lines.index(-1 - part))
    flow = emitter.flow
    order = [_reference(each) for each in flow.barriers], [_reference(each) for each in flow.last]
    return Recording(
        hints=[_reference(each) for each in emitter.hints],
        lines=lines,
        pieces=itemgetter(*indices),
        literals=literals,
        num_nodes=emitter.num_nodes,
        num_lowered=emitter.num_lowered,
        jobs=[(_reference(name), job) for name, job in emitter.jobs.items()],
        outputs=[[_reference(each) for each in group] for group in emitter.groups],
        bindings=[(_reference(name), _variable_of(each), each) for name, each in bindings.items()],
        versions=[_reference(name) for name in scope.num_versions],
        order=None if order == before else order,
        has_effects=flow.has_effects,
        has_waits=flow.has_waits,
        has_results=emitter.has_results,
    )


def _reference(name: str) -> Reference:
    number = number_of(name)
    if number is None and may_have_marker(name):
        raise SharingError
    return name if number is None else number


def _variable_of(value: Value) -> Reference | None:
    """Return the variable of a value that has nothing else to fill in."""
    is_plain = value.variable is not None and value.definition is None
    return _reference(value.variable) if is_plain and value.variable is not None else None


def _check_counts(
    shape: Shape, parts: list[str | int], bindings: Mapping[str, Value], hints: list[str]
) -> None:
    """Check that each text of a statement is in its nodes: it has not been computed with."""
    found = Counter(parts[1::2])
    values = msgspec.json.encode([(each.expression, each.definition) for each in bindings.values()])
    found.update(split_at_markers(values.decode())[1::2])
    found.update(each for each in map(number_of, hints) if each is not None)
    for number, count in enumerate(shape.num_places):
        if shape.is_text[number] and found[number] < count:
            raise SharingError


def fill_expression(expression: Expression, values: Sequence[str]) -> Expression:
    """Return an expression with the values of its markers."""
    if isinstance(expression, str):
        parts = split_at_markers(expression)
        return "".join(each if isinstance(each, str) else values[each] for each in parts)
    if isinstance(expression, dict):
        return {
            fill_expression(key, values): fill_expression(each, values)
            for key, each in expression.items()
        }
    if isinstance(expression, list):
        return [fill_expression(each, values) for each in expression]
    return expression
