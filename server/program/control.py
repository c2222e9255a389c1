"""Nodes that decide what else runs: are they well formed, and what do their slots read and write?

`map`, `if`, `loop` and `try` have bodies. The bodies of `if` and `try` stand in the graph from
the start, behind a gate; those of `map` and `loop` are templates of which instances come when
the list is known, or the round begins (`instances`).

A node with bodies has slots like any other:

    enter    reads what it decides by, and writes the decision
    give     commits the variables that leave the bodies
    close    waits until everything in the bodies has ended (`map` and `try`: their `give` does,
             because a failure in there changes what is given)

Knows single nodes with all that stands in them. Refuses to know other nodes and values.

Kept true: paths in errors are relative to the node; a decision has a name of its own, which no
name of the wire can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

from msgspec import UNSET

from .errors import ProgramError
from .expression import input_expression, variables
from .ir import (
    AnyNode,
    Control,
    Expression,
    Generate,
    If,
    Kill,
    Loop,
    Map,
    Name,
    Placed,
    Round,
    Try,
    Wait,
    Yield,
)
from .partial import as_whole
from .validation import Slot, check_expression, check_input, check_name, make_slots

ENTER, GIVE, CLOSE = 0, 1, 2
"""Slots of a node with bodies."""


class Place(NamedTuple):
    """Where a node stands: in which part of which node with bodies.

    `then`, `else`, `body`, `handlers[0]`; items and rounds are numbers, attempts `r1`
    (`rr1` in a `try` inside of a `try`).
    """

    control: str
    part: str


class Member(NamedTuple):
    """A node that stands in a graph from the start, maybe behind a gate."""

    path: str
    node: AnyNode
    place: Place | None


class Body(NamedTuple):
    """One body of a node."""

    part: str
    path: str
    nodes: list[AnyNode]
    binds: frozenset[str]
    """Names of items, indices and carried variables, which mean something else in here."""


def bodies(node: Placed) -> tuple[Body, ...]:
    """The bodies of a node; none for most."""
    none: frozenset[str] = frozenset()
    match node:
        case If():
            return (
                Body("then", "then", node.then, none),
                Body("else", "else", node.otherwise, none),
            )
        case Try():
            handlers = (
                Body(handler_part(index), f"handlers[{index}].body", handler.body, none)
                for index, handler in enumerate(node.handlers)
            )
            return (Body("body", "body", node.body, none), *handlers)
        case Map() | Loop():
            binds = frozenset((*bound_names(node), *carried(node)))
            return (Body("body", "body", node.body, binds),)
        case _:
            return ()


def handler_part(index: int) -> str:
    """The body of a `try` that is its handler of this number."""
    return f"handlers[{index}]"


def bound_names(node: Map | Loop) -> tuple[Name, ...]:
    """What the body calls its item and index."""
    return tuple(name for name in (node.item, node.index) if name is not UNSET)


def carried(node: Map | Loop) -> tuple[Name, ...]:
    """The variables that a loop carries from round to round."""
    return tuple(node.carry) if isinstance(node, Loop) else ()


def wait_slot(node: Control) -> int:
    """The slot that waits for the end of all that is in the bodies."""
    return GIVE if isinstance(node, Map | Try) else CLOSE


def decision(node: Control) -> str | None:
    """The variable that keeps what the node decided when it was entered.

    `map`, `loop`: the list, or where it is a variable anyway the number of its items; for a
    `loop` with neither its `count`, null if only `until` ends it. `if`: the part that was taken.
    `try` decides later.
    """
    match node:
        case If():
            return f"{node.id}.taken"
        case Try():
            return None
        case _ if _has_own_items(node):
            return f"{node.id}.items"
        case Map():
            return f"{node.id}.width"
        case Loop():
            return f"{node.id}.rounds"


def source(node: Map | Loop) -> str | None:
    """The variable that the items are elements of; None: there are no items."""
    if node.items is UNSET:
        return None
    if _has_own_items(node):
        return f"{node.id}.items"
    (name,) = variables(input_expression(node.items))
    return name


def _has_own_items(node: Map | Loop) -> bool:
    if node.items is UNSET:
        return False
    expression = input_expression(node.items)
    return not (isinstance(expression, dict) and "var" in expression)


def caught(node: Try) -> str:
    """The variable that keeps which handler was chosen; null: none was needed."""
    return f"{node.id}.handler"


def walk(nodes: Iterable[AnyNode], path: str) -> Iterator[tuple[str, AnyNode]]:
    """All nodes, also those in bodies, with their paths."""
    for index, node in enumerate(nodes):
        place = f"{path}[{index}]"
        yield place, node
        if isinstance(node, Map | If | Loop | Try):
            for body in bodies(node):
                yield from walk(body.nodes, f"{place}.{body.path}")


def count_calls(nodes: Iterable[AnyNode]) -> int:
    """LLM calls among nodes, also in bodies, each once however often its body runs."""
    return sum(isinstance(node, Generate) for _, node in walk(nodes, ""))


def stand(nodes: Iterable[AnyNode], path: str, place: Place | None = None) -> Iterator[Member]:
    """Nodes with those in their bodies that stand in one graph with them: templates stay closed."""
    for index, node in enumerate(nodes):
        here = f"{path}[{index}]"
        yield Member(here, node, place)
        if isinstance(node, If | Try):
            for body in bodies(node):
                yield from stand(body.nodes, f"{here}.{body.path}", Place(node.id, body.part))


def slots_of(node: Placed) -> tuple[Slot, ...]:
    """Check a node, but not what stands in its bodies, and take it apart into its slots.

    Raises:
        ProgramError: as `make_slots`, and `program.control`; the path is relative to the node.
    """
    if isinstance(node, Round):
        return (_round_slot(node),)
    if not isinstance(node, Map | If | Loop | Try | Wait | Kill | Yield):
        return make_slots(node)
    check_name(node.id, "id")
    check_name(node.job, "job")
    if node.retries and not isinstance(node, Try):
        _refuse(f"`{_op(node)}` cannot be tried again: put it into a `try`", "retries")
    enter = set() if node.when is UNSET else check_input(node.when, "when")
    match node:
        case Map():
            return _map_slots(node, enter)
        case If():
            return _if_slots(node, enter)
        case Loop():
            return _loop_slots(node, enter)
        case Try():
            return _try_slots(node, enter)
        case Wait():
            return _wait_slots(node, enter)
        case Kill():
            for index, target in enumerate(node.targets):
                check_name(target, f"targets[{index}]")
            return (Slot(node.id, 0, frozenset(enter), ()),)
        case Yield():
            partial = node.mode == "partial"
            enter |= check_expression(as_whole(node.value) if partial else node.value, "value")
            return (Slot(node.id, 0, frozenset(enter), ()),)


def _outer_names(body: Body, beside: frozenset[str]) -> frozenset[str]:
    """What the nodes of a body, and the names beside it, read that is neither made in it nor bound
    by its node. One walk: bodies stand in each other, and two walks each would be 2^depth.
    """
    reads, writes = set(beside), set(body.binds)
    for _, node, _ in stand(body.nodes, ""):
        for slot in slots_of(node):
            reads |= slot.reads | slot.sees
            writes.update(slot.writes)
    return frozenset(reads - writes)


def _slots(
    node: Control,
    enter: set[str],
    entered: Iterable[str],
    given: Iterable[str],
    sees: frozenset[str],
) -> tuple[Slot, ...]:
    made = (
        Slot(node.id, ENTER, frozenset(enter), tuple(entered)),
        Slot(node.id, GIVE, frozenset(), tuple(given), sees),
    )
    if wait_slot(node) == GIVE:
        return made
    return (*made, Slot(node.id, CLOSE, frozenset(), ()))


def _map_slots(node: Map, enter: set[str]) -> tuple[Slot, ...]:
    enter |= check_input(node.items, "items")
    _check_names(node)
    (body,) = bodies(node)
    inner = _check_references(node.collect, ((key, (name,)) for key, name in node.collect.items()))
    sees = _outer_names(body, inner)
    chosen = decision(node)
    assert chosen is not None
    return _slots(node, enter, (chosen,), node.collect, sees)


def _if_slots(node: If, enter: set[str]) -> tuple[Slot, ...]:
    enter |= check_input(node.cond, "cond")
    sees = _check_references(node.merge, node.merge.items())
    return _slots(node, enter, (f"{node.id}.taken",), node.merge, sees)


def _loop_slots(node: Loop, enter: set[str]) -> tuple[Slot, ...]:
    if node.items is not UNSET and node.count is not UNSET:
        _refuse("a loop has `items` or a `count`, not both", "count")
    if node.items is UNSET and node.count is UNSET and node.until is UNSET:
        _refuse("a loop needs `items`, a `count` or `until`", "")
    if node.items is UNSET and node.item is not UNSET:
        _refuse("`as` names an item, but the loop has no `items`", "as")
    if node.items is not UNSET:
        enter |= check_input(node.items, "items")
    if node.count is not UNSET:
        enter |= check_expression(node.count, "count")
    _check_names(node)
    (body,) = bodies(node)
    ends: set[str] = set()
    for name, (init, following) in node.carry.items():
        check_name(name, f"carry.{name}")
        enter |= check_expression(init, f"carry.{name}[0]")
        ends |= check_expression(following, f"carry.{name}[1]")
    if node.until is not UNSET:
        ends |= check_expression(node.until, "until")
    sees = _outer_names(body, frozenset(ends))
    chosen = decision(node)
    assert chosen is not None
    starts = (f"{name}.0" for name in node.carry)
    return _slots(node, enter, (chosen, *starts), node.carry, sees)


def _try_slots(node: Try, enter: set[str]) -> tuple[Slot, ...]:
    for name, sides in node.merge.items():
        if len(sides) != 1 + len(node.handlers):
            _refuse(
                f"`{name}` needs {1 + len(node.handlers)} names, one for the body and one for "
                f"each handler, and has {len(sides)}",
                f"merge.{name}",
            )
    sees = _check_references(node.merge, node.merge.items())
    return _slots(node, enter, (), (*node.merge, caught(node)), sees)


def _wait_slots(node: Wait, enter: set[str]) -> tuple[Slot, ...]:
    """The first one is there when the wait begins, for its clock; the second when it is over."""
    for index, name in enumerate(node.variables):
        check_name(name, f"variables[{index}]")
    num_variables = len(set(node.variables))
    if isinstance(node.mode, int) and node.mode > num_variables:
        _refuse(f"{node.mode} of {num_variables} variables can never have a value", "mode")
    return (
        Slot(node.id, 0, frozenset(enter), ()),
        Slot(node.id, 1, frozenset(node.variables), ()),
    )


def _round_slot(node: Round) -> Slot:
    reads = {name for expression in node.carry.values() for name in variables(expression)}
    reads |= set(node.keeps.values())
    if node.until is not UNSET:
        reads |= variables(node.until)
    return Slot(node.id, 0, frozenset(reads), (*node.carry, node.more))


def _check_names(node: Map | Loop) -> None:
    for field, name in (("as", node.item), ("index", node.index)):
        if name is not UNSET:
            check_name(name, field)
    if node.item == node.index and node.item is not UNSET:
        _refuse(f"item and index are both `{node.item}`", "index")


def _check_references(
    outside: Iterable[str], sides: Iterable[tuple[str, Iterable[Expression]]]
) -> frozenset[str]:
    """Check the names under which bodies give something away; what of inside they name."""
    for name in outside:
        check_name(name, name)
    return frozenset().union(*(check_input(name, key) for key, names in sides for name in names))


def check_names_only(node: AnyNode) -> None:
    """Refuse expressions where a name belongs: there instances have them, and nobody else.

    Raises:
        ProgramError: `program.name`; the path is relative to the node.
    """
    match node:
        case Map(collect=collect):
            named = [(f"collect.{key}", name) for key, name in collect.items()]
        case If() | Try():
            named = [
                (f"merge.{key}[{index}]", name)
                for key, sides in node.merge.items()
                for index, name in enumerate(sides)
            ]
        case Generate(messages=list(messages)):
            named = [(f"messages[{i}].splice", m.splice) for i, m in enumerate(messages)]
            named = [(path, splice) for path, splice in named if splice is not UNSET]
        case _:
            return
    for path, name in named:
        if not isinstance(name, str):
            raise ProgramError("program.name", f"`{path}` takes the name of a variable", path=path)


def _op(node: Placed) -> str:
    return str(node.__struct_config__.tag)


def _refuse(message: str, path: str) -> NoReturn:
    raise ProgramError("program.control", message, path=path)
