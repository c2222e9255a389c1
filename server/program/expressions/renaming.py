"""Renaming from a body's template to one of its instances, in names and expressions.

An instance appends an index to the names of its template: node `write` in item 3 of a map
becomes `write.3`, in round 0 of a loop inside that item `write.3.0`. The template's item name is
not a variable in an instance: an expression that gets the item from the list replaces it. So
prompts of two maps over one list contain the same expressions, and share a prefix.

Invariants: a name that `each` binds is neither replaced nor captured. A node and a variable may
have the same name: an instance renames only the one that its template defines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..content import Expression
from .evaluate import variables


class DefinedNames(NamedTuple):
    """The names that a template defines."""

    nodes: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()


class Renaming:
    """Maps the names of a template to those of one instance."""

    def __init__(
        self,
        names: DefinedNames,
        suffix: str,
        bound: Mapping[str, Expression],
        jobs: Mapping[str, str] | None = None,
        *,
        keeps_seeds: bool = False,
    ) -> None:
        """Create a renaming.

        Args:
            names: what the template defines.
            suffix: the suffix of these names in the instance.
            bound: expressions that replace the names of item, index and carried variables.
            jobs: new names of jobs.
            keeps_seeds: whether given seeds stay unchanged; otherwise an instance derives its own.
        """
        self.suffix = suffix
        self.keeps_seeds = keeps_seeds
        self._jobs = jobs or {}
        self._names = names
        self._bases = names.nodes | names.variables
        """Names to which a suffix is appended for the names of decisions and carried variables."""
        self._renamed: dict[str, str] = {}
        """New names by old name. Nodes and slots of an instance share the strings."""
        self._bound = bound
        self._reads = {name: variables(expression) for name, expression in bound.items()}
        self._captured: frozenset[str] = frozenset().union(*self._reads.values())

    def job(self, name: str) -> str:
        """Rename a job."""
        return self._jobs.get(name, name)

    def name(self, name: str) -> str:
        """Rename a variable that the template defines."""
        return self._rename(name, self._names.variables)

    def node_id(self, node_id: str) -> str:
        """Rename a node of the template."""
        return self._rename(node_id, self._names.nodes)

    def _rename(self, name: str, defined: frozenset[str]) -> str:
        if name in defined:
            renamed = self._renamed.get(name)
            if renamed is None:
                renamed = self._renamed[name] = name + self.suffix
            return renamed
        base, dot, rest = name.rpartition(".")
        return f"{base}{self.suffix}.{rest}" if dot and base in self._bases else name

    def names(self, names: frozenset[str]) -> frozenset[str]:
        """Rename variables that are read; replace a bound name by what its expression reads."""
        if not names:
            return names
        renamed: set[str] = set()
        for name in names:
            if name in self._bound:
                renamed |= self._reads[name]
            else:
                renamed.add(self.name(name))
        return frozenset(renamed)

    def reference(self, reference: Expression) -> Expression:
        """Rename an expression in which a bare string names a variable."""
        if not isinstance(reference, str):
            return self.expression(reference)
        if reference in self._bound:
            expression = self._bound[reference]
            is_variable = isinstance(expression, dict) and "var" in expression
            return expression["var"] if is_variable else expression
        return self.name(reference)

    def expression(self, expression: Expression) -> Expression:
        """Rename an expression in which a bare string is text."""
        if isinstance(expression, list):
            return [self.expression(item) for item in expression]
        if not isinstance(expression, dict):
            return expression
        ((operator, argument),) = expression.items()
        match operator:
            case "lit":
                return expression
            case "var":
                bound = argument in self._bound
                return self._bound[argument] if bound else {"var": self.name(argument)}
            case "partial" | "final":
                return self._streaming(operator, argument)
            case "object":
                return {operator: {key: self.expression(item) for key, item in argument.items()}}
            case "each":
                return {operator: self._each(argument)}
            case _:
                return {operator: self.expression(argument)}

    def _streaming(self, operator: str, name: str) -> Expression:
        """Rename `partial` or `final`. Only variables have partial text."""
        reference = self.reference(name)
        if isinstance(reference, str):
            return {operator: reference}
        return reference if operator == "partial" else True

    def _each(self, operands: list[Expression]) -> list[Expression]:
        items, *own, body = operands
        shadowed = frozenset(own)
        fresh = own
        if shadowed & self._captured or any("." in name for name in own):
            # Rename what `each` binds: a replacement reads a variable of the same name, or a name
            # with a dot could equal that of a renamed variable.
            fresh = [f"{name}'" for name in own]
        bound = {name: it for name, it in self._bound.items() if name not in shadowed}
        bound |= {old: {"var": new} for old, new in zip(own, fresh, strict=True)}
        names = self._names._replace(variables=self._names.variables - shadowed)
        inner = Renaming(names, self.suffix, bound, self._jobs)
        return [self.expression(items), *fresh, inner.expression(body)]
