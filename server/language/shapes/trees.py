"""Syntax trees of statements, of which those of one shape share one.

Responsibility: the nodes that the slots of a shape fill, and what is known about a shape before it
is compiled.

Invariant: a tree that `Shape.fill` has filled equals the tree of the statement alone, except for
the columns, and for the lines of expressions. Only messages use those.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from ..lowering.scope import NameUses, assigned_names
from ..syntax import can_jump, children, walk
from .markers import line_marker, name_marker, number_of, text_marker
from .slots import ShapeSlot, Statement, parts_with_offsets

_RECORDABLE: Final[frozenset[type[ast.AST]]] = frozenset(
    {
        ast.Assign, ast.Expr, ast.If, ast.With, ast.withitem, ast.Pass, ast.Yield, ast.Name,
        ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.JoinedStr, ast.FormattedValue,
        ast.Subscript, ast.Slice, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Eq,
        ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
        ast.Call, ast.keyword, ast.Attribute,
    }
)  # fmt: skip
"""Nodes whose lowering treats all slots of a shape alike."""
_PLAIN: Final[frozenset[type[ast.AST]]] = frozenset(
    {ast.Name, ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.JoinedStr, ast.FormattedValue}
)
"""Nodes of options that are known before the program runs. Any other constant expression would be
computed with the markers of its slots."""


class SharingError(Exception):
    """A text cannot be compiled by its shapes, or not with certainty."""


class Shape:
    """The statements of one shape, with one syntax tree for all of them."""

    def __init__(self, example: Statement, body: list[ast.stmt]) -> None:
        nodes = list(walk(list(body)))
        self.body = body
        self.num_nodes = len(nodes)
        self._statements = [
            (each, each.lineno - example.first_line, (each.end_lineno or 0) - example.first_line)
            for each in nodes
            if isinstance(each, ast.stmt)
        ]
        self._places = _find_places(example, body)
        self.markers = [
            text_marker(number, slot.value) if slot.is_text else name_marker(number)
            for number, slot in enumerate(example.slots)
        ]
        self.is_text = [slot.is_text for slot in example.slots]
        self.num_places = [len(each) for each in self._places]
        self.fill_markers()
        self.reads = [
            (number_of(node.id), node.id, node.lineno - example.first_line)
            for node in map(_read_name, nodes)
            if node is not None
        ]
        """The slots that are read, None for other names; the names; and their lines."""
        self.other_names = {
            each.id for each in nodes if type(each) is ast.Name and number_of(each.id) is None
        }
        """Names that are not slots."""
        uses = NameUses(body)
        self.assigned = [(number_of(name), name, count) for name, count in uses.assigned.items()]
        """The slots that are assigned, None for other names; the names; and how often."""
        self.in_jobs = [(number_of(name), name) for name in uses.in_jobs]
        self.jobs = [(number_of(name), name) for name in uses.jobs]
        self.can_jump = any(map(can_jump, body))
        self.is_recordable = _is_recordable(nodes)

    def fill(self, slots: Sequence[ShapeSlot], first_line: int) -> list[ast.stmt]:
        """Return the tree of a statement of this shape; it is valid until the next call.

        Args:
            slots: of the statement.
            first_line: of the statement in the text.
        """
        return self._fill([slot.value for slot in slots], first_line)

    def fill_markers(self) -> list[ast.stmt]:
        """Return the tree with markers instead of slots and lines."""
        return self._fill(self.markers, line_marker(0))

    def _fill(self, values: Sequence[str], first_line: int) -> list[ast.stmt]:
        for value, places in zip(values, self._places, strict=True):
            for node in places:
                if type(node) is ast.Name:
                    node.id = value
                else:
                    assert type(node) is ast.Constant
                    node.value = value
        for statement, first, last in self._statements:
            statement.lineno, statement.end_lineno = first_line + first, first_line + last
        return self.body


def _is_recordable(nodes: list[ast.AST]) -> bool:
    for node in nodes:
        if type(node) not in _RECORDABLE:
            return False
        if type(node) is ast.If and assigned_names([*node.body, *node.orelse]):
            return False
        if type(node) is ast.keyword and not _PLAIN.issuperset(map(type, walk([node.value]))):
            return False
    return True


def _read_name(node: ast.AST) -> ast.Name | None:
    """Return the name that a node reads."""
    if type(node) is ast.Name:
        return node if type(node.ctx) is ast.Load else None
    if type(node) is ast.AugAssign and type(node.target) is ast.Name:
        return node.target
    return None


def _find_places(example: Statement, body: list[ast.stmt]) -> list[list[ast.Name | ast.Constant]]:
    """Return the nodes that each slot fills.

    Raises:
        SharingError: if a slot does not fill exactly one node wherever it is written.
    """
    found = dict(_leaves(body))
    numbers = {slot: number for number, slot in enumerate(example.slots)}
    places: list[list[ast.Name | ast.Constant]] = [[] for _ in numbers]
    for offset, parts in parts_with_offsets(example.text):
        line = example.text.count("\n", 0, offset)
        column = offset - (example.text.rfind("\n", 0, offset) + 1)
        leaf = found.get((example.first_line + line, column))
        nodes: list[ast.expr | None] = [leaf]
        if isinstance(leaf, ast.JoinedStr):
            nodes = [_part(each) for each in leaf.values]
        if len(nodes) != len(parts):
            raise SharingError
        for node, slot in zip(nodes, parts, strict=True):
            if slot is None:
                continue
            kind = ast.Constant if slot.is_text else ast.Name
            value = getattr(node, "value" if slot.is_text else "id", None)
            if type(node) is not kind or value != slot.value:
                raise SharingError
            places[numbers[slot]].append(node)
    return places


def _leaves(body: list[ast.stmt]) -> Iterator[tuple[tuple[int, int], ast.expr]]:
    """Iterate over names, constants and f-strings, not inside f-strings, with positions."""
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name | ast.Constant | ast.JoinedStr):
            yield (node.lineno, node.col_offset), node
        else:
            stack += children(node)


def _part(node: ast.expr) -> ast.expr:
    """Return a part of an f-string: a text, or the expression that is inserted."""
    return node.value if isinstance(node, ast.FormattedValue) else node
