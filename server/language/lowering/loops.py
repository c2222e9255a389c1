"""Lowering of `for` and `try`.

A `for` over a list is a loop whose rounds run one after the other; names that the body assigns are
carried from round to round. A `for` over a stream follows a text while it is generated. A `try` is
a node whose handlers are chosen by error codes.
"""

from __future__ import annotations

import ast
import itertools
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec import UNSET

from ...program.ir import LoopNode, Node, TryNode
from ...program.nodes.control.loop import DEFAULT_MAX_ROUNDS, MAX_ROUNDS
from ...program.nodes.control.try_ import Handler
from ..errors import SourceArgumentError, SourceNameError, UnsupportedSourceError, position_of
from ..options import Kind
from .blocks import Branch, carried_names, merge_branches
from .comprehensions import loop_names
from .emitter import Emitter, Flow
from .interfaces import StatementRunner
from .scope import BREAK, NameScope, Unassigned, assigned_names
from .values import NotConstantError, Value, var

ERROR_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "Timeout": ("node.timeout", "client.timeout", "job.timeout", "call.timeout"),
    "ConstraintIncomplete": ("output.incomplete", "output.not_json", "output.invalid"),
    "ContextOverflow": ("prompt.too_long",),
    "ToolError": ("call.*", "client.*"),
    "ValueError": (
        "expr.type",
        "expr.value",
        "expr.json",
        "expr.number",
        "expr.size",
        "expr.fuel",
        "expr.depth",
        "expr.regex",
        "map.not_a_list",
        "loop.count",
        "variable.type",
    ),
    "Failed": ("expr.fail", "fail.*"),
    "LimitExceeded": ("loop.exhausted", "map.too_wide", "program.too_large"),
}
"""The kinds of errors that `except` can name, to the codes of failures. `ToolError` also has the
codes that start with the name of a function of the server."""


# --- loops over lists -------------------------------------------------------------------------


def lower_for(statements: StatementRunner, node: ast.For, scope: NameScope) -> None:
    """Lower `for item in items:`.

    Raises:
        LanguageError: if the loop is not valid.
    """
    if node.orelse:
        message = "`else` after a loop is not supported: assign a flag before `break`"
        raise UnsupportedSourceError(message, position_of(node.orelse[0]))
    lowerer = statements.expressions
    is_enumerate = isinstance(node.target, ast.Tuple)
    item, index = loop_names(node.target, node.iter)
    items_node = node.iter
    if is_enumerate and isinstance(node.iter, ast.Call):
        if len(node.iter.args) != 1 or node.iter.keywords:
            message = "`enumerate` takes one list"
            raise SourceArgumentError("language.argument", message, position_of(node.iter))
        items_node = node.iter.args[0]
    items = lowerer.lower(items_node, scope)
    if items.kind == "stream":
        _lower_stream(statements, node, items, scope)
        return
    if items.kind not in ("list", "any"):
        message = f"`for` needs a list or a stream, got {items.kind}"
        if items.kind == "object":
            message += ": write the keys as a list, and read `data[key]` in the loop"
        raise SourceArgumentError("language.type", message, position_of(node.iter))
    _refuse_return(node)
    loop = _Loop(items, item or "item", index, _bound(items, items_node), {})
    # A name can have another kind after a round than before the loop. The body is then compiled
    # again, with that kind unknown.
    unknown: set[str] = set()
    while True:
        mismatched = _try_loop(statements, node, scope, loop, frozenset(unknown))
        if not mismatched:
            return
        unknown |= mismatched


class _Loop(NamedTuple):
    items: Value
    item: str
    counter: str | None
    rounds: tuple[int, bool]
    """The greatest number of rounds, and whether there certainly is one."""
    variables: dict[str, str]
    """The variables of the names that are carried, once they have one."""


