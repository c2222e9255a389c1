"""Which of a program's failures its caller is told.

A program ends with one failure, and the events before it tell of others: those that a
`try` has handled, and those inside of the node that failed last. What is told is what went
wrong first inside of that one: of a `try` whose handler failed as well, what it was to
handle, as Python and LangChain have it.

Knows events of failures and where bodies stand in a program. Refuses to know exceptions.
"""

from __future__ import annotations

from typing import Any

from conure.server.program.status import Problem

from .nodes import nodes_of


class Failures:
    """The failures of one run, by node, the latest last."""

    def __init__(self, program: Any = None) -> None:
        """Nothing has failed.

        Args:
            program: that runs, as a record or as JSON. None: it is not known, and of a `try`
                what its handler failed with is told.
        """
        self._problems: dict[str, Problem] = {}
        self._tried = {
            node["id"]: frozenset(each["id"] for each in node.get("body") or ())
            for node in nodes_of(program)
            if node["op"] == "try"
        }

    def __getitem__(self, node: str) -> Problem:
        return self._problems[node]

    def add(self, node: str, problem: Problem) -> None:
        """A node failed; perhaps again."""
        self._problems.pop(node, None)
        self._problems[node] = problem

    def told(self) -> str | None:
        """The node whose failure is told; None if none failed."""
        node = next(reversed(self._problems), None)
        seen: set[str] = set()
        while node is not None and node not in seen:
            seen.add(node)
            node = self._within(node) or node
        return node

    def _within(self, node: str) -> str | None:
        """The node in a body of this one that its failure comes from."""
        name, _, indices = node.partition(".")
        tried = self._tried.get(name)
        if tried is not None:
            for other in reversed(self._problems):
                its_name, _, its_indices = other.partition(".")
                if its_name in tried and f"{its_indices}.".startswith(indices and f"{indices}."):
                    return other
        inner = self._problems[node].message.partition(": ")[0]
        return inner if inner in self._problems else None
