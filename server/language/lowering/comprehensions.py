"""Lowering of list comprehensions and conditional expressions.

A comprehension with calls is a `map`, whose items run in parallel; without calls it is the operator
`each`. A conditional expression with names or calls is an `if`: only one side runs.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from ...program.content import Expression
from ...program.ir import IfNode, MapNode
from ...program.nodes.control.map import MAX_WIDTH
from ..errors import SourceArgumentError, UnsupportedSourceError, position_of
from ..syntax import walk
from . import calls, methods
from .interfaces import Lowerer
from .scope import FunctionSource, NameScope
from .values import Value, common_kind, var


class _Names(NamedTuple):
    """The names that a comprehension gives to an item and to its index."""

    item: str | None
    number: str | None
    is_pair: bool = False
    """Each item is the list of an index and an item."""


class ComprehensionLowerer:
    """Lowers the lists and conditions of one text."""

    def __init__(self, lowerer: Lowerer) -> None:
        self._lowerer = lowerer

    def conditional(self, node: ast.IfExp, scope: NameScope, hint: str | None = None) -> Value:
        """Lower `a if c else b` to an `if` node, unless both sides are constants."""
        test = self._lowerer.lower(node.test, scope)
        if self._lowerer.is_pure or not (_reads(node.body) or _reads(node.orelse)):
            chosen, other = (
                self._lowerer.lower(node.body, scope),
                self._lowerer.lower(node.orelse, scope),
            )
            kind = common_kind([chosen.kind, other.kind])
            return Value({"if": [test.expression, chosen.expression, other.expression]}, kind)
        emitter = self._lowerer.emitter
        bodies, flows, names, kinds = [], [], [], []
        for side in (node.body, node.orelse):
            with emitter.body() as (block, flow):
                value = self._lowerer.lower(side, scope)
                names.append(emitter.variable_of(value, "side"))
                kinds.append(value.kind)
            bodies.append(block)
            flows.append(flow)
        result = hint or emitter.unique("chosen")
        emitter.add(
            IfNode(
                id=result,
                cond=test.reference,
                then=bodies[0],
                otherwise=bodies[1],
                merge={result: (names[0], names[1])},
                **emitter.common(),
            )
        )
        emitter.mark_control(result, flows)
        return var(result, common_kind(kinds))

    def comprehension(self, node: ast.ListComp, scope: NameScope, hint: str | None = None) -> Value:
        if len(node.generators) > 1:
            message = "a comprehension has one `for`: write a comprehension inside of it"
            raise UnsupportedSourceError(message, position_of(node.generators[1].target))
        generator = node.generators[0]
        items, width = self._items(generator.iter, scope)
        names = _Names(*loop_names(generator.target, generator.iter))
        for condition in generator.ifs:
            items, names = self._filter(items, names, condition, scope)
        if names.item is not None and not self._needs_nodes(node.elt, scope):
            return self._each(items, names, node.elt, scope)
        if self._lowerer.is_pure:
            message = "move the call out of the condition: assign it to a name first"
            raise UnsupportedSourceError(message, position_of(node.elt))
        return self._map(items, width, names, node.elt, scope, hint)

    def _items(self, node: ast.expr, scope: NameScope) -> tuple[Value, int | None]:
        """Return the list of a loop, and the greatest length that the text states."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name == "enumerate" and scope.find(name) is None:
                if len(node.args) != 1 or node.keywords:
                    message = "`enumerate` takes one list"
                    raise SourceArgumentError("language.argument", message, position_of(node))
                return self._items(node.args[0], scope)
        width = None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            upper = node.slice.upper
            if isinstance(upper, ast.Constant) and isinstance(upper.value, int) and upper.value > 0:
                width = min(upper.value, MAX_WIDTH)
        value = self._lowerer.lower(node, scope)
        if value.kind not in ("list", "any"):
            message = f"`for` needs a list, got {value.kind}"
            if value.kind == "stream":
                message = "a stream is read by a `for` statement"
            raise SourceArgumentError("language.type", message, position_of(node))
        return value, width

    def _bound(self, names: _Names, scope: NameScope) -> tuple[NameScope, str, str | None]:
        """Return the scope of an item, and the variables of the item and of its index."""
        inner = scope.branch(is_local=True)
        item_name = self._variable(names.item or "item")
        if names.is_pair and names.item is not None and names.number is not None:
            inner.bind(names.number, Value({"get": [{"var": item_name}, 0]}, "number"))
            inner.bind(names.item, Value({"get": [{"var": item_name}, 1]}))
            return inner, item_name, None
        if names.item is not None:
            inner.bind(names.item, var(item_name))
        if names.number is None:
            return inner, item_name, None
        index_name = self._variable(names.number)
        inner.bind(names.number, var(index_name, "number"))
        return inner, item_name, index_name

    def _variable(self, hint: str) -> str:
        name = self._lowerer.emitter.unique(hint)
        self._lowerer.emitter.bound.add(name)
        return name

    def _each(self, items: Value, names: _Names, node: ast.expr, scope: NameScope) -> Value:
        inner, *variables = self._bound(names, scope)
        element = self._pure(node, inner)
        written = [name for name in variables if name is not None]
        return Value({"each": [items.expression, *written, element.expression]}, "list")

    def _pure(self, node: ast.expr, scope: NameScope) -> Value:
        self._lowerer.is_pure += 1
        try:
            return self._lowerer.lower(node, scope)
        finally:
            self._lowerer.is_pure -= 1

    def _filter(
        self, items: Value, names: _Names, node: ast.expr, scope: NameScope
    ) -> tuple[Value, _Names]:
        """Return the items for which a condition holds; with `enumerate`, as pairs with indices."""
        if self._needs_nodes(node, scope):
            message = "the condition of a comprehension cannot have calls: compute it before"
            raise UnsupportedSourceError(message, position_of(node))
        inner, item_name, index_name = self._bound(names, scope)
        condition = self._pure(node, inner)
        variables = [item_name]
        kept: list[Expression] = [{"var": item_name}]
        if index_name is not None:
            variables, kept = [item_name, index_name], [[{"var": index_name}, {"var": item_name}]]
            names = names._replace(is_pair=True)
        chosen = {"if": [condition.expression, kept, []]}
        filtered = {"flatten": [{"each": [items.expression, *variables, chosen]}]}
        return Value(filtered, "list"), names

    def _map(
        self,
        items: Value,
        width: int | None,
        names: _Names,
        node: ast.expr,
        scope: NameScope,
        hint: str | None,
    ) -> Value:
        emitter = self._lowerer.emitter
        inner, item_name, index_name = self._bound(names, scope)
        with emitter.body(is_ordered=False) as (body, flow):
            element = self._lowerer.lower(node, inner)
            collected = emitter.variable_of(element, "element")
        if flow.has_effects:
            message = "a function in a comprehension cannot `yield`, `kill` or wait: its items run "
            message += "in parallel; write a `for` loop"
            raise UnsupportedSourceError(message, position_of(node))
        result = hint or emitter.unique("items")
        optional: dict[str, Any] = {} if index_name is None else {"index": index_name}
        emitter.add(
            MapNode(
                id=result,
                items=items.reference,
                item=item_name,
                body=body,
                collect={result: collected},
                max_width=MAX_WIDTH if width is None else width,
                **optional,
                **emitter.common(),
            )
        )
        return var(result, "list")

    def _needs_nodes(self, node: ast.expr, scope: NameScope) -> bool:
        """Whether an expression has a call that is not a function of values."""
        for each in walk([node]):
            if not isinstance(each, ast.Call):
                continue
            if isinstance(each.func, ast.Name):
                is_defined = isinstance(scope.find(each.func.id), FunctionSource)
                if is_defined or each.func.id not in methods.FUNCTIONS:
                    return True
            elif isinstance(each.func, ast.Attribute) and calls.is_native(
                self._lowerer, each.func, scope
            ):
                return True
        return False


def _reads(node: ast.expr) -> bool:
    """Whether an expression reads a name or calls a function."""
    return any(isinstance(each, ast.Name | ast.Call) for each in walk([node]))


def loop_names(target: ast.expr, items: ast.expr) -> tuple[str | None, str | None]:
    """Return the names of item and index in `for item in` or `for index, item in enumerate()`.

    Raises:
        UnsupportedSourceError: for any other target.
    """
    is_enumerated = (
        isinstance(items, ast.Call)
        and isinstance(items.func, ast.Name)
        and items.func.id == "enumerate"
    )
    match target:
        case ast.Name(id=name) if not is_enumerated:
            return name, None
        case ast.Tuple(elts=[ast.Name(id=index), ast.Name(id=item)]) if is_enumerated:
            return item, index
        case _:
            message = "write `for item in items` or `for index, item in enumerate(items)`"
            raise UnsupportedSourceError(message, position_of(target))
