"""What is seen from where: names that nodes use, against what stands there.

What a body makes is seen inside of it alone; what stands around it is seen from inside. Knows
the tables of a graph and of what wants to join it. Refuses to know how either came about.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, NoReturn

from msgspec import UNSET

from .control import Place, bodies
from .errors import ProgramError
from .instances import read_by
from .ir import If, Kill, Placed, Try, Wait
from .standing import Standing
from .validation import Slot, find_read, tail_reads


class Outside(NamedTuple):
    """What a template sees of the graph around it."""

    has_variable: Callable[[str], bool]
    has_node: Callable[[str], bool]
    binds: frozenset[str]
    """Names of items, indices and carried variables, of all bodies around."""
    depth: int


class Sight:
    """The names of a graph and of the new nodes that want to join it."""

    def __init__(
        self,
        standing: Standing,
        new: Standing,
        paths: Mapping[str, str],
        outside: Outside | None,
    ) -> None:
        self._standing = standing
        self._new = new
        self._base = len(standing.numbered)
        self._paths = paths
        self._outside = outside

    def producer(self, variable: str) -> int | None:
        """The number of the slot that writes a variable."""
        number = self._new.producers.get(variable)
        return self._standing.producers.get(variable) if number is None else number

    def slot(self, number: int) -> Slot:
        """The slot with a number."""
        if number < self._base:
            return self._standing.numbered[number]
        return self._new.numbered[number - self._base]

    def sees_variable(self, name: str, place: Place | None) -> bool:
        """Whether a variable can be read by what stands there."""
        number = self.producer(name)
        if number is not None:
            return self._is_within(place, self.place(self.slot(number).node))
        if name in self._new.hidden or name in self._standing.hidden:
            return False
        if name in self._new.variables or name in self._standing.variables:
            return True
        outside = self._outside
        return outside is not None and (name in outside.binds or outside.has_variable(name))

    def sees_node(self, name: str, place: Place | None) -> bool:
        """Whether what stands there can come after a node."""
        if name in self._new.nodes or name in self._standing.nodes:
            return self._is_within(place, self.place(name))
        return self._outside is not None and self._outside.has_node(name)

    def place(self, node_id: str) -> Place | None:
        """In which body a node stands."""
        return self._new.places.get(node_id) or self._standing.places.get(node_id)

    def _is_within(self, place: Place | None, owner: Place | None) -> bool:
        while place is not None and place != owner:
            place = self.place(place.control)
        return place == owner

    def check(self, node: Placed) -> None:
        """Check what a node of the new ones names.

        Raises:
            ProgramError: `program.unknown_variable`, `program.unknown_after`, `program.control`.
        """
        place = self.place(node.id)
        for reads in self._reads(node):
            for variable in reads:
                if not self.sees_variable(variable, place):
                    self._refuse_read(node)
        for index, earlier in enumerate(node.after):
            if not self.sees_node(earlier, place):
                raise ProgramError(
                    "program.unknown_after",
                    f"node `{node.id}` comes after `{earlier}`, but there is no such node",
                    path=f"{self._paths[node.id]}.after[{index}]",
                )
        match node:
            case If() | Try():
                self._check_merge(node)
            case Kill():
                self._check_targets(node, place)
            case Wait():
                self._check_waits(node)
            case _:
                pass

    def _check_merge(self, node: If | Try) -> None:
        parts = [body.part for body in bodies(node)]
        for name, sides in node.merge.items():
            for index, (part, side) in enumerate(zip(parts, sides, strict=True)):
                path = f"{self._paths[node.id]}.merge.{name}[{index}]"
                self.check_names(read_by(side), path, Place(node.id, part))

    def _reads(self, node: Placed) -> list[frozenset[str]]:
        tail = tail_reads(node)
        reads = [slot.reads for slot in self._new.slots[node.id]]
        return reads if tail is None else [*reads, tail]

    def _check_targets(self, node: Kill, place: Place | None) -> None:
        path = self._paths[node.id]
        if place is None and self._outside is None and not node.after and node.when is UNSET:
            raise ProgramError(
                "program.control",
                f"node `{node.id}` would kill at once: say `after` or `when`",
                path=path,
            )
        for index, target in enumerate(node.targets):
            where = f"{path}.targets[{index}]"
            is_bound = self._outside is not None and target in self._outside.binds
            if target in self._standing.jobs or target in self._new.jobs:
                continue
            if not self.sees_variable(target, place) or is_bound:
                self._refuse_unknown(target, where)
            if self._outside is None and self.producer(target) is None:
                raise ProgramError(
                    "program.control",
                    f"node `{node.id}` cannot kill `{target}`: no node writes it",
                    path=where,
                )

    def _check_waits(self, node: Wait) -> None:
        binds = frozenset() if self._outside is None else self._outside.binds
        for index, name in enumerate(node.variables):
            if name in binds:
                raise ProgramError(
                    "program.control",
                    f"`{name}` has its value when the body begins: nothing to wait for",
                    path=f"{self._paths[node.id]}.variables[{index}]",
                )

    def _refuse_read(self, node: Placed) -> NoReturn:
        """Name the first unknown variable of a node."""
        place = self.place(node.id)
        reads = {
            name
            for names in self._reads(node)
            for name in names
            if not self.sees_variable(name, place)
        }
        where, name = min((find_read(node, name), name) for name in reads)
        self._refuse_unknown(name, f"{self._paths[node.id]}.{where}")

    def _refuse_unknown(self, name: str, path: str) -> NoReturn:
        """Say what may have been meant."""
        known = {**self._standing.variables, **self._new.variables}
        if name in known or name in self._new.hidden or name in self._standing.hidden:
            raise ProgramError(
                "program.unknown_variable",
                f"variable `{name}` is made in a body, which it leaves only by `collect`, `merge` "
                "or `carry`",
                path=path,
            )
        close = difflib.get_close_matches(name, list(known)[:1_000], n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise ProgramError(
            "program.unknown_variable",
            f"variable `{name}` is read, but no node writes it and `variables` does not "
            f"declare it as an input{hint}",
            path=path,
        )

    def check_names(self, names: Iterable[str], path: str, place: Place | None = None) -> None:
        """Check names that stand beside a body and mean what is in it.

        Raises:
            ProgramError: `program.unknown_variable`.
        """
        for name in sorted(names):
            if not self.sees_variable(name, place):
                self._refuse_unknown(name, path)
