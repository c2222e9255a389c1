"""Merging of branches, and the parts of loops that are carried from round to round.

After an `if` or `try`, a name that a branch assigned means a new variable, which gets the value of
the branch that ran. A name that has a value after one branch only may not be read.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...program.checks import is_name
from ...program.content import Expression
from ...program.ir import Node
from ..syntax import NameReads
from .emitter import Emitter, Flow
from .scope import BREAK, RETURN, NameScope, Unassigned
from .values import NULL, Value, common_kind


class Branch(NamedTuple):
    """A compiled branch."""

    block: list[Node]
    flow: Flow
    scope: NameScope


class LoopReads:
    """The names that a text reads after some of its statements."""

    def __init__(self, reads: NameReads) -> None:
        self._reads = reads
        self.carried: Counter[str] = Counter()
        """Names of the loops around the statement: the next round may read them."""

    def outside(self, statements: Iterable[ast.stmt]) -> NeededNames:
        """Return which names are read outside of some statements, or in a later round of them.

        Args:
            statements: a statement with a body, and statements up to the ends of their blocks.
                They therefore have their lines to themselves.
        """
        ranges: list[tuple[int, int]] = []
        for each in statements:
            last = each.lineno if each.end_lineno is None else each.end_lineno
            if ranges and ranges[-1][1] + 1 >= each.lineno >= ranges[-1][0]:
                ranges[-1] = (ranges[-1][0], last)
            else:
                ranges.append((each.lineno, last))
        return NeededNames(self._reads, ranges, self.carried)


class NeededNames(NamedTuple):
    """The names that are needed after some statements."""

    reads: NameReads
    ranges: list[tuple[int, int]]
    """The lines of the statements."""
    carried: Counter[str]

    def has(self, name: str) -> bool:
        """Return whether a name is needed."""
        if self.carried[name] > 0:
            return True
        inside = sum(self.reads.count_between(name, *each) for each in self.ranges)
        return self.reads.count(name) > inside


def merge_branches(
    emitter: Emitter,
    scope: NameScope,
    branches: Sequence[Branch],
    needed: Callable[[], NeededNames],
    what: str,
) -> dict[str, list[str]]:
    """Bind the names that branches assigned in the scope around them.

    Args:
        emitter: emitter of the program.
        scope: the scope around the branches.
        branches: all of them.
        needed: returns the names that are read outside of the branches.
        what: the statement, for messages (`if`).

    Returns: the variables to merge, to the variable of each branch.
    """
    merges: dict[str, list[str]] = {}
    changed = {name: None for branch in branches for name in branch.scope.bindings}
    if not changed:
        return merges
    outside = needed()
    yielded = {name for branch in branches for name in branch.scope.yielded}
    for name in changed:
        bindings = [branch.scope.bound(name) for branch in branches]
        if name in (BREAK, RETURN):
            bindings = [NULL if each is None else each for each in bindings]
        elif name not in yielded and not outside.has(name):
            scope.bind(name, Unassigned(f"is visible only inside of the {what}"))
            continue
        values = [each for each in bindings if isinstance(each, Value)]
        if len(values) < len(branches):
            reason = (
                f"may have no value here, because one branch of the {what} does not assign it: "
                f"assign it before the {what}, or in every branch"
            )
            scope.bind(name, Unassigned(reason))
            continue
        if all(value == values[0] for value in values):
            scope.bind(name, values[0])
            continue
        if name == RETURN and scope.has_outputs and _have_same_names(scope, values):
            scope.bind(name, _merged_results(emitter, scope, branches, values, merges))
            continue
        variable = scope.result_variable() if name == RETURN else scope.version(name.strip("%"))
        merges[variable] = _variables_of(emitter, branches, values, name.strip("%"))
        kind = common_kind([value.kind for value in values])
        is_answer = all(value.is_answer for value in values)
        scope.bind(name, Value({"var": variable}, kind, is_answer=is_answer))
    return merges


def _variables_of(
    emitter: Emitter, branches: Sequence[Branch], values: Iterable[Value], hint: str
) -> list[str]:
    """Return the variable of each branch's value."""
    variables = []
    for branch, value in zip(branches, values, strict=True):
        with emitter.inside(branch.block):
            variables.append(emitter.variable_of(value, hint))
    return variables


def _have_same_names(scope: NameScope, returned: Sequence[Value]) -> bool:
    """Whether all branches return dicts with the same keys, which can name outputs.

    The value under the name of an input can only be that input.
    """
    dicts = [each.fields for each in returned if each.fields is not None]
    if len(dicts) < len(returned) or any(each.keys() != dicts[0].keys() for each in dicts):
        return False
    return all(
        all(each[key] == {"var": key} for each in dicts) if scope.is_input(key) else is_name(key)
        for key in dicts[0]
    )


def _merged_results(
    emitter: Emitter,
    scope: NameScope,
    branches: Sequence[Branch],
    returned: Sequence[Value],
    merges: dict[str, list[str]],
) -> Value:
    """Merge the dicts that branches return, key by key, and return the dict of the results."""
    results: dict[str, Expression] = {}
    dicts = [each.fields or {} for each in returned]
    for key, first in dicts[0].items():
        values = [Value(each[key]) for each in dicts]
        if all(value == values[0] for value in values):
            results[key] = first
            continue
        variable = scope.version(key)
        merges[variable] = _variables_of(emitter, branches, values, key)
        results[key] = {"var": variable}
    return Value({"object": results}, "object")


def merge_outputs(
    emitter: Emitter, scope: NameScope, branches: Sequence[Branch], merges: dict[str, list[str]]
) -> None:
    """Make the names that `yield` reads in branches outputs of the program.

    A name that only one branch assigns has no value if the other branch was taken.

    Args:
        emitter: emitter of the program.
        scope: the scope around the branches.
        branches: all of them.
        merges: the variables to merge, which this function adds to.
    """
    for name in {name: None for branch in branches for name in branch.scope.yielded}:
        found = scope.find(name)
        variable = found.variable if isinstance(found, Value) else None
        if variable is None:
            variable = scope.version(name)
            merges[variable] = []
            for branch in branches:
                with emitter.inside(branch.block):
                    merges[variable].append(_result_of(emitter, branch, name))
        if scope.is_main:
            emitter.outputs[variable] = None
        else:
            scope.yielded[name] = variable


def _result_of(emitter: Emitter, branch: Branch, name: str) -> str:
    """Return the variable that a name has at the end of a branch."""
    found = branch.scope.bound(name)
    if isinstance(found, Value):
        return emitter.variable_of(found, name)
    return branch.scope.yielded.get(name) or emitter.absent(name)


def carried_names(
    scope: NameScope, assigned: Iterable[str], needed: NeededNames, *, runs: bool
) -> dict[str, Value]:
    """Return the names that a loop carries from round to round, with their values before it.

    Args:
        scope: the scope around the loop.
        assigned: names that the body assigns.
        needed: the names that are read outside of the loop.
        runs: whether the loop certainly has a round.
    """
    carried: dict[str, Value] = {}
    for name in sorted(assigned):
        before = scope.bound(name)
        if isinstance(before, Value):
            carried[name] = before
        elif runs and needed.has(name):
            carried[name] = NULL
    return carried