def _bound(items: Value, node: ast.expr) -> tuple[int, bool]:
    try:
        constant = items.constant()
    except NotConstantError:
        constant = None
    if isinstance(constant, list):
        return max(1, min(len(constant), MAX_ROUNDS)), bool(constant)
    match node:
        case ast.Subscript(slice=ast.Slice(lower=None, upper=ast.Constant(value=int(upper)))) if (
            upper > 0
        ):
            return min(upper, MAX_ROUNDS), False
        case _:
            return DEFAULT_MAX_ROUNDS, False


def _refuse_return(node: ast.For) -> None:
    stack: list[ast.stmt] = list(node.body)
    while stack:
        match stack.pop():
            case ast.Return() as jump:
                message = "`return` inside of a loop is not supported: assign and `break`"
                raise UnsupportedSourceError(message, position_of(jump))
            case ast.If(body=body, orelse=otherwise):
                stack += [*body, *otherwise]
            case ast.With(body=body):
                stack += body
            case _:
                pass


def _try_loop(
    statements: StatementRunner,
    node: ast.For,
    scope: NameScope,
    loop: _Loop,
    unknown: frozenset[str],
) -> set[str]:
    """Lower a loop; return the names whose kind changes in a round, if the loop was not added."""
    emitter = statements.emitter
    needed = statements.reads.outside([node])
    assigned = assigned_names(node.body) - {loop.item, loop.counter or loop.item}
    before = carried_names(scope, assigned, needed, runs=loop.rounds[1])
    for name in before:
        if name not in loop.variables:
            loop.variables[name] = scope.version(name)
    kinds = {name: _kind_in_round(value.kind, name in unknown) for name, value in before.items()}
    jobs = dict(emitter.jobs)
    body = _lower_body(statements, node, scope.branch(), loop, kinds)
    after = {name: _value_after(body.scope, name, loop) for name in before}
    mismatched = {
        name for name, kind in kinds.items() if kind != "any" and after[name].kind != kind
    }
    if mismatched:
        emitter.jobs = jobs
        return mismatched
    carry = {
        loop.variables[name]: (value.expression, after[name].expression)
        for name, value in before.items()
    }
    _add_loop(emitter, loop, body, carry)
    _bind_results(scope, before, body.scope, loop.variables, assigned)
    for name in {loop.item, loop.counter or loop.item} - {"_"}:
        reason = "has a value only inside of the loop: assign it to another name there"
        scope.bind(name, Unassigned(reason))
    return set()


class _LoweredBody(NamedTuple):
    """A lowered body of a loop."""

    block: list[Node]
    flow: Flow
    scope: NameScope
    """The names at the end of a round."""
    item: str
    """The variable of the item."""
    counter: str | None
    """The variable of the round's number, if the loop has a counter."""


def _lower_body(
    statements: StatementRunner,
    node: ast.For,
    inner: NameScope,
    loop: _Loop,
    kinds: dict[str, Kind],
) -> _LoweredBody:
    """Lower the body in the scope `inner`, with carried names of these kinds."""
    emitter = statements.emitter
    with emitter.body() as (block, flow):
        for name, kind in kinds.items():
            inner.bind(name, var(loop.variables[name], kind))
            emitter.bound.add(loop.variables[name])
        inner.bind(BREAK, Value(False, "bool"))
        item = emitter.unique(loop.item)
        emitter.bound.add(item)
        inner.bind(loop.item, var(item))
        counter = None
        if loop.counter is not None:
            counter = emitter.unique(loop.counter)
            emitter.bound.add(counter)
            inner.bind(loop.counter, var(counter, "number"))
        statements.reads.carried.update(kinds.keys())
        statements.run(node.body, inner)
        statements.reads.carried.subtract(kinds.keys())
        emitter.bound -= set(loop.variables.values())
    return _LoweredBody(block, flow, inner, item, counter)


def _kind_in_round(kind: Kind, is_unknown: bool) -> Kind:
    """Return the kind that a carried name is compiled with."""
    if is_unknown or kind == "null":
        return "any"
    return "text" if kind == "stream" else kind


def _value_after(inner: NameScope, name: str, loop: _Loop) -> Value:
    """Return the value of a carried name at the end of a round."""
    value = inner.bindings[name]
    return value if isinstance(value, Value) else var(loop.variables[name])


