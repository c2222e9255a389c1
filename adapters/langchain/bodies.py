"""Bodies: nodes of a program that run if they are chosen, or once for every item.

Knows how nodes are kept while a chain is read, and how what a body makes gets out of it.
Refuses to know what the nodes are for.

Kept true: nodes are written down only when all of the chain is read, because only then is it
known in what forms a value is needed; what is needed outside leaves by a name, as programs
want it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from conure.server.program.ir import Json

Late: TypeAlias = Callable[[], Json]
"""JSON that can be written down once all of the chain is read."""
LateNodes: TypeAlias = Callable[[], list[Json]]
"""Nodes that can be written down then."""


@dataclass(eq=False, slots=True)
class Body:
    """Nodes that stand together: all of a program's own, or those of one of its bodies."""

    _nodes: list[Late] = field(default_factory=list)
    _ends: list[LateNodes] = field(default_factory=list)

    def add(self, node: Late) -> None:
        """Add a node."""
        self._nodes.append(node)

    def add_last(self, nodes: LateNodes) -> None:
        """Add nodes that are written behind all others."""
        self._ends.append(nodes)

    def write(self) -> list[Json]:
        """The nodes, now that all of the chain is read."""
        return [*(late() for late in self._nodes), *(node for end in self._ends for node in end())]


@dataclass(eq=False, slots=True)
class Exit:
    """How values leave the bodies of one node."""

    hint: str
    """What they are named after."""
    bodies: tuple[Body, ...]
    fresh: Callable[[str], str]
    """Makes names."""
    _given: dict[str, Sequence[Late]] = field(default_factory=dict)

    def give(self, lates: Sequence[Late]) -> str:
        """A variable outside.

        Args:
            lates: expressions for it, one for each body.
        """
        outside = self.fresh(self.hint)
        self._given[outside] = lates
        return outside

    def merge(self) -> dict[str, list[str]]:
        """The variables outside, each with its names in the bodies. To be asked before the bodies
        are written, and once: what has no name there gets one.
        """
        return {
            outside: [
                self._name(body, late()) for body, late in zip(self.bodies, lates, strict=True)
            ]
            for outside, lates in self._given.items()
        }

    def collect(self) -> dict[str, str]:
        """`merge` for a node with one body."""
        return {outside: inside for outside, (inside,) in self.merge().items()}

    def _name(self, body: Body, expression: Json) -> str:
        match expression:
            case {"var": str(name)}:
                return name
        name = self.fresh(f"{self.hint}_out")
        node = {"id": self.fresh(f"{name}_step"), "op": "expr", "expr": expression, "output": name}
        body.add(lambda: node)
        return name
