"""Compilation of control flow to nodes with bodies.

    RunnableBranch          if, nested in `else`
    RouterRunnable          if, nested in `else`, on the key
    RunnableWithFallbacks   try, nested in handlers
    RunnableRetry           try with retries
    RunnableEach            map

The compiler compiles the parts of these Runnables. A condition is a part like any other, so a
user's function becomes a client step.

Invariants: decisions follow LangChain's rules and order, and parts that are not chosen never run. A
chain for which this is impossible is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableBinding,
    RunnableBranch,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEachBase
from langchain_core.runnables.retry import RunnableRetry

from conure.server.program.ir import Json

from ..chat.json_values import EncodedValue
from .bodies import DeferredJson, GraphBody
from .chain_graph import ChainGraph, ChainPosition, unsupported
from .value_steps import item_of
from .values import (
    VALUE_KINDS,
    AnswerTextValue,
    AnswerValue,
    BranchedValue,
    CallValue,
    ClientValue,
    MappedValue,
    Source,
    Value,
    failing_expression,
)

CONTROL: Final = (
    RunnableBranch,
    RouterRunnable,
    RunnableWithFallbacks,
    RunnableRetry,
    RunnableEachBase,
)
MAX_RETRIES: Final = 10
"""Maximum of the server for one `try`."""

_ANY_FAILURE: Final = ((Exception,), (BaseException,))
"""Exception lists that mean any failure."""


class PartCompiler(Protocol):
    """Compiles the parts of a control-flow Runnable; implemented by `ChainCompiler`."""

    graph: ChainGraph

    def compile(self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition) -> Value:
        """Add a Runnable to the graph, and return its symbolic output."""
        ...


def compile_control_flow(
    compiler: PartCompiler, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
) -> Value:
    """Return the symbolic output of a Runnable listed in `CONTROL`.

    Raises:
        ProgramError: if the server cannot make its decision.
    """
    match runnable:
        case RunnableBranch():
            return _compile_branch(compiler, runnable, value, position, 0)
        case RouterRunnable():
            return _compile_router(compiler, runnable, value, position)
        case RunnableWithFallbacks():
            return _compile_fallbacks(compiler, runnable, value, position)
        case RunnableRetry():
            return _compile_retry(compiler, runnable, value, position)
        case _:
            assert isinstance(runnable, RunnableEachBase)
            return _compile_map(compiler, runnable, value, position)


CompilePart: TypeAlias = Callable[[], Value]
"""Compiles a part into the current body."""


def _compile_bodies(
    graph: ChainGraph, parts: Sequence[CompilePart], position: ChainPosition
) -> BranchedValue:
    """Compile each part into its own body."""
    out = graph.new_bodies(position.hint, len(parts))
    values = []
    for body, part in zip(out.bodies, parts, strict=True):
        with graph.in_body(body):
            values.append(part())
    return BranchedValue(out, tuple(values))


def _add_if(
    graph: ChainGraph,
    is_true: DeferredJson,
    parts: Sequence[CompilePart],
    position: ChainPosition,
) -> BranchedValue:
    node_id = graph.fresh_name(f"{position.hint}_if")
    branched = _compile_bodies(graph, parts, position)
    out = branched.outputs

    def node() -> Json:
        merge = out.build_merge()
        then, otherwise = (body.build() for body in out.bodies)
        return {
            "id": node_id,
            "op": "if",
            "cond": is_true(),
            "then": then,
            "else": otherwise,
            "merge": merge,
        }

    graph.add(node)
    return branched


def _compile_branch(
    compiler: PartCompiler,
    branch: RunnableBranch[Any, Any],
    value: Value,
    position: ChainPosition,
    index: int,
) -> Value:
    if index == len(branch.branches):
        return compiler.compile(branch.default, value, position.child(".default", "else"))
    condition, arm = branch.branches[index]
    path = f".branches[{index}]"
    is_true = _compile_condition(
        compiler, condition, value, position.child(f"{path}[0]", f"is_{index + 1}")
    )
    return _add_if(
        compiler.graph,
        is_true,
        (
            lambda: compiler.compile(arm, value, position.child(f"{path}[1]", str(index + 1))),
            lambda: _compile_branch(compiler, branch, value, position, index + 1),
        ),
        position,
    )


def _compile_condition(
    compiler: PartCompiler, condition: Runnable[Any, Any], value: Value, position: ChainPosition
) -> DeferredJson:
    return _truth_expression(compiler.graph, compiler.compile(condition, value, position), position)


def _truth_expression(graph: ChainGraph, result: Value, position: ChainPosition) -> DeferredJson:
    if isinstance(result, BranchedValue):
        # The value that leaves the node carries the index of its body, so it would always be true.
        variable = result.outputs.export(
            graph.map_bodies(result, lambda each: _truth_expression(graph, each, position))
        )
        return lambda: {"var": variable}
    if isinstance(result, ClientValue):  # Python's truth differs from JSON's
        result = result.then(bool, position.hint, "bool")
    if isinstance(result, AnswerValue):  # a message object is always true
        return lambda: True
    if isinstance(result, AnswerTextValue):
        return result.call.text
    return graph.expression(result, position)


def _compile_router(
    compiler: PartCompiler, router: RouterRunnable[Any], value: Value, position: ChainPosition
) -> Value:
    names = list(router.runnables)
    key = item_of(value, "key", position)
    route_input = item_of(value, "input", position)
    if isinstance(key, ClientValue):
        step = ("one of", *names)
        checked = key.then(lambda key: _require_route(names, key), position.hint, step)
        key_expression = compiler.graph.expression(checked, position)
    elif isinstance(key, AnswerTextValue):
        key_expression = _checked_key(compiler.graph, key, names, position)
    else:
        raise unsupported(
            position, f"RouterRunnable requires a text key, got {VALUE_KINDS[type(key)]}"
        )

    def route(index: int) -> Value:
        name = names[index]
        at = position.child(f".runnables[{name!r}]", name)
        if index == len(names) - 1:
            return compiler.compile(router.runnables[name], route_input, at)
        return _add_if(
            compiler.graph,
            lambda: {"eq": [key_expression(), name]},
            (
                lambda: compiler.compile(router.runnables[name], route_input, at),
                lambda: route(index + 1),
            ),
            position,
        )

    return route(0)


def _require_route(names: Sequence[str], key: Any) -> str:
    """Return the name of a route. A key of another class, such as an Enum, may equal its name."""
    found = next((name for name in names if name == key), None)
    if found is None:
        raise ValueError(f"No runnable associated with key '{key}'")  # LangChain's message
    return found


def _checked_key(
    graph: ChainGraph, key: AnswerTextValue, names: list[str], position: ChainPosition
) -> DeferredJson:
    """Add a node that returns the key, and fails for an unknown key."""

    def checked() -> Json:
        text = key.call.text()
        words = {"concat": ["No runnable associated with key '", text, "'"]}
        return {"if": [{"contains": [names, text]}, text, failing_expression(words)]}

    return graph.add_expression(f"{position.hint}_key", checked).text


def _add_try(
    graph: ChainGraph,
    parts: Sequence[CompilePart],
    position: ChainPosition,
    *,
    num_retries: int | None = None,
) -> BranchedValue:
    node_id = graph.fresh_name(f"{position.hint}_try")
    branched = _compile_bodies(graph, parts, position)
    out = branched.outputs

    def node() -> Json:
        result: dict[str, Json] = {"id": node_id, "op": "try", "merge": out.build_merge()}
        first, *others = (body.build() for body in out.bodies)
        result |= {"body": first, "handlers": [{"body": other} for other in others]}
        return result if num_retries is None else {**result, "retries": num_retries}

    graph.add(node)
    return branched


def _compile_fallbacks(
    compiler: PartCompiler,
    runnable: RunnableWithFallbacks[Any, Any],
    value: Value,
    position: ChainPosition,
) -> Value:
    if runnable.exceptions_to_handle not in _ANY_FAILURE:
        names = ", ".join(kind.__name__ for kind in runnable.exceptions_to_handle)
        raise unsupported(
            position,
            f"RunnableWithFallbacks handles only {names}; a program cannot distinguish "
            "exceptions, so remove exceptions_to_handle",
        )
    if runnable.exception_key is not None:
        raise unsupported(
            position,
            "RunnableWithFallbacks passes an exception on (exception_key), which cannot be sent as "
            "JSON",
        )
    fallbacks = list(runnable.fallbacks)

    def fall(index: int) -> Value:
        def part() -> Value:
            if index == 0:
                return compiler.compile(
                    runnable.runnable, value, position.child(".runnable", "try")
                )
            at = position.child(f".fallbacks[{index - 1}]", f"else_{index}")
            return compiler.compile(fallbacks[index - 1], value, at)

        if index == len(fallbacks):
            return part()
        return _add_try(compiler.graph, (part, lambda: fall(index + 1)), position)

    return fall(0)


def _compile_retry(
    compiler: PartCompiler,
    runnable: RunnableRetry[Any, Any],
    value: Value,
    position: ChainPosition,
) -> Value:
    if runnable.retry_exception_types not in _ANY_FAILURE:
        raise unsupported(
            position,
            "RunnableRetry retries only on some exceptions; a program cannot distinguish them, so "
            "remove retry_if_exception_type",
        )
    num_retries = runnable.max_attempt_number - 1
    if num_retries < 0:  # LangChain's form of "without a limit"
        raise unsupported(
            position,
            f"RunnableRetry has stop_after_attempt={runnable.max_attempt_number}, which sets no "
            f"limit; a program allows at most {MAX_RETRIES + 1} attempts, so set a limit",
        )
    if num_retries > MAX_RETRIES:
        raise unsupported(
            position,
            f"RunnableRetry makes {num_retries + 1} attempts; a program allows at most "
            f"{MAX_RETRIES + 1}",
        )
    bound = runnable.bound
    if runnable.kwargs or runnable.config or runnable.config_factories:
        bound = RunnableBinding(
            bound=bound,
            kwargs=runnable.kwargs,
            config=runnable.config,
            config_factories=runnable.config_factories,
        )

    def part() -> Value:
        return compiler.compile(bound, value, position.child(".bound", "try"))

    return _add_try(compiler.graph, (part,), position, num_retries=num_retries)


def _compile_map(
    compiler: PartCompiler,
    runnable: RunnableEachBase[Any, Any],
    value: Value,
    position: ChainPosition,
) -> Value:
    graph = compiler.graph
    out = graph.new_bodies(position.hint, 1)
    node_id = graph.fresh_name(f"{position.hint}_map")
    at = position.child(".bound", "each")
    (body,) = out.bodies
    items, name, item = _map_items(graph, value, body, position)
    with graph.in_body(body):
        result = compiler.compile(runnable.bound, item, at)

    def node() -> Json:
        collect = out.build_collect()
        each = {"items": items, "as": name(), "body": body.build(), "collect": collect}
        return {"id": node_id, "op": "map", **each}

    graph.add(node)
    return MappedValue(out, result)


def _map_items(
    graph: ChainGraph, value: Value, body: GraphBody, position: ChainPosition
) -> tuple[str, Callable[[], str], Value]:
    """Return a map's list, the name of its item, and the item's symbolic value.

    The name is a function, to be called after compilation.
    """
    if isinstance(value, ClientValue):
        source = Source(f"{position.hint}_item", body)
        # An item carries only what the body needs of it.
        rows = value.then(
            lambda items: EncodedValue([source.encode(item) for item in items]),
            f"{position.hint}_items",
        )
        item_variable = graph.fresh_name(f"{position.hint}_item")
        with graph.in_body(body):
            graph.add_unpacking(source, item_variable)

        def name() -> str:
            return source.views[0].variable if len(source.views) == 1 else item_variable

        return graph.view_variable(rows, "value"), name, ClientValue(source, lambda each: each)
    if isinstance(value, MappedValue) and isinstance(value.value, AnswerTextValue | AnswerValue):
        answer = value.value
        is_message = isinstance(answer, AnswerValue) or answer.is_sent_as_message
        variable = graph.fresh_name(f"{position.hint}_item")
        call = CallValue(variable, is_message, answer.call.arguments)
        item = AnswerValue(call) if isinstance(answer, AnswerValue) else AnswerTextValue(call)
        return graph.exported_variable(value, position), lambda: call.variable, item
    raise unsupported(
        position,
        f"RunnableEach requires a list, got {VALUE_KINDS[type(value)]}; return a list from a "
        "function",
    )