def _add_loop(
    emitter: Emitter, loop: _Loop, body: _LoweredBody, carry: dict[str, tuple[Any, Any]]
) -> None:
    stop = body.scope.bindings[BREAK]
    assert isinstance(stop, Value)
    name = emitter.unique("loop")
    optional: dict[str, Any] = {} if body.counter is None else {"index": body.counter}
    emitter.add(
        LoopNode(
            id=name,
            items=loop.items.reference,
            item=body.item,
            carry=carry,
            body=body.block,
            until=UNSET if stop.expression is False else stop.expression,
            max_iter=loop.rounds[0],
            **optional,
            **emitter.common(),
        )
    )
    emitter.mark_control(name, [body.flow])


def _bind_results(
    scope: NameScope,
    before: dict[str, Value],
    inner: NameScope,
    variables: dict[str, str],
    assigned: set[str],
) -> None:
    """Bind what the names of a loop mean after it."""
    for name, value in before.items():
        after = inner.bindings[name]
        kind: Kind = "any"
        if isinstance(after, Value) and (after.kind == value.kind or value.kind == "null"):
            kind = after.kind
        scope.bind(name, var(variables[name], kind))
    for name in assigned - before.keys():
        reason = "has a value only inside of the loop, which may have no round: assign it before "
        scope.bind(name, Unassigned(f"{reason}the loop"))


# --- loops over streams -----------------------------------------------------------------------


def _lower_stream(
    statements: StatementRunner, node: ast.For, stream: Value, scope: NameScope
) -> None:
    """Lower `for chunk in stream:`, whose body adds chunks to texts and yields."""
    if not isinstance(node.target, ast.Name):
        message = "a stream has no indices: write `for chunk in stream:`"
        raise UnsupportedSourceError(message, position_of(node.target))
    chunk = node.target.id
    source = stream.variable
    if source is None:
        message = "assign the stream to a name before the loop"
        raise UnsupportedSourceError(message, position_of(node.iter))
    partial = {"partial": source}
    inner = scope.branch()
    reason = "is one chunk of the stream: add it to a text, as `text += chunk`, or write "
    inner.bind(chunk, Unassigned(f"{reason}`yield chunk`"))
    collected: dict[str, Value] = {}
    for statement in node.body:
        with statements.emitter.at(statement):
            target = _accumulated(statement, chunk)
            if target is not None:
                name = ast.copy_location(ast.Name(target, ast.Load()), statement)
                before = scope.read(name)
                if before.kind not in ("text", "any") or target in collected:
                    message = f"`{target}` must be a text, to which one chunk is added"
                    raise SourceArgumentError("language.type", message, position_of(statement))
                collected[target] = before
                inner.bind(target, _extended(before, partial))
                continue
            _yield_in_stream(statements, statement, chunk, stream, inner)
    for text, before in collected.items():
        scope.assign(text, _extended(before, stream.expression))
    scope.bind(chunk, Unassigned("has a value only inside of the loop"))


def _extended(before: Value, text: Any) -> Value:
    if before.expression == "":
        return Value(text, "text")
    return Value({"concat": [before.expression, text]}, "text")


def _accumulated(statement: ast.stmt, chunk: str) -> str | None:
    """Return the name in `name += chunk` or `name = name + chunk`."""
    match statement:
        case ast.AugAssign(ast.Name(target), ast.Add(), ast.Name(added)) if added == chunk:
            return target
        case ast.Assign(
            [ast.Name(target)], ast.BinOp(ast.Name(left), ast.Add(), ast.Name(added))
        ) if left == target and added == chunk:
            return target
        case _:
            return None


def _yield_in_stream(
    statements: StatementRunner, statement: ast.stmt, chunk: str, stream: Value, scope: NameScope
) -> None:
    match statement:
        case ast.Pass():
            return
        case ast.Expr(value=ast.Yield(value=ast.Name(id=name))) if name == chunk:
            statements.emit_yield(stream, "delta")
        case ast.Expr(value=ast.Yield(value=ast.expr() as value)):
            statements.emit_yield(statements.expressions.lower(value, scope), "partial")
        case _:
            message = "the body of a loop over a stream has `text += chunk` and `yield` only: "
            message += "move other statements after the loop"
            raise UnsupportedSourceError(message, position_of(statement))


