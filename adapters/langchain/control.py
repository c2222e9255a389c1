"""Parts of a chain that decide what else of it runs, as nodes with bodies.

    RunnableBranch          if, one in the other's `else`
    RouterRunnable          the same, on its key
    RunnableWithFallbacks   try, one in the other's handler
    RunnableRetry           try, with retries
    RunnableEach            map

Knows these Runnables and nodes. Refuses to know what stands in them: a walk reads that. A
condition is read like any other part, so a function of the user is a client step.

Kept true: what is decided is decided as LangChain does, in its order, and what is not chosen
never runs. Where that cannot be had, the chain is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEachBase
from langchain_core.runnables.retry import RunnableRetry

from conure.server.program.ir import Json

from .bodies import Body, Late
from .graph import Graph, Place, unsupported
from .values import (
    KINDS,
    Answer,
    Call,
    Either,
    Local,
    Many,
    Source,
    Text,
    Value,
    failure,
)

CONTROL: Final = (
    RunnableBranch,
    RouterRunnable,
    RunnableWithFallbacks,
    RunnableRetry,
    RunnableEachBase,
)
MAX_RETRIES: Final = 10
"""Of a `try`."""

_ALL: Final = ((Exception,), (BaseException,))
"""Exceptions that stand for any failure."""


class Reader(Protocol):
    """Reads the parts."""

    graph: Graph

    def read(self, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value:
        """What a Runnable makes of a value."""
        ...

    def item(self, value: Value, key: Any, place: Place) -> Value:
        """What stands under a key."""
        ...


def decided(walk: Reader, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value:
    """What one of `CONTROL` makes of a value.

    Raises:
        ProgramError: if it decides by what a server does not know.
    """
    match runnable:
        case RunnableBranch():
            return _branch(walk, runnable, value, place, 0)
        case RouterRunnable():
            return _routed(walk, runnable, value, place)
        case RunnableWithFallbacks():
            return _fallbacks(walk, runnable, value, place)
        case RunnableRetry():
            return _retried(walk, runnable, value, place)
        case _:
            assert isinstance(runnable, RunnableEachBase)
            return _mapped(walk, runnable, value, place)


Part: TypeAlias = Callable[[], Value]
"""Reads what stands in a body."""


def _either(graph: Graph, parts: Sequence[Part], place: Place) -> Either:
    """What parts make, each read in a body of its own."""
    out = graph.bodies(place.hint, len(parts))
    values = []
    for body, part in zip(out.bodies, parts, strict=True):
        with graph.inside(body):
            values.append(part())
    return Either(out, tuple(values))


def _if(graph: Graph, cond: Late, parts: Sequence[Part], place: Place) -> Either:
    node_id = graph.fresh(f"{place.hint}_if")
    either = _either(graph, parts, place)
    out = either.exit

    def node() -> Json:
        merge = out.merge()
        then, otherwise = (body.write() for body in out.bodies)
        branches = {"then": then, "else": otherwise}
        return {"id": node_id, "op": "if", "cond": cond(), **branches, "merge": merge}

    graph.add(node)
    return either


def _branch(
    walk: Reader, branch: RunnableBranch[Any, Any], value: Value, place: Place, index: int
) -> Value:
    if index == len(branch.branches):
        return walk.read(branch.default, value, place.part(".default", "else"))
    condition, arm = branch.branches[index]
    here = f".branches[{index}]"
    cond = _truth(walk, condition, value, place.part(f"{here}[0]", f"is_{index + 1}"))
    return _if(
        walk.graph,
        cond,
        (
            lambda: walk.read(arm, value, place.part(f"{here}[1]", str(index + 1))),
            lambda: _branch(walk, branch, value, place, index + 1),
        ),
        place,
    )


def _truth(walk: Reader, condition: Runnable[Any, Any], value: Value, place: Place) -> Late:
    return _is_true(walk.graph, walk.read(condition, value, place), place)


def _is_true(graph: Graph, made: Value, place: Place) -> Late:
    if isinstance(made, Either):  # in each body by itself: outside, it says which it is, too
        found = made.exit.give(graph.each(made, lambda each: _is_true(graph, each, place)))
        return lambda: {"var": found}
    if isinstance(made, Local):  # Python says what is true, not JSON
        made = made.then(bool, place.hint, "bool")
    if isinstance(made, Answer):  # an object, whatever the model said
        return lambda: True
    return graph.expression(made, place)


def _routed(walk: Reader, router: RouterRunnable[Any], value: Value, place: Place) -> Value:
    names = list(router.runnables)
    key = walk.item(value, "key", place)
    given = walk.item(value, "input", place)
    if isinstance(key, Local):
        step = ("one of", *names)
        known = key.then(lambda found: _one_of(names, found), place.hint, step)
        late = walk.graph.expression(known, place)
    elif isinstance(key, Text):
        late = _checked(walk.graph, key, names, place)
    else:
        raise unsupported(place, f"RouterRunnable takes a text as its key, not {KINDS[type(key)]}")

    def route(index: int) -> Value:
        name = names[index]
        at = place.part(f".runnables[{name!r}]", name)
        if index == len(names) - 1:
            return walk.read(router.runnables[name], given, at)
        return _if(
            walk.graph,
            lambda: {"eq": [late(), name]},
            (lambda: walk.read(router.runnables[name], given, at), lambda: route(index + 1)),
            place,
        )

    return route(0)


def _one_of(names: Sequence[str], found: Any) -> Any:
    if found not in names:
        raise ValueError(f"No runnable associated with key '{found}'")  # LangChain's own words
    return found


def _checked(graph: Graph, key: Text, names: list[str], place: Place) -> Late:
    """The key, in a node that fails with any other one."""

    def checked() -> Json:
        found = key.call.text()
        words = {"concat": ["No runnable associated with key '", found, "'"]}
        return {"if": [{"contains": [names, found]}, found, failure(words)]}

    return graph.computed(f"{place.hint}_key", checked).text


def _try(
    graph: Graph, parts: Sequence[Part], place: Place, *, num_retries: int | None = None
) -> Either:
    node_id = graph.fresh(f"{place.hint}_try")
    either = _either(graph, parts, place)
    out = either.exit

    def node() -> Json:
        made: dict[str, Json] = {"id": node_id, "op": "try", "merge": out.merge()}
        first, *others = (body.write() for body in out.bodies)
        made |= {"body": first, "handlers": [{"body": other} for other in others]}
        return made if num_retries is None else {**made, "retries": num_retries}

    graph.add(node)
    return either


def _fallbacks(
    walk: Reader, runnable: RunnableWithFallbacks[Any, Any], value: Value, place: Place
) -> Value:
    if runnable.exceptions_to_handle not in _ALL:
        names = ", ".join(kind.__name__ for kind in runnable.exceptions_to_handle)
        raise unsupported(
            place,
            f"RunnableWithFallbacks handles {names} alone; a server does not know exceptions, so "
            "leave out exceptions_to_handle",
        )
    if runnable.exception_key is not None:
        raise unsupported(
            place,
            "RunnableWithFallbacks hands on an exception (exception_key), which cannot travel as "
            "JSON",
        )
    fallbacks = list(runnable.fallbacks)

    def fall(index: int) -> Value:
        def part() -> Value:
            if index == 0:
                return walk.read(runnable.runnable, value, place.part(".runnable", "try"))
            at = place.part(f".fallbacks[{index - 1}]", f"else_{index}")
            return walk.read(fallbacks[index - 1], value, at)

        if index == len(fallbacks):
            return part()
        return _try(walk.graph, (part, lambda: fall(index + 1)), place)

    return fall(0)


def _retried(walk: Reader, runnable: RunnableRetry[Any, Any], value: Value, place: Place) -> Value:
    if runnable.retry_exception_types not in _ALL:
        raise unsupported(
            place,
            "RunnableRetry repeats on some exceptions alone; a server does not know them, so "
            "leave out retry_if_exception_type",
        )
    num_retries = runnable.max_attempt_number - 1
    if num_retries > MAX_RETRIES:
        raise unsupported(
            place,
            f"RunnableRetry makes {num_retries + 1} attempts; at most {MAX_RETRIES + 1} go "
            "into a program",
        )

    def part() -> Value:
        return walk.read(runnable.bound, value, place.part(".bound", "try"))

    return _try(walk.graph, (part,), place, num_retries=num_retries)


def _mapped(
    walk: Reader, runnable: RunnableEachBase[Any, Any], value: Value, place: Place
) -> Value:
    graph = walk.graph
    out = graph.bodies(place.hint, 1)
    node_id = graph.fresh(f"{place.hint}_map")
    at = place.part(".bound", "each")
    (body,) = out.bodies
    items, name, item = _items(graph, value, body, place)
    with graph.inside(body):
        made = walk.read(runnable.bound, item, at)

    def node() -> Json:
        collect = out.collect()
        each = {"items": items, "as": name(), "body": body.write(), "collect": collect}
        return {"id": node_id, "op": "map", **each}

    graph.add(node)
    return Many(out, made)


def _items(
    graph: Graph, value: Value, body: Body, place: Place
) -> tuple[str, Callable[[], str], Value]:
    """What a map goes over: the variable of the list, what its body calls an item (to be asked
    when all of the chain is read), and the item.
    """
    if isinstance(value, Local):
        source = Source(f"{place.hint}_item", body)
        # Each item travels as what the body needs of it, and as nothing else.
        rows = value.then(
            lambda found: [source.pack(each) for each in found], f"{place.hint}_items"
        )
        whole = graph.fresh(f"{place.hint}_item")
        with graph.inside(body):
            graph.unpack(source, whole)

        def name() -> str:
            return source.views[0].variable if len(source.views) == 1 else whole

        return graph.view(rows, "value"), name, Local(source, lambda each: each)
    if isinstance(value, Many) and isinstance(value.value, Text | Answer):
        call = Call(graph.fresh(f"{place.hint}_item"))
        call.is_message = isinstance(value.value, Answer)
        item = Answer(call) if call.is_message else Text(call)
        return graph.given(value, place), lambda: call.variable, item
    raise unsupported(
        place, f"RunnableEach takes a list, not {KINDS[type(value)]}; make one in a function"
    )
