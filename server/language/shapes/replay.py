"""Replay: statements of a recorded shape become JSON, with their own names and texts.

Responsibility: the context of a statement, and its effects on the emitter and the names of the
program. All nodes of the program are collected as JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from ..lowering.emitter import Emitter
from ..lowering.interfaces import Signatures
from ..lowering.scope import NameScope, NameUses
from ..lowering.values import Value
from .recording import NameMeaning, Recording, Reference, ShapeContext, fill_expression, record
from .slots import ShapeSlot, Statement
from .trees import Shape, SharingError

MAX_CONTEXTS: Final = 4
"""Recordings of one shape. With more contexts, recording them costs more than it saves."""


class Replayer:
    """Compiles the statements of one text that have a recorded shape."""

    def __init__(
        self,
        emitter: Emitter,
        scope: NameScope,
        uses: NameUses,
        defined: Collection[str],
        signatures: Signatures | None,
    ) -> None:
        self._emitter = emitter
        self._scope = scope
        self._uses = uses
        self._signatures = signatures
        self._defined = frozenset({*defined, *uses.assigned, *uses.jobs, *scope.inputs})
        """All names that the text defines in any way."""
        self._recordings: dict[tuple[object, ...], tuple[ShapeContext, Recording | None]] = {}
        self._num_contexts: dict[Shape, int] = {}
        self._known: dict[Shape, _NamesOfShape] = {}
        self._parts: list[str] = []

    def json(self) -> str | None:
        """Return the JSON of all nodes; None if the emitter has them, as none was replayed."""
        if not self._parts:
            return None
        self._collect()
        return f"[{','.join(self._parts)}]"

    def _collect(self) -> None:
        """Move the nodes that were made without a recording to the JSON."""
        block = self._emitter.block
        if block:
            self._parts.append(msgspec.json.encode(block)[1:-1].decode())
            block.clear()

    def replay(self, shape: Shape, statement: Statement) -> bool:
        """Compile a statement; return False, without any effect, if it has no recording.

        Raises:
            SourceTooLargeError: `language.too_large`.
        """
        found = self._find(shape, statement.slots)
        if found is None:
            return False
        recording, variables, nodes = found
        emitter = self._emitter
        values = [slot.value for slot in statement.slots]
        written = [slot.json for slot in statement.slots]
        values += variables
        values += nodes
        for hint in recording.hints:
            values.append(emitter.unique(values[hint] if isinstance(hint, int) else hint))
        written += values[len(written) :]
        written += [str(statement.first_line + offset) for offset in recording.lines]
        written += recording.literals
        json = "".join(recording.pieces(written))
        emitter.count_shared(recording.num_nodes, recording.num_lowered, len(json))
        if json:
            self._collect()
            self._parts.append(json)
        self._apply(recording, values)
        return True

    def _find(
        self, shape: Shape, slots: Sequence[ShapeSlot]
    ) -> tuple[Recording, list[str], list[str]] | None:
        """Return a recording for a statement, the variables it reads, and the nodes before it."""
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = _NamesOfShape(shape, self._defined)
        scope = self._scope
        if not known.is_usable:
            return None
        for slot in known.assigned:
            if not scope.is_fresh(slots[slot].value):
                return None
        bindings, assigned, inputs = scope.bindings, self._uses.assigned, scope.inputs
        key: list[object] = [shape]
        variables: list[str] = []
        for slot in known.read:
            value = bindings.get(slots[slot].value)
            if type(value) is not Value:
                return None
            variable = value.variable if value.definition is None else None
            if variable is None:
                key.append(id(value))
                continue
            variables.append(variable)
            key += (value.kind, value.is_answer, variable in assigned, variable in inputs)
        for name in known.others:
            value = bindings.get(name)
            if type(value) is not Value:
                return None
            key.append(id(value))
        flow = self._emitter.flow
        nodes: dict[str, int] = {}
        if flow.last or flow.barriers:
            key += [nodes.setdefault(node, len(nodes)) for node in (*flow.barriers, *flow.last)]
            key.append(len(flow.barriers))
        found = self._recordings.get(tuple(key))
        if found is None:
            found = self._recorded(shape, known, slots, nodes)
            self._recordings[tuple(key)] = found
        return None if found[1] is None else (found[1], variables, list(nodes))

    def _recorded(
        self, shape: Shape, known: _NamesOfShape, slots: Sequence[ShapeSlot], nodes: dict[str, int]
    ) -> tuple[ShapeContext, Recording | None]:
        """Return the context of a statement, which keeps its values alive, and its recording."""
        flow = self._emitter.flow
        names = [(slot, slots[slot].value) for slot in known.read]
        context = ShapeContext(
            meanings=(
                *((slot, self._meaning(name, is_fixed=False)) for slot, name in names),
                *((name, self._meaning(name, is_fixed=True)) for name in known.others),
            ),
            barriers=tuple(nodes[each] for each in flow.barriers),
            last=tuple(nodes[each] for each in flow.last),
        )
        number = self._num_contexts.get(shape, 0)
        self._num_contexts[shape] = number + 1
        if number >= MAX_CONTEXTS:
            return context, None
        try:
            return context, record(shape, context, self._signatures)
        except SharingError:
            return context, None

    def _meaning(self, name: str, *, is_fixed: bool) -> NameMeaning:
        value = self._scope.bindings[name]
        assert isinstance(value, Value)
        is_fixed = is_fixed or value.variable is None or value.definition is not None
        return NameMeaning(
            fixed=value if is_fixed else None,
            kind=value.kind,
            is_answer=value.is_answer,
            is_assigned=value.variable in self._uses.assigned,
            is_input=value.variable in self._scope.inputs,
        )

    def _apply(self, recording: Recording, values: Sequence[str]) -> None:
        """Apply what a statement does, besides its nodes, to the emitter and the names."""

        def name_of(reference: Reference) -> str:
            return values[reference] if isinstance(reference, int) else reference

        emitter, scope, flow = self._emitter, self._scope, self._emitter.flow
        for name, job in recording.jobs:
            emitter.jobs[name_of(name)] = job
        for group in recording.outputs:
            emitter.add_outputs(sorted(map(name_of, group)))
        for name, variable, value in recording.bindings:
            if variable is None:
                made = _filled(value, values)
            else:
                made = Value({"var": name_of(variable)}, value.kind, is_answer=value.is_answer)
            scope.bindings[name_of(name)] = made
        for name in recording.versions:
            scope.count_version(name_of(name))
        if recording.order is not None:
            barriers, last = recording.order
            flow.barriers = tuple(map(name_of, barriers))
            flow.last = tuple(map(name_of, last))
        flow.has_effects = flow.has_effects or recording.has_effects
        flow.has_waits = flow.has_waits or recording.has_waits
        emitter.has_results = emitter.has_results or recording.has_results


class _NamesOfShape:
    """The names of a shape, by what they do to its statements."""

    def __init__(self, shape: Shape, defined: frozenset[str]) -> None:
        assigned = {number for number, _, _ in shape.assigned}
        self.is_usable = shape.is_recordable and None not in assigned
        self.assigned = [each for each in assigned if each is not None]
        """Slots that are assigned."""
        read = {number: None for number, _, _ in shape.reads if number is not None}
        self.read = [number for number in read if number not in assigned]
        """Slots that are read and not assigned."""
        self.others = sorted(shape.other_names & defined)
        """Names that belong to the shape and that the text defines."""


def _filled(value: Value, values: Sequence[str]) -> Value:
    return Value(
        fill_expression(value.expression, values),
        value.kind,
        fill_expression(value.definition, values),
        value.is_answer,
    )
