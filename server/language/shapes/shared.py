"""A text whose statements share shapes: parsed, and compiled statement by statement."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from ..lowering.scope import NameScope, NameUses, RepeatedUses
from ..syntax import MAX_SYNTAX_NODES, NameReads, can_jump, parse, walk
from .markers import MAX_LINES, may_have_marker
from .replay import Replayer
from .slots import Statement, split_text
from .trees import Shape, SharingError


class SharedText(NamedTuple):
    """A text of which one statement of each shape has been parsed and checked."""

    statements: list[tuple[Statement, Shape | None, list[ast.stmt]]]
    """All statements; with their shape, if another one has it, or else their trees."""
    own: list[ast.stmt]
    """The trees of the statements without such a shape."""
    reads: NameReads
    uses: NameUses
    can_jump: bool
    """Whether the last statement may be a `return`."""


def parse_shared(text: str) -> SharedText | None:
    """Return a text by its statements; None if no or few statements share shapes.

    Raises:
        SharingError: if its statements cannot be told apart with certainty.
        LanguageError: if one of its statements is invalid.
    """
    statements = split_text(text)
    if statements is None or may_have_marker(text):
        return None
    counts: dict[object, int] = {}
    sources: list[str] = []
    for each in statements:
        number = counts[each.shape] = counts.get(each.shape, 0) + 1
        sources.append(each.text if number == 1 else "\n" * each.num_breaks)
    tree, reads, num_nodes = parse("\n".join(sources))
    bodies = _bodies(statements, tree.body)
    shapes: dict[object, Shape] = {}
    found: list[tuple[Statement, Shape | None, list[ast.stmt]]] = []
    for statement, body in zip(statements, bodies, strict=True):
        shape = shapes.get(statement.shape)
        if shape is not None:
            num_nodes += shape.num_nodes
            _add_reads(reads, shape, statement)
        elif counts[statement.shape] > 1:
            shape = shapes[statement.shape] = _shape_of(statement, body)
        found.append((statement, shape, body))
    if num_nodes > MAX_SYNTAX_NODES or not any(each.is_recordable for each in shapes.values()):
        raise SharingError
    last = tree.body[-1:] if found[-1][1] is None else []
    if any(can_jump(each) for each in tree.body if each not in last):
        raise SharingError
    own: list[ast.stmt] = []
    uses = RepeatedUses()
    for statement, shape, body in found:
        if shape is None:
            own += body
        else:
            _add_assigned(uses, shape, statement)
    return SharedText(
        statements=found,
        own=own,
        reads=NameReads(reads),
        uses=NameUses(own, uses),
        can_jump=any(map(can_jump, last)),
    )


def _bodies(statements: list[Statement], body: list[ast.stmt]) -> list[list[ast.stmt]]:
    """Return the trees of each statement; none for those that were not parsed.

    Raises:
        SharingError: if a tree is not within the lines of one statement.
    """
    bodies: list[list[ast.stmt]] = []
    number = 0
    for statement in statements:
        trees: list[ast.stmt] = []
        end = statement.first_line + statement.num_breaks
        while number < len(body) and body[number].lineno <= end:
            tree = body[number]
            if tree.lineno < statement.first_line or (tree.end_lineno or 0) > end:
                raise SharingError
            trees.append(tree)
            number += 1
        bodies.append(trees)
    return bodies


def _shape_of(statement: Statement, body: list[ast.stmt]) -> Shape:
    """Return the shape of a statement, which may not declare anything that is read again."""
    if not body or statement.num_breaks >= MAX_LINES:
        raise SharingError
    if any(isinstance(each, ast.FunctionDef | ast.AnnAssign) for each in walk(list(body))):
        raise SharingError
    shape = Shape(statement, body)
    if shape.can_jump:
        raise SharingError
    return shape


def _add_reads(reads: dict[str, list[int]], shape: Shape, statement: Statement) -> None:
    slots, first_line = statement.slots, statement.first_line
    for slot, name, offset in shape.reads:
        read = name if slot is None else slots[slot].value
        reads.setdefault(read, []).append(first_line + offset)


def _add_assigned(uses: RepeatedUses, shape: Shape, statement: Statement) -> None:
    slots = statement.slots
    for slot, name, count in shape.assigned:
        assigned = name if slot is None else slots[slot].value
        uses.assigned[assigned] = uses.assigned.get(assigned, 0) + count
    for slot, name in shape.in_jobs:
        uses.in_jobs.add(name if slot is None else slots[slot].value)
    for slot, name in shape.jobs:
        uses.jobs.add(name if slot is None else slots[slot].value)


def lower_shared(
    text: SharedText,
    replayer: Replayer,
    run: Callable[[list[ast.stmt], NameScope], None],
    scope: NameScope,
) -> None:
    """Lower all statements of a text in order.

    Args:
        text: the text.
        replayer: of the program.
        run: lowers statements by their trees.
        scope: the names of the program.

    Raises:
        LanguageError: at the first statement that is invalid.
    """
    for statement, shape, body in text.statements:
        if shape is None:
            run(body, scope)
        elif not replayer.replay(shape, statement):
            run(shape.fill(statement.slots, statement.first_line), scope)
