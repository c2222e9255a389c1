"""Instances of bodies: a template's nodes once for each item, round or attempt.

An instance has the names of its template with an index behind them: node `write` in item 3 of a
map is `write.3`, in round 0 of a loop inside of that `write.3.0`. What the template calls its
item is no variable in an instance but an expression, `get` from the list: so two maps over one
list read, word for word, the same, and share what they share.

Knows names and every place in a node where one can stand. Refuses to know graphs and values.

Kept true: an instance differs from its template in names, items and seeds alone; a name that
`each` binds is neither replaced nor captured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from .control import Place, bodies, decision, slots_of, stand
from .expression import input_expression, variables
from .ir import (
    AnyNode,
    Call,
    Client,
    Expr,
    Expression,
    Generate,
    If,
    Kill,
    Loop,
    Map,
    Message,
    Output,
    Placed,
    Round,
    Segment,
    Try,
    Wait,
    Yield,
)
from .validation import Slot

T = TypeVar("T", Output, Segment)


class Instance(NamedTuple):
    """A node for the graph, with its slots, and where it stands."""

    node: Placed
    slots: tuple[Slot, ...]
    place: Place | None


class Template:
    """A body that instances are made of."""

    def __init__(self, control: str, nodes: Sequence[AnyNode]) -> None:
        self._control = control
        self._flat = [(node, slots_of(node), place) for _, node, place in stand(nodes, "")]
        self._names = frozenset(_names_in(nodes))

    def instantiate(
        self, part: str, suffix: str, bound: Mapping[str, Expression]
    ) -> list[Instance]:
        """The nodes of one instance.

        Args:
            part: of the node that the body belongs to.
            suffix: what stands behind every name.
            bound: what the names of item, index and carried variables are here.
        """
        renaming = Renaming(self._names, suffix, bound)
        own = Place(self._control, part)
        return [
            Instance(
                renamed := renaming.node(node),
                tuple(renaming.slot(slot, node, renamed) for slot in slots),
                own if place is None else Place(renaming.name(place.control), place.part),
            )
            for node, slots, place in self._flat
        ]

    def rename(self, suffix: str, bound: Mapping[str, Expression]) -> Renaming:
        """How one instance changes names, for what stands beside the body."""
        return Renaming(self._names, suffix, bound)

    @property
    def num_nodes(self) -> int:
        """Nodes of one instance, as long as no template inside is opened."""
        return len(self._flat)

    @property
    def node_ids(self) -> list[str]:
        """The nodes that stand in the body itself."""
        return [node.id for node, _, place in self._flat if place is None]


def _names_in(nodes: Sequence[AnyNode]) -> set[str]:
    """Everything that is made in a body, however deep: nodes and variables. What is called after
    these (decisions, what a round starts with) follows them.
    """
    names: set[str] = set()
    for node in nodes:
        names.add(node.id)
        names.update(_made_by(node))
        for body in bodies(node):
            names |= _names_in(body.nodes)
    return names


def _made_by(node: AnyNode) -> Iterable[str]:
    match node:
        case Map():
            return node.collect
        case If() | Try():
            return node.merge
        case Loop():
            return node.carry
        case _:
            return (name for slot in slots_of(node) for name in slot.writes)


class Renaming:
    """From the names of a template to those of one instance."""

    def __init__(self, names: frozenset[str], suffix: str, bound: Mapping[str, Expression]) -> None:
        self._names = names
        self._suffix = suffix
        self._bound = bound
        self._reads = {name: variables(expression) for name, expression in bound.items()}
        self._captured: frozenset[str] = frozenset().union(*self._reads.values())
        self._seed_key = suffix.encode()

    def name(self, name: str) -> str:
        """A node, or a variable that is made in the template."""
        if name in self._names:
            return name + self._suffix
        base, dot, rest = name.rpartition(".")
        return f"{base}{self._suffix}.{rest}" if dot and base in self._names else name

    def reference(self, name: Expression) -> Expression:
        """What stands where a bare string is a variable."""
        if not isinstance(name, str):
            return self.expression(name)
        if name in self._bound:
            expression = self._bound[name]
            is_variable = isinstance(expression, dict) and "var" in expression
            return expression["var"] if is_variable else expression
        return self.name(name)

    def expression(self, expression: Expression) -> Expression:
        """An expression in which a string is text."""
        if isinstance(expression, list):
            return [self.expression(item) for item in expression]
        if not isinstance(expression, dict):
            return expression
        ((operator, argument),) = expression.items()
        if operator == "lit":
            return expression
        if operator == "var":
            return (
                self._bound[argument] if argument in self._bound else {"var": self.name(argument)}
            )
        if operator in ("partial", "final"):
            return self._growing(operator, argument)
        if operator == "object":
            return {operator: {key: self.expression(item) for key, item in argument.items()}}
        if operator == "each":
            return {operator: self._each(argument)}
        return {operator: self.expression(argument)}

    def _growing(self, operator: str, name: str) -> Expression:
        """`partial` or `final` of a name: an item or index is no text that grows, but whole."""
        reference = self.reference(name)
        if isinstance(reference, str):
            return {operator: reference}
        return reference if operator == "partial" else True

    def _each(self, operands: list[Expression]) -> list[Expression]:
        items, *names, inside = operands
        hidden = frozenset(names)
        fresh = names
        if hidden & self._captured or any("." in name for name in names):
            # What an instance reads may be called what this `each` binds: then it binds another.
            fresh = [f"{name}'" for name in names]
        bound = {name: it for name, it in self._bound.items() if name not in hidden}
        bound |= {old: {"var": new} for old, new in zip(names, fresh, strict=True)}
        within = Renaming(self._names - hidden, self._suffix, bound)
        return [self.expression(items), *fresh, within.expression(inside)]

    def slot(self, slot: Slot, old: Placed, new: Placed) -> Slot:
        """A slot of a renamed node."""
        chosen = {}
        if isinstance(old, Map | If | Loop | Try) and isinstance(new, Map | If | Loop | Try):
            chosen = {decision(old): decision(new)}
        return Slot(
            new.id,
            slot.index,
            self._all(slot.reads),
            tuple(chosen.get(name) or self.name(name) for name in slot.writes),
            self._all(slot.sees) if slot.sees else slot.sees,
        )

    def _all(self, names: frozenset[str]) -> frozenset[str]:
        found: set[str] = set()
        for name in names:
            if name in self._bound:
                found |= self._reads[name]
            else:
                found.add(self.name(name))
        return frozenset(found)

    # --- nodes ----------------------------------------------------------------------------

    def node(self, node: AnyNode) -> AnyNode:
        """A node under its new name. Bodies that stand in the graph are left out of it."""
        common = {
            "id": self.name(node.id),
            "after": [self.name(other) for other in node.after],
            "when": node.when if node.when is UNSET else self.reference(node.when),
        }
        fields = self._fields(node)
        return msgspec.structs.replace(node, **common, **fields)

    def _fields(self, node: AnyNode) -> dict[str, object]:
        match node:
            case Generate():
                return self._generate(node)
            case Call() | Client():
                args = {name: self.expression(each) for name, each in node.args.items()}
                return {"args": args, "output": self._output(node.output)}
            case Expr():
                return {"expr": self.expression(node.expr), "output": self.name(node.output)}
            case Wait():
                return {"variables": [self.name(name) for name in node.variables]}
            case Kill():
                return {"targets": [self.name(name) for name in node.targets]}
            case Yield():
                return {"value": self.expression(node.value)}
            case If():
                merge = {
                    self.name(name): tuple(map(self.reference, sides))
                    for name, sides in node.merge.items()
                }
                return {
                    "cond": self.reference(node.cond),
                    "then": [],
                    "otherwise": [],
                    "merge": merge,
                }
            case Try():
                return self._try(node)
            case Map():
                collect = {
                    self.name(name): self.reference(inner) for name, inner in node.collect.items()
                }
                return {
                    "items": self.reference(node.items),
                    "body": self._bodies(node.body),
                    "collect": collect,
                }
            case Loop():
                return self._loop(node)

    def _output(self, output: str | msgspec.UnsetType) -> str | msgspec.UnsetType:
        return output if output is UNSET else self.name(output)

    def _generate(self, node: Generate) -> dict[str, object]:
        if node.prompt is not UNSET:
            return {"prompt": [self._segment(segment) for segment in node.prompt]}
        assert node.messages is not UNSET
        assert node.output is not UNSET
        output = msgspec.structs.replace(node.output, variable=self.name(node.output.variable))
        return {
            "messages": [self._message(message) for message in node.messages],
            "output": self._reseed(output),
        }

    def _segment(self, segment: Segment) -> Segment:
        if segment.input is not UNSET:
            return msgspec.structs.replace(segment, input=self.reference(segment.input))
        if segment.output is UNSET:
            return segment
        return self._reseed(msgspec.structs.replace(segment, output=self.name(segment.output)))

    def _message(self, message: Message) -> Message:
        if message.splice is not UNSET:
            return msgspec.structs.replace(message, splice=self.reference(message.splice))
        if not isinstance(message.content, list):
            return message
        content = [self._segment(segment) for segment in message.content]
        return msgspec.structs.replace(message, content=content)

    def _reseed(self, output: T) -> T:
        """A seed that was given is another one in every instance, and always the same there."""
        if output.seed is None:
            return output
        key = b"%d%s" % (output.seed, self._seed_key)
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        return msgspec.structs.replace(output, seed=seed)

    def _try(self, node: Try) -> dict[str, object]:
        merge = {
            self.name(name): [self.reference(side) for side in sides]
            for name, sides in node.merge.items()
        }
        handlers = [msgspec.structs.replace(handler, body=[]) for handler in node.handlers]
        # The body stays: it is what is run again.
        return {"body": self._bodies(node.body), "handlers": handlers, "merge": merge}

    def _loop(self, node: Loop) -> dict[str, object]:
        return {
            "items": node.items if node.items is UNSET else self.reference(node.items),
            "count": node.count if node.count is UNSET else self.expression(node.count),
            "carry": {
                self.name(name): (self.expression(init), self.expression(following))
                for name, (init, following) in node.carry.items()
            },
            "body": self._bodies(node.body),
            "until": node.until if node.until is UNSET else self.expression(node.until),
        }

    def _bodies(self, nodes: Sequence[AnyNode]) -> list[AnyNode]:
        """Nodes of a template that stays one: with all that stands in their bodies."""
        return [self._whole(node) for node in nodes]

    def _whole(self, node: AnyNode) -> AnyNode:
        renamed = self.node(node)
        match node:
            case If():
                return msgspec.structs.replace(
                    renamed,
                    then=self._bodies(node.then),
                    otherwise=self._bodies(node.otherwise),
                )
            case Try():
                handlers = [
                    msgspec.structs.replace(handler, body=self._bodies(handler.body))
                    for handler in node.handlers
                ]
                return msgspec.structs.replace(renamed, handlers=handlers)
            case _:
                return renamed


def end_of_round(
    node: Loop, index: int, renaming: Renaming, body: Sequence[str], *, is_last: bool
) -> Instance:
    """The node that ends a round: it computes what is carried on, and whether there is more.

    Args:
        node: the loop.
        index: of the round.
        renaming: of the round's instance.
        body: ids of the nodes in it that it waits for.
        is_last: the rounds are over, whatever `until` says.
    """
    until: Expression | msgspec.UnsetType = UNSET
    if is_last:
        until = True
    elif node.until is not UNSET:
        until = renaming.expression(node.until)
    ends = Round(
        id=f"{node.id}.{index}",
        job=node.job,
        after=list(body),
        carry={
            f"{name}.{index + 1}": renaming.expression(following)
            for name, (_, following) in node.carry.items()
        },
        keeps={f"{name}.{index + 1}": f"{name}.{index}" for name in node.carry},
        until=until,
        more=f"{node.id}.{index}.more",
    )
    return Instance(ends, slots_of(ends), Place(node.id, str(index)))


def item_expression(source: str | None, index: int) -> Expression:
    """An element of the list that a variable holds."""
    return None if source is None else {"get": [{"var": source}, index]}


def read_by(reference: Expression) -> frozenset[str]:
    """What a reference (a name, or what became of one in an instance) reads."""
    return variables(input_expression(reference))
