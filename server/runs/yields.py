"""What `yield` nodes say of texts while these grow.

The last word of a yield is an event, and `flow`'s business; what is said before that is as
transient as the text it is said of. Knows which yields follow which texts. Refuses to know where
texts come from.

Kept true: a yield says nothing before all that it waits for is there, but for its texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from msgspec import UNSET

from ..program.errors import ExpressionError
from ..program.expression import evaluate, input_expression, variables
from ..program.ir import Yield
from ..program.partial import as_growing, growing_names
from .execution import Execution
from .feed import Feed


class Yields:
    """The yields of one program that follow texts."""

    def __init__(self, execution: Execution, feed: Feed) -> None:
        self._execution = execution
        self._feed = feed
        self._followers: dict[str, list[Yield]] = {}

    def expect(self, nodes: Iterable[str]) -> None:
        """New nodes are in the graph."""
        for node_id in nodes:
            node = self._execution.graph.nodes[node_id]
            if isinstance(node, Yield) and node.mode != "value":
                for name in _followed(node):
                    self._followers.setdefault(name, []).append(node)

    def grew(self, variable: str) -> None:
        """A text grew: say what is to be said of it, where everything else is there."""
        for node in self._followers.get(variable, ()):
            names = _followed(node)
            growing = {name for name in names if not self._execution.is_resolved(name)}
            if not self._execution.waits_only_for(node.id, 0, growing):
                continue
            scope = {**self._execution.values}
            scope |= {name: self._feed.text_of(name) for name in growing}
            with contextlib.suppress(ExpressionError):  # of a text in the middle; wait for more
                if node.when is not UNSET and not evaluate(input_expression(node.when), scope):
                    continue
                value = evaluate(as_growing(node.value, names - growing), scope)
                if node.mode == "partial" or isinstance(value, str):
                    self._feed.show(node.id, node.job, node.mode, value)


def _followed(node: Yield) -> frozenset[str]:
    """The texts that a yield follows."""
    return growing_names(node.value) if node.mode == "partial" else variables(node.value)
