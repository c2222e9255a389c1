"""Lowering of calls: LLM calls, functions of the text, of the server, and of values.

Invariant: a name is looked up in tables only. A call of an unknown function is an error.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, Final, NoReturn

from ...program.content import Expression
from ...program.functions import OPTIONAL_FUNCTIONS
from ...program.ir import CallNode, ClientNode, ExprNode, KillNode, TryNode, WaitNode
from ...program.nodes import NODE_KINDS
from ...program.suggestion import suggestion
from ..errors import (
    LanguageError,
    SourceArgumentError,
    SourceNameError,
    UnsupportedSourceError,
    position_of,
)
from .generation import lower_gen, lower_llm_chat
from .interfaces import Lowerer
from .methods import FUNCTIONS, METHODS, call_function, call_method
from .scope import FunctionSource, NameScope
from .values import NULL, Value, as_text, common_kind, repeats_base, text_of, var

_STATEMENTS: Final = {
    "job": "`job` opens a block: write `with job():`",
    "wait": "`wait` is a statement: write `wait(a, b)` on a separate line",
    "enumerate": "`enumerate` belongs to a loop: write `for index, item in enumerate(items)`",
    "print": "`print` is not supported: write `yield {'name': value}`",
}
_COMMON: Final = {"timeout": "timeout_s", "retries": "retries"}


def lower_call(lowerer: Lowerer, node: ast.Call, scope: NameScope, hint: str | None) -> Value:
    """Return the value of a call.

    Raises:
        LanguageError: if the function is unknown or its arguments are invalid.
    """
    if isinstance(node.func, ast.Attribute):
        return _lower_attribute(lowerer, node, node.func, scope, hint)
    if not isinstance(node.func, ast.Name):
        message = "only names can be called: write `name(...)`"
        raise UnsupportedSourceError(message, position_of(node))
    name = node.func.id
    found = scope.find(name)
    if isinstance(found, FunctionSource):
        _require_nodes(lowerer, node)
        return lowerer.inline(found, node, scope, hint)
    if name in _CALLS:
        _require_nodes(lowerer, node)
        return _CALLS[name](lowerer, node, scope, hint)
    if name in FUNCTIONS:
        if node.keywords:
            message = f"`{name}` takes no named arguments"
            raise SourceArgumentError("language.argument", message, position_of(node))
        arguments = [lowerer.lower(each, scope) for each in node.args]
        return call_function(name, arguments, node)
    if name in _STATEMENTS:
        raise SourceNameError("language.unknown_function", _STATEMENTS[name], position_of(node))
    return _lower_native(lowerer, node, name, scope, hint)


def makes_variable(lowerer: Lowerer, node: ast.Call, scope: NameScope) -> bool:
    """Whether a call makes a node, whose variable can have a name."""
    if isinstance(node.func, ast.Attribute):
        return is_native(lowerer, node.func, scope)
    if not isinstance(node.func, ast.Name):
        return False
    found = scope.find(node.func.id)
    if not isinstance(found, FunctionSource):
        return node.func.id not in FUNCTIONS
    return all(isinstance(statement, ast.Expr) for statement in found.definition.body)


def is_answer_text(node: ast.Subscript, scope: NameScope) -> bool:
    """Whether an expression is `llm_chat(...)['content']`, or its `['context']`."""
    match node:
        case ast.Subscript(
            ast.Call(ast.Name("llm_chat")), ast.Constant(value=("content" | "context"))
        ):
            return scope.find("llm_chat") is None
        case _:
            return False


def lower_answer_text(
    lowerer: Lowerer, node: ast.Subscript, scope: NameScope, hint: str | None
) -> Value:
    """Lower `llm_chat(...)['content']`: a call whose value is the text of the answer."""
    assert isinstance(node.value, ast.Call)
    _require_nodes(lowerer, node.value)
    return text_of(lower_llm_chat(lowerer, node.value, scope, hint, is_text=True))


def _require_nodes(lowerer: Lowerer, node: ast.Call) -> None:
    if lowerer.is_pure:
        message = "this call cannot be made here: assign it to a name first"
        raise UnsupportedSourceError(message, position_of(node))


def _lower_attribute(
    lowerer: Lowerer, node: ast.Call, function: ast.Attribute, scope: NameScope, hint: str | None
) -> Value:
    if is_native(lowerer, function, scope):
        assert isinstance(function.value, ast.Name)
        name = f"{function.value.id}.{function.attr}"
        return _lower_native(lowerer, node, name, scope, hint)
    module = function.value
    if (
        isinstance(module, ast.Name)
        and function.attr not in METHODS
        and lowerer.signatures is not None
        and not scope.is_assigned(module.id)
    ):
        _refuse_function(lowerer, node, f"{module.id}.{function.attr}", scope)
    if node.keywords:
        message = f"`{function.attr}` takes no named arguments"
        raise SourceArgumentError("language.argument", message, position_of(node))
    value = lowerer.lower(function.value, scope)
    arguments = [lowerer.lower(each, scope) for each in node.args]
    if function.attr == "get" and arguments and repeats_base(arguments[0].expression):
        lowerer.emitter.count_repetition(value.expression)
    return call_method(function.attr, value, arguments, node)


def is_native(lowerer: Lowerer, function: ast.Attribute, scope: NameScope) -> bool:
    """Whether `a.b(...)` calls a function of the server, not a method of a value."""
    if not isinstance(function.value, ast.Name) or scope.find(function.value.id) is not None:
        return False
    if lowerer.signatures is None:
        return function.attr not in METHODS
    return f"{function.value.id}.{function.attr}" in lowerer.signatures


# --- functions of the server ------------------------------------------------------------------


def _lower_native(
    lowerer: Lowerer, node: ast.Call, name: str, scope: NameScope, hint: str | None
) -> Value:
    parameters = _parameters(lowerer, node, name, scope)
    _require_nodes(lowerer, node)
    args, fields = _arguments(lowerer, node, scope, parameters)
    variable = hint or lowerer.emitter.unique(name.rpartition(".")[2])
    lowerer.emitter.add(
        CallNode(
            id=variable,
            function=name,
            args=args,
            output=variable,
            **(lowerer.emitter.common() | fields),
        )
    )
    return var(variable)


def _parameters(lowerer: Lowerer, node: ast.Call, name: str, scope: NameScope) -> list[str]:
    """Return the parameters of a function of the server.

    Raises:
        SourceNameError: `language.unknown_function`.
    """
    if lowerer.signatures is None:
        return [f"argument{number}" for number in range(len(node.args))]
    if name not in lowerer.signatures:
        _refuse_function(lowerer, node, name, scope)
    return list(lowerer.signatures[name])


def _refuse_function(lowerer: Lowerer, node: ast.Call, name: str, scope: NameScope) -> NoReturn:
    signatures = lowerer.signatures or {}
    known = [*signatures, *FUNCTIONS, *_CALLS, *scope.known_names()]
    otherwise = (
        f"write a `def`; the language has {', '.join((*_CALLS, *FUNCTIONS))}, and the server "
        f"{', '.join(sorted(signatures)) or 'no functions'}"
    )
    hint = (
        OPTIONAL_FUNCTIONS.get(name)
        or suggestion(name, known, similarity=0.8)
        or suggestion(name, _CALLS, otherwise)
    )
    message = f"unknown function `{name}`: {hint}"
    raise SourceNameError("language.unknown_function", message, position_of(node))


def _arguments(
    lowerer: Lowerer, node: ast.Call, scope: NameScope, parameters: list[str], skip: int = 0
) -> tuple[dict[str, Expression], dict[str, Any]]:
    """Return the arguments of a call by parameter, and the fields that belong to its node."""
    args: dict[str, Expression] = {}
    positional = node.args[skip:]
    if len(positional) > len(parameters):
        message = f"{len(positional)} arguments are given, and it takes at most {len(parameters)}"
        if skip:
            message = "only the first argument has no name: write `name=value` for the others"
        raise SourceArgumentError("language.argument", message, position_of(node))
    for parameter, each in zip(parameters, positional, strict=False):
        args[parameter] = lowerer.lower(each, scope).expression
    fields: dict[str, Any] = {}
    seen = set(args)
    for keyword in node.keywords:
        name = keyword.arg
        if name is None or name in seen:
            message = "`**` is not supported" if name is None else f"`{name}` is given twice"
            raise SourceArgumentError("language.argument", message, position_of(keyword.value))
        seen.add(name)
        if name in _COMMON and name not in parameters:
            fields[_COMMON[name]] = lowerer.constant(keyword.value, scope, f"`{name}`")
        else:
            lowerer.emitter.count_text(len(name))
            args[name] = lowerer.lower(keyword.value, scope).expression
    return args, fields


def _first_text(lowerer: Lowerer, node: ast.Call, scope: NameScope, what: str) -> str:
    """Return the first argument, which must be a literal text."""
    if node.args:
        name = lowerer.constant(node.args[0], scope, what)
        if isinstance(name, str):
            return name
    function = node.func.id if isinstance(node.func, ast.Name) else "call"
    message = f"{what} is the first argument: write `{function}('name', argument=...)`"
    raise SourceArgumentError("language.argument", message, position_of(node))


def _lower_client(lowerer: Lowerer, node: ast.Call, scope: NameScope, hint: str | None) -> Value:
    """Lower `client('name', ...)`: a step that the client runs."""
    name = _first_text(lowerer, node, scope, "the name of the step")
    args, fields = _arguments(lowerer, node, scope, [], skip=1)
    variable = hint or lowerer.emitter.unique("reply")
    common = lowerer.emitter.common() | fields
    lowerer.emitter.add(ClientNode(id=variable, name=name, args=args, output=variable, **common))
    return var(variable)


def _lower_procedure(lowerer: Lowerer, node: ast.Call, scope: NameScope, hint: str | None) -> Value:
    """Lower `call('procedure', ...)`: a stored procedure."""
    kind: Any = NODE_KINDS.get("procedure")
    if kind is None:
        message = "this server has no stored procedures"
        raise UnsupportedSourceError(message, position_of(node))
    name = _first_text(lowerer, node, scope, "the name of the procedure")
    args, fields = _arguments(lowerer, node, scope, [], skip=1)
    emitter = lowerer.emitter
    variable = hint or emitter.unique("result")
    retries = fields.pop("retries", 0)
    if retries == 0:
        common = emitter.common() | fields
        emitter.add(kind(id=variable, procedure=name, args=args, output=variable, **common))
        return var(variable)
    inner = emitter.unique(variable)  # the node of a procedure cannot be retried
    with emitter.body() as (body, _):
        common = emitter.common() | fields
        emitter.add(kind(id=inner, procedure=name, args=args, output=inner, **common))
    merge: dict[str, list[Expression]] = {variable: [inner]}
    emitter.add(TryNode(id=variable, body=body, retries=retries, merge=merge, **emitter.common()))
    return var(variable)


def _lower_race(lowerer: Lowerer, node: ast.Call, scope: NameScope, hint: str | None) -> Value:
    """Lower `race(a, b)`: the first value; the calls that produce the others are cancelled."""
    if len(node.args) < 2 or node.keywords:
        message = "`race` takes two or more variables, as `race(a, b)`"
        raise SourceArgumentError("language.argument", message, position_of(node))
    values = [lowerer.lower(each, scope) for each in node.args]
    variables: list[str] = []
    for each, value in zip(node.args, values, strict=True):
        if value.is_constant or scope.is_input(value.variable):
            message = "a constant or an input would always win: `race` takes results of calls"
            raise SourceArgumentError("language.argument", message, position_of(each))
        if value.variable is None:
            message = "`race` takes variables: assign this value to a name first"
            raise SourceArgumentError("language.argument", message, position_of(each))
        if value.variable in variables:
            message = "`race` has the same value twice: each of its variables needs its own call"
            raise SourceArgumentError("language.argument", message, position_of(each))
        variables.append(value.variable)
    emitter = lowerer.emitter
    wait, kill = emitter.unique("race"), emitter.unique("losers")
    emitter.add(WaitNode(id=wait, variables=variables, mode="any", **emitter.common()))
    after: dict[str, Any] = {**emitter.common(), "after": [wait]}
    emitter.add(KillNode(id=kill, targets=variables, **after))
    winner = hint or emitter.unique("winner")
    first = {"first": [{"var": name} for name in variables]}
    after = {**emitter.common(), "after": [kill]}
    emitter.add(ExprNode(id=winner, expr=first, output=winner, **after))
    return var(winner, common_kind([value.kind for value in values]))


def _lower_fail(lowerer: Lowerer, node: ast.Call, scope: NameScope, hint: str | None) -> Value:
    """Lower `fail(message)`: ends the program, or the `try` around it, with an error."""
    if len(node.args) != 1 or node.keywords:
        message = "`fail` takes one message"
        raise SourceArgumentError("language.argument", message, position_of(node))
    text = as_text(lowerer.lower(node.args[0], scope))
    emitter = lowerer.emitter
    name = hint or emitter.unique("fail")
    emitter.add(ExprNode(id=name, expr={"fail": [text]}, output=name, **emitter.common()))
    return NULL


_CALLS: Final[dict[str, Callable[[Lowerer, ast.Call, NameScope, str | None], Value]]] = {
    "llm_chat": lower_llm_chat,
    "gen": lower_gen,
    "client": _lower_client,
    "call": _lower_procedure,
    "race": _lower_race,
    "fail": _lower_fail,
}


def too_deep(node: ast.Call) -> NoReturn:
    """Refuse functions that call each other without end, or too deeply."""
    message = "functions call each other too deeply: a function cannot call itself"
    raise LanguageError("language.recursion", message, position_of(node))
