"""Bodies of control-flow nodes, and the variables that carry values out of them.

Nodes are built only after compilation, because only then is it known whether each value is read as
text or as a message. A value leaves a body under a name that the node's `merge` or `collect` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from conure.server.program.ir import Json

DeferredJson: TypeAlias = Callable[[], Json]
"""Builds JSON after compilation."""
DeferredNodes: TypeAlias = Callable[[], list[Json]]
"""Builds nodes after compilation."""


@dataclass(eq=False, slots=True)
class GraphBody:
    """The nodes of a program, or of one body."""

    _nodes: list[DeferredJson] = field(default_factory=list)
    _nodes_at_end: list[DeferredNodes] = field(default_factory=list)

    def add(self, node: DeferredJson) -> None:
        """Add a node."""
        self._nodes.append(node)

    def add_at_end(self, nodes: DeferredNodes) -> None:
        """Add nodes after all others."""
        self._nodes_at_end.append(nodes)

    def build(self) -> list[Json]:
        """Return the nodes. Call this after compilation."""
        return [
            *(build_node() for build_node in self._nodes),
            *(node for end in self._nodes_at_end for node in end()),
        ]


@dataclass(eq=False, slots=True)
class BodyOutputs:
    """Variables outside a node that carry values of its bodies."""

    hint: str
    """Prefix of the variables' names."""
    bodies: tuple[GraphBody, ...]
    fresh_name: Callable[[str], str]
    """Returns a unique name."""
    _exports: dict[str, Sequence[DeferredJson]] = field(default_factory=dict)

    def export(self, expressions: Sequence[DeferredJson]) -> str:
        """Return a new variable outside the bodies.

        Args:
            expressions: the variable's expression in each body.
        """
        outside = self.fresh_name(self.hint)
        self._exports[outside] = expressions
        return outside

    def build_merge(self) -> dict[str, list[str]]:
        """Return the node's `merge`: for each variable outside, its name in each body.

        Call this once, before the bodies are built: an exported expression that is not a variable
        becomes a node of its body.
        """
        return {
            outside: [
                self._name(body, expression())
                for body, expression in zip(self.bodies, expressions, strict=True)
            ]
            for outside, expressions in self._exports.items()
        }

    def build_collect(self) -> dict[str, str]:
        """Return the node's `collect`: `build_merge` for a node with one body."""
        return {outside: inside for outside, (inside,) in self.build_merge().items()}

    def _name(self, body: GraphBody, expression: Json) -> str:
        match expression:
            case {"var": str(name)}:
                return name
        name = self.fresh_name(f"{self.hint}_out")
        node = {
            "id": self.fresh_name(f"{name}_step"),
            "op": "expr",
            "expr": expression,
            "output": name,
        }
        body.add(lambda: node)
        return name
