"""Traversal of nodes and the bodies inside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .base import Node, NodeBody
from .control.base import TemplateNode
from .generate import GenerateNode


class BodyRef(NamedTuple):
    """One body in a graph, or one instance of a body.

    The part of an item or a round is its number, of a retry `r1` (`rr1` in a `try` inside a
    `try`), of any other body its `NodeBody.part`.
    """

    control: str
    """The node with the body."""
    part: str


class PlacedNode(NamedTuple):
    """A node that is part of the graph from the start, in a body or not."""

    path: str
    node: Node
    place: BodyRef | None


def walk(nodes: Iterable[Node], path: str) -> Iterator[tuple[str, Node]]:
    """Iterate over nodes and the nodes in their bodies at any depth, with their paths."""
    for index, node in enumerate(nodes):
        here = f"{path}[{index}]"
        yield here, node
        for body in node.bodies():
            yield from walk(body.nodes, f"{here}.{body.path}")


def count_calls(nodes: Iterable[Node]) -> int:
    """Return the number of LLM calls in nodes and their bodies, each body counted once."""
    return sum(isinstance(node, GenerateNode) for _, node in walk(nodes, ""))


def flatten(nodes: Iterable[Node], path: str, place: BodyRef | None = None) -> Iterator[PlacedNode]:
    """Iterate over nodes and the nodes in their bodies, except in bodies of templates."""
    for index, node in enumerate(nodes):
        here = f"{path}[{index}]"
        yield PlacedNode(here, node, place)
        if isinstance(node, TemplateNode):
            continue
        for body in node.bodies():
            yield from flatten(body.nodes, f"{here}.{body.path}", BodyRef(node.id, body.part))


def outer_reads(body: NodeBody, end_reads: frozenset[str]) -> frozenset[str]:
    """Return what a body, and the references into it, read from outside.

    Args:
        body: the body of a template.
        end_reads: variables that the template's own fields read inside the body.
    """
    # One pass over each level. Two passes would cost 2^depth for nested bodies.
    reads, writes = set(end_reads), set(body.binds)
    for _, node, _ in flatten(body.nodes, ""):
        for slot in node.make_slots():
            reads |= slot.reads | slot.may_read
            writes.update(slot.writes)
    return frozenset(reads - writes)
