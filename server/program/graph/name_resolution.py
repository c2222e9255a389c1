"""Name resolution: which variables and nodes are visible to a node.

A node in a body can read all variables around the body. Variables defined in a body are visible in
the body only.

Out of scope: how the tables of the graph and of its extension are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import NamedTuple, NoReturn

from ..errors import ProgramError, prefixed_path
from ..nodes import Node
from ..nodes.bodies import BodyRef
from ..nodes.control.base import NodeWithBodies, TemplateNode
from ..slot import Slot
from ..suggestion import suggestion
from .tables import GraphTables

MAX_COMPARED = 1_000
"""Names that are compared with an unknown one."""


class EnclosingScope(NamedTuple):
    """The names around a template that are visible inside it."""

    has_variable: Callable[[str], bool]
    has_node: Callable[[str], bool]
    binds: frozenset[str]
    """Names of item, index and carried variables of all enclosing templates."""
    depth: int


class NameResolver:
    """The names of a graph and of the nodes that extend it."""

    def __init__(
        self,
        existing: GraphTables,
        new: GraphTables,
        paths: Mapping[str, str],
        enclosing: EnclosingScope | None,
    ) -> None:
        self._existing = existing
        self._new = new
        self._base = len(existing.numbered_slots)
        self._paths = paths
        self._enclosing = enclosing

    @property
    def enclosing_binds(self) -> frozenset[str]:
        """Names of item, index and carried variables of enclosing templates."""
        return frozenset() if self._enclosing is None else self._enclosing.binds

    def producer(self, variable: str) -> int | None:
        """Return the number of the slot that writes a variable."""
        number = self._new.producers.get(variable)
        return self._existing.producers.get(variable) if number is None else number

    def slot(self, number: int) -> Slot:
        """Return the slot with a number."""
        if number < self._base:
            return self._existing.numbered_slots[number]
        return self._new.numbered_slots[number - self._base]

    def body_of(self, node_id: str) -> BodyRef | None:
        """Return the body that contains a node."""
        return self._new.body_of.get(node_id) or self._existing.body_of.get(node_id)

    def is_known_node(self, name: str) -> bool:
        """Return whether a node has this id, in a template or not."""
        return any(
            name in tables.nodes or name in tables.template_nodes
            for tables in (self._new, self._existing)
        )

    def is_template_variable(self, name: str) -> bool:
        """Return whether a template defines this variable."""
        return name in self._new.template_variables or name in self._existing.template_variables

    def is_job(self, name: str) -> bool:
        """Return whether a job has this name."""
        return name in self._new.jobs or name in self._existing.jobs

    def can_read(self, name: str, body: BodyRef | None) -> bool:
        """Return whether a node in a body, or in none, can read a variable."""
        number = self.producer(name)
        if number is not None:
            owner = self.body_of(self.slot(number).node)
            return owner is None or self._is_within(body, owner)
        if self.is_template_variable(name):
            return False
        if name in self._new.variables or name in self._existing.variables:
            return True
        enclosing = self._enclosing
        return enclosing is not None and (name in enclosing.binds or enclosing.has_variable(name))

    def can_run_after(self, name: str, body: BodyRef | None) -> bool:
        """Return whether a node in a body, or in none, can run after another node."""
        if name in self._new.nodes or name in self._existing.nodes:
            return self._is_within(body, self.body_of(name))
        return self._enclosing is not None and self._enclosing.has_node(name)

    def _is_within(self, body: BodyRef | None, owner: BodyRef | None) -> bool:
        while body is not None and body != owner:
            body = self.body_of(body.control)
        return body == owner

    def check(self, node: Node) -> None:
        """Check the names that a new node reads or mentions.

        Raises:
            ProgramError: `program.unknown_variable`, `program.unknown_after`, `program.control`.
        """
        body = self.body_of(node.id)
        path = self._paths[node.id]
        for reads in self._reads(node):
            for variable in reads:
                if not self.can_read(variable, body):
                    self._refuse_read(node)
        for index, earlier in enumerate(node.after):
            if not self.can_run_after(earlier, body):
                hint = _hint(earlier, self._existing.nodes, self._new.nodes)
                raise ProgramError(
                    "program.unknown_after",
                    f"node `{node.id}` has unknown node `{earlier}` in `after`{hint}",
                    path=f"{path}.after[{index}]",
                )
        with prefixed_path(path):
            node.check_scope(_ScopeOfNode(self, body, is_in_template=self._enclosing is not None))
        if isinstance(node, NodeWithBodies) and not isinstance(node, TemplateNode):
            for reference in node.body_references():
                inner = BodyRef(node.id, reference.part)
                self.check_names(reference.names, f"{path}.{reference.path}", inner)

    def check_names(self, names: Iterable[str], path: str, body: BodyRef | None = None) -> None:
        """Check the variables of a reference into a body.

        Raises:
            ProgramError: `program.unknown_variable`.
        """
        for name in sorted(names):
            if not self.can_read(name, body):
                self.refuse_unknown(name, path)

    def _reads(self, node: Node) -> list[frozenset[str]]:
        trailing = node.trailing_reads()
        reads = [slot.reads for slot in self._new.slots[node.id]]
        return reads if trailing is None else [*reads, trailing]

    def _refuse_read(self, node: Node) -> NoReturn:
        """Reject the first variable of a node that is not visible to the node."""
        body = self.body_of(node.id)
        unknown = {
            name for names in self._reads(node) for name in names if not self.can_read(name, body)
        }
        path, name = min((node.read_path(name), name) for name in unknown)
        self.refuse_unknown(name, f"{self._paths[node.id]}.{path}")

    def refuse_unknown(self, name: str, path: str) -> NoReturn:
        """Raise ProgramError `program.unknown_variable` with a suggestion."""
        is_known = name in self._existing.variables or name in self._new.variables
        if is_known or self.is_template_variable(name):
            raise ProgramError(
                "program.unknown_variable",
                f"variable `{name}` is visible only in the body that writes it: return it by "
                "`collect`, `merge` or `carry`",
                path=path,
            )
        raise ProgramError(
            "program.unknown_variable",
            f"unknown variable `{name}`: no node writes it, and `variables` does not declare it "
            f"as an input{self.hint(name)}",
            path=path,
        )

    def hint(self, variable: str) -> str:
        """Return the end of an error's message: which variable was probably meant."""
        return _hint(variable, self._existing.variables, self._new.variables)


def _hint(name: str, *tables: Mapping[str, object]) -> str:
    similar = suggestion(name, islice(chain(*tables), MAX_COMPARED))
    return f"; {similar}" if similar else ""


class _ScopeOfNode(NamedTuple):
    """The names around one node: a `NodeScope`."""

    names: NameResolver
    body: BodyRef | None
    is_in_template: bool

    @property
    def is_in_body(self) -> bool:
        return self.body is not None

    def is_job(self, name: str) -> bool:
        return self.names.is_job(name)

    def is_bound(self, name: str) -> bool:
        return name in self.names.enclosing_binds

    def can_read(self, name: str) -> bool:
        return self.names.can_read(name, self.body)

    def is_produced(self, name: str) -> bool:
        return self.names.producer(name) is not None

    def check_variable(self, name: str, path: str, *, allow_bound: bool = True) -> None:
        if not self.can_read(name) or (not allow_bound and self.is_bound(name)):
            self.names.refuse_unknown(name, path)
