"""How a graph may grow: new nodes, checked against all that stands before anything changes.

Knows names, slots and edges, as tables (`Standing`) and as a wish (`Growth`). Refuses to
know sessions, objectives' meaning and what has run.

Kept true: a `Growth` that `add` has accepted can be taken by the `Standing` it was checked
against, and taking it cannot fail.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from .errors import ProgramError
from .ir import MAX_NODES, AnyNode, Job, Json, Objective, Variable
from .order import find_cycle, reach, sort
from .validation import Slot, check_name, find_read, find_write, make_slots, tail_reads
from .value import has_type, kind_of

MAX_EDGES = 100_000
MAX_JOB_DEPTH = 32


@dataclass(slots=True)
class Standing:
    """The tables of a graph. Slots have numbers, in the order they came."""

    nodes: dict[str, AnyNode] = field(default_factory=dict)
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=lambda: {"main": Job()})
    outputs: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    numbered: list[Slot] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)
    """Node to the number of its first slot."""
    producers: dict[str, int] = field(default_factory=dict)
    consumers: dict[str, list[int]] = field(default_factory=dict)
    before: list[list[int]] = field(default_factory=list)
    behind: list[list[int]] = field(default_factory=list)
    num_edges: int = 0

    def take(self, growth: Growth) -> None:
        """Make what was checked part of the tables."""
        self.nodes |= growth.nodes
        self.slots |= growth.slots
        self.variables |= growth.variables
        self.jobs |= growth.jobs
        self.outputs += growth.outputs
        self.given |= growth.given
        for number, slot in enumerate(growth.numbered, len(self.numbered)):
            for variable in slot.reads:
                self.consumers.setdefault(variable, []).append(number)
        self.numbered += growth.numbered
        self.first |= growth.first
        self.producers |= growth.producers
        self.before += ([] for _ in growth.numbered)
        self.behind += ([] for _ in growth.numbered)
        for source, target in growth.edges:
            self.behind[source].append(target)
            self.before[target].append(source)
        self.num_edges += len(growth.edges)


class Growth:
    """Nodes that want to join a graph: checked against the whole before anything changes."""

    def __init__(self, standing: Standing, *, prefix: str) -> None:
        self._standing = standing
        self._prefix = prefix
        self._base = len(standing.numbered)
        self.nodes: dict[str, AnyNode] = {}
        self.slots: dict[str, tuple[Slot, ...]] = {}
        self.variables: dict[str, Variable] = {}
        self.jobs: dict[str, Job] = {}
        self.given: set[str] = set()
        self.outputs: list[str] = []
        self.objectives: dict[str, Objective] = {}
        self.numbered: list[Slot] = []
        self.first: dict[str, int] = {}
        self.producers: dict[str, int] = {}
        self.edges: list[tuple[int, int]] = []
        self.order: list[int] = []
        self.is_behind = True
        """No slot that was there before waits for a new one."""

    def add_jobs(self, jobs: Mapping[str, Job]) -> None:
        """Take declared jobs; `add` then checks that their parents exist."""
        for name in jobs:
            check_name(name, f"{self._prefix}jobs.{name}")
        self.jobs |= jobs

    def add(
        self,
        variables: Mapping[str, Variable],
        nodes: Sequence[AnyNode],
        inputs: Mapping[str, Json],
        outputs: Sequence[str],
        objectives: Mapping[str, Objective],
    ) -> None:
        """Check all of it.

        Raises:
            ProgramError: with the path of the first thing that is wrong.
        """
        self._add_variables(variables)
        self._add_nodes(nodes)
        self._check_jobs()
        for index, node in enumerate(nodes):
            self._check_reads(node, f"{self._prefix}nodes[{index}]")
        self._add_inputs(inputs)
        self._add_outputs(outputs, objectives)
        self._connect()
        self._sort(nodes)

    def _add_variables(self, variables: Mapping[str, Variable]) -> None:
        for name, variable in variables.items():
            path = f"{self._prefix}variables.{name}"
            check_name(name, path)
            before = self._standing.variables.get(name)
            if before is not None and before not in (Variable(), variable):
                raise ProgramError(
                    "program.variable",
                    f"variable `{name}` is declared otherwise already",
                    path=path,
                )
        self.variables |= variables

    def _add_nodes(self, nodes: Sequence[AnyNode]) -> None:
        if len(self._standing.nodes) + len(nodes) > MAX_NODES:
            _refuse_size(f"a program may have {MAX_NODES:,} nodes")
        for index, node in enumerate(nodes):
            path = f"{self._prefix}nodes[{index}]"
            try:
                slots = make_slots(node)
            except ProgramError as error:
                error.path = f"{path}.{error.path}" if error.path else path
                raise
            if node.id in self.nodes or node.id in self._standing.nodes:
                raise ProgramError(
                    "program.duplicate_node", f"there are two nodes `{node.id}`", path=f"{path}.id"
                )
            self.nodes[node.id] = node
            self.slots[node.id] = slots
            self.first[node.id] = self._base + len(self.numbered)
            for slot in slots:
                for variable in slot.writes:
                    self._add_producer(variable, node, path)
                self.numbered.append(slot)

    def _add_producer(self, variable: str, node: AnyNode, path: str) -> None:
        reason = ""
        number = self._producer(variable)
        if number is not None:
            reason = f"node `{self._slot(number).node}` writes it already"
        elif variable in self._standing.given:
            reason = "it has a value already"
        if reason:
            raise ProgramError(
                "program.two_producers",
                f"node `{node.id}` cannot write variable `{variable}`: {reason}",
                path=f"{path}.{find_write(node, variable)}",
            )
        self.producers[variable] = self._base + len(self.numbered)
        if variable not in self._standing.variables:
            self.variables.setdefault(variable, Variable())

    def _check_jobs(self) -> None:
        for node in self.nodes.values():
            if node.job not in self._standing.jobs:
                self.jobs.setdefault(node.job, Job())
        known = self._standing.jobs | self.jobs
        for name in self.jobs:
            path = f"{self._prefix}jobs.{name}.parent"
            line = [name]
            while (parent := known[line[-1]].parent) is not None:
                if parent not in known:
                    raise ProgramError(
                        "program.unknown_job",
                        f"job `{line[-1]}` has no job `{parent}` above it",
                        path=path,
                    )
                if parent in line:
                    raise ProgramError(
                        "program.cycle",
                        f"jobs stand in each other: {' -> '.join([*line, parent])}",
                        path=path,
                    )
                line.append(parent)
                if len(line) > MAX_JOB_DEPTH:
                    _refuse_size(f"jobs may be nested {MAX_JOB_DEPTH} deep")

    def _check_reads(self, node: AnyNode, path: str) -> None:
        known, more = self._standing.variables, self.variables
        for reads in self._reads(node):
            for variable in reads:
                if variable not in known and variable not in more:
                    self._refuse_unknown(node, path)
        for index, earlier in enumerate(node.after):
            if earlier not in self.nodes and earlier not in self._standing.nodes:
                raise ProgramError(
                    "program.unknown_after",
                    f"node `{node.id}` comes after `{earlier}`, but there is no such node",
                    path=f"{path}.after[{index}]",
                )

    def _reads(self, node: AnyNode) -> list[frozenset[str]]:
        tail = tail_reads(node)
        reads = [slot.reads for slot in self.slots[node.id]]
        return reads if tail is None else [*reads, tail]

    def _refuse_unknown(self, node: AnyNode, path: str) -> NoReturn:
        """Name the first unknown variable of a node, and what may have been meant."""
        known = {**self._standing.variables, **self.variables}
        reads = {name for reads in self._reads(node) for name in reads if name not in known}
        place, name = min((find_read(node, name), name) for name in reads)
        close = difflib.get_close_matches(name, list(known)[:1_000], n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise ProgramError(
            "program.unknown_variable",
            f"variable `{name}` is read, but no node writes it and `variables` does not "
            f"declare it as an input{hint}",
            path=f"{path}.{place}",
        )

    def _add_inputs(self, inputs: Mapping[str, Json]) -> None:
        for name, value in inputs.items():
            path = f"inputs.{name}"
            number = self._producer(name)
            variable = self.variables.get(name) or self._standing.variables.get(name)
            reason = ""
            if number is not None:
                reason = f"node `{self._slot(number).node}` writes it"
            elif variable is None:
                reason = "`variables` does not declare it"
            elif name in self._standing.given:
                reason = "it has a value already"
            if variable is None or reason:
                raise ProgramError(
                    "program.unknown_input", f"`{name}` takes no value: {reason}", path=path
                )
            if not has_type(value, variable.type):
                raise ProgramError(
                    "program.input_type",
                    f"`{name}` is declared as {variable.type}, its value is {kind_of(value)}",
                    path=path,
                )
        self.given |= inputs.keys()

    def _add_outputs(self, outputs: Sequence[str], objectives: Mapping[str, Objective]) -> None:
        stands = set(self._standing.outputs)
        for index, name in enumerate(outputs):
            if name not in self.variables and name not in self._standing.variables:
                raise ProgramError(
                    "program.unknown_output",
                    f"output `{name}` is no variable of the program",
                    path=f"{self._prefix}outputs[{index}]",
                )
            if name not in stands:
                stands.add(name)
                self.outputs.append(name)
        for name in objectives:
            if name not in stands:
                raise ProgramError(
                    "program.objective",
                    f"`{name}` has an objective, but is no output",
                    path=f"objectives.{name}",
                )
        self.objectives |= objectives

    def _connect(self) -> None:
        for number, slot in enumerate(self.numbered, self._base):
            found = {self._producer(variable) for variable in slot.reads}
            sources = {source for source in found if source is not None}
            if slot.index:
                sources.add(number - 1)
            else:
                sources |= {self._last(earlier) for earlier in self.nodes[slot.node].after}
            # Sorted: the order of a set of names differs from process to process.
            self.edges += ((source, number) for source in sorted(sources))
        for variable, number in self.producers.items():
            for reader in self._standing.consumers.get(variable, ()):
                self.edges.append((number, reader))
                self.is_behind = False
        if self._standing.num_edges + len(self.edges) > MAX_EDGES:
            _refuse_size(f"a program may have {MAX_EDGES:,} edges")

    def _sort(self, nodes: Sequence[AnyNode]) -> None:
        """Order the new slots, or say which nodes wait for each other."""
        base, behind_old = self._base, self._standing.behind
        added: dict[int, list[int]] = {}
        for source, target in self.edges:
            added.setdefault(source, []).append(target)

        def behind(number: int) -> Sequence[int]:
            more = added.get(number, ())
            return [*behind_old[number], *more] if number < base else more

        # A cycle must pass through something new, so what new slots reach is all to look at.
        numbers: Sequence[int] = range(base, base + len(self.numbered))
        if not self.is_behind:
            numbers = reach(numbers, behind)
        self.order = sort(numbers, behind)
        if len(self.order) == len(numbers):
            return
        cycle = find_cycle(set(numbers) - set(self.order), behind)
        names = [self._slot(number).node for number in cycle]
        names = [name for i, name in enumerate(names) if name != names[i - 1]] or names[:1]
        indices = [index for index, node in enumerate(nodes) if node.id in names]
        raise ProgramError(
            "program.cycle",
            f"nodes wait for each other: {' -> '.join([*names, names[0]])}",
            path=f"{self._prefix}nodes[{indices[0]}]",
        )

    def _producer(self, variable: str) -> int | None:
        number = self.producers.get(variable)
        return self._standing.producers.get(variable) if number is None else number

    def _slot(self, number: int) -> Slot:
        if number < self._base:
            return self._standing.numbered[number]
        return self.numbered[number - self._base]

    def _last(self, node_id: str) -> int:
        if node_id in self.first:
            return self.first[node_id] + len(self.slots[node_id]) - 1
        return self._standing.first[node_id] + len(self._standing.slots[node_id]) - 1


def _refuse_size(message: str) -> NoReturn:
    raise ProgramError("program.too_large", message, status=413)
