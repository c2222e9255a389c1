"""Select the failure to report among the failures of a program.

A program ends with one failure, but its events also report failures that a `try` has handled, and
failures inside the node that failed last. The *root failure* is the innermost failure inside the
node that failed last. If the body and the handler of a `try` both failed, the root failure is the
failure of the body, as in LangChain.

The id of a node in an instance consists of its id in the program and the indices of the instance:
`n.2.0`.

Out of scope: conversion to exceptions.
"""

from __future__ import annotations

from typing import Any

from conure.server.program.status import Problem

from ..nodes import iter_nodes


class Failures:
    """The failures of one program by node, in the order of their events."""

    def __init__(self, program: Any = None) -> None:
        """Start without failures.

        Args:
            program: the program, as a record or as JSON. If it is None, the root failure of a
                `try` is the failure of its handler.
        """
        self._problems: dict[str, Problem] = {}
        self._try_bodies = {
            node["id"]: frozenset(child["id"] for child in node.get("body") or ())
            for node in iter_nodes(program)
            if node["op"] == "try"
        }

    def __getitem__(self, node: str) -> Problem:
        return self._problems[node]

    def add(self, node: str, problem: Problem) -> None:
        """Record a failure. It replaces an earlier failure of the same node."""
        self._problems.pop(node, None)
        self._problems[node] = problem

    def root_failure(self, code: str | None = None) -> str | None:
        """Return the node whose failure to report; None if no node failed.

        Args:
            code: of the failure that ended the program: failures with other codes were handled.
                None: it is unknown.
        """
        failed = reversed(self._problems.items())
        node = next((name for name, each in failed if code in (None, each.code)), None)
        seen: set[str] = set()
        while node is not None and node not in seen:
            seen.add(node)
            node = self._cause(node) or node  # without a cause, the loop ends: `node` was seen
        return node

    def _cause(self, node: str) -> str | None:
        """Return the node whose failure made `node` fail; None if it is unknown."""
        name, _, indices = node.partition(".")
        body = self._try_bodies.get(name)
        if body is not None:
            instance = f".{indices}." if indices else "."
            for other in reversed(self._problems):
                other_name, _, other_indices = other.partition(".")
                # The indices of an instance are a prefix of those of the nodes inside it.
                if other_name in body and f".{other_indices}.".startswith(instance):
                    return other
        cause = self._problems[node].cause
        return cause if cause in self._problems else None