# --- handlers ---------------------------------------------------------------------------------


def lower_try(statements: StatementRunner, node: ast.Try, scope: NameScope) -> None:
    """Lower `try:` and `except Kind:`.

    Raises:
        LanguageError: if the statement is not valid.
    """
    for extra, name in ((node.orelse, "else"), (node.finalbody, "finally")):
        if extra:
            message = f"`{name}` is not supported in a `try`: write the statements after it"
            raise UnsupportedSourceError(message, position_of(extra[0]))
    bodies = [node.body, *(handler.body for handler in node.handlers)]
    _refuse_jumps(bodies)
    functions = statements.expressions.signatures or {}
    tools = {f"{name.partition('.')[0]}.*": None for name in sorted(functions)}
    codes = [_codes_of(handler, tuple(tools)) for handler in node.handlers]
    emitter = statements.emitter
    branches = []
    for body in bodies:
        with emitter.body() as (block, flow):
            inner = scope.branch()
            statements.run(body, inner)
        branches.append(Branch(block, flow, inner))
    needed = partial(statements.reads.outside, [node])
    merges = merge_branches(emitter, scope, branches, needed, "`try`")
    handlers = [
        Handler(codes=list(each), body=branch.block)
        for each, branch in zip(codes, branches[1:], strict=True)
    ]
    name = emitter.unique("attempt")
    emitter.add(
        TryNode(
            id=name,
            body=branches[0].block,
            handlers=handlers,
            merge={variable: list(each) for variable, each in merges.items()},
            **emitter.common(),
        )
    )
    emitter.mark_control(name, [branch.flow for branch in branches])


def _refuse_jumps(bodies: list[list[ast.stmt]]) -> None:
    stack: list[ast.stmt] = [statement for body in bodies for statement in body]
    while stack:
        match stack.pop():
            case (ast.Break() | ast.Continue() | ast.Return()) as jump:
                message = "`break`, `continue` and `return` cannot leave a `try`: assign a flag"
                raise UnsupportedSourceError(message, position_of(jump))
            case ast.If(body=body, orelse=otherwise):
                stack += [*body, *otherwise]
            case _:
                pass


def _codes_of(handler: ast.ExceptHandler, tools: tuple[str, ...]) -> tuple[str, ...]:
    """Return the codes that an `except` handles; none for all."""
    if handler.name is not None:
        message = "`as` is not supported: write one `except` for each kind of error"
        raise UnsupportedSourceError(message, position_of(handler))
    match handler.type:
        case None:
            return ()
        case ast.Name() as kind:
            return _codes_of_kind(kind, tools)
        case ast.Tuple(elts=[_, *_] as kinds) if all(isinstance(each, ast.Name) for each in kinds):
            found = [_codes_of_kind(each, tools) for each in kinds if isinstance(each, ast.Name)]
            if not all(found):
                return ()  # one of the kinds is any
            return tuple(dict.fromkeys(itertools.chain(*found)))
        case kind:
            message = "write `except Kind:` or `except (Kind, Kind):`"
            raise UnsupportedSourceError(message, position_of(kind))


def _codes_of_kind(node: ast.Name, tools: tuple[str, ...]) -> tuple[str, ...]:
    if node.id in ("Exception", "Error"):
        return ()
    if node.id == "Killed":
        message = (
            "a kill is not an error; nodes that read a killed variable are skipped: write "
            "`first(variable, other)` for a value that exists after a kill"
        )
        raise UnsupportedSourceError(message, position_of(node))
    if node.id not in ERROR_KINDS:
        message = f"unknown kind of error `{node.id}`: the kinds are {', '.join(ERROR_KINDS)}"
        raise SourceNameError("language.undefined_name", message, position_of(node))
    return ERROR_KINDS[node.id] + (tools if node.id == "ToolError" else ())
