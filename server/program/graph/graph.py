"""The append-only graph of a program: producers, consumers, order.

A program is closed at submission. A session's graph stays open and grows by `append`. Instances
of bodies are added by `grow`.

An edge leads from the producer of a variable to each of its readers, from a slot to the next slot
of its node, and from the last slot of a node to the first slot of each node that names it in
`after`.

Out of scope: what has run. The graph records only which inputs have a value, because these cannot
have a producer.

Invariants: a variable has at most one producer, every name that is read is produced or declared,
the slots have no cycle, and a refused append changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..content import Json
from ..errors import ConflictError, ProgramError
from ..expressions.symbolic import STEPS_PER_NODE, VariableDefinitions
from ..ir import Append, Deadline, Objective, Program, Submission
from ..nodes import GraphNode
from ..nodes.bodies import BodyRef
from ..slot import Slot
from .extension import GraphExtension, check_expanded_size
from .instances import BodyInstance
from .tables import GraphTables
from .toposort import sort

__all__ = ["Graph", "LintFault", "Slot"]


class LintFault(NamedTuple):
    """Something that is allowed but probably a mistake."""

    code: str
    message: str
    node: str | None
    fix: str


class CheckedAppend(NamedTuple):
    """Nodes that were checked against a graph, but not added yet."""

    extension: GraphExtension
    version: int
    """The graph's version before the check."""


class Graph:
    """A checked program; use `build`. Its attributes are for reading only."""

    def __init__(self, *, open: bool) -> None:  # noqa: A002 - the wire's word for a session
        self.open = open
        """Whether `append` is allowed."""
        self._tables = tables = GraphTables()
        self.nodes = tables.nodes
        self.slots = tables.slots
        self.variables = tables.variables
        """All variables that are declared or produced."""
        self.outputs = tables.outputs
        self.jobs = tables.jobs
        """Declared jobs, and jobs that only nodes name (their parent is `main`)."""
        self.provided_inputs = tables.provided
        """Inputs that have a value, so that no node can become their producer."""
        self.objectives: dict[str, Objective] = {}
        """The objective of every output, and of other variables that a client waits for."""
        self.deadlines: dict[str, float] = {}
        """The deadlines among the objectives, in seconds after the submission."""
        self.definitions = VariableDefinitions()
        """The expressions of `expr` nodes, for symbolic prompts."""
        self._given_objectives: set[str] = set()
        """Variables whose objective is not the default."""
        self._followers: dict[str, list[str]] = {}
        self._sorted: list[int] | None = []
        self.version = 0
        """Counts the changes that the check of an append depends on."""

    @classmethod
    def build(
        cls,
        program: Program,
        inputs: Mapping[str, Json],
        *,
        open: bool = False,  # noqa: A002 - the wire's word for a session
        objectives: Mapping[str, Objective] | None = None,
    ) -> Graph:
        """Return the checked graph of a submission.

        Raises:
            ProgramError: with the path of the first error in the submission.
        """
        graph = cls(open=open)
        extension = GraphExtension(graph._tables, prefix="program.")
        extension.add_jobs(program.jobs)
        extension.add(
            program.variables, program.nodes, inputs, program.outputs, dict(objectives or {})
        )
        graph._commit(extension)
        return graph

    def append(self, append: Append, checked: CheckedAppend | None = None) -> tuple[str, ...]:
        """Add nodes to a session's graph, or close it; return the ids of the new nodes.

        Raises:
            ConflictError: `session.closed` if the graph is closed.
            ProgramError: as in `build`, with paths into the append. The graph is unchanged then.
        """
        if checked is None or checked.version != self.version:
            checked = check_append(self, append)
        extension = checked.extension
        self._commit(extension)
        if append.close:
            self.open = False
        return tuple(extension.new.nodes)

    def add_instances(self, instances: Sequence[BodyInstance]) -> tuple[str, ...]:
        """Add instances of a body in the graph; return the ids of the new nodes.

        Raises:
            ProgramError: `program.too_large` if the graph would be too large.
        """
        extension = GraphExtension(self._tables, prefix="")
        extension.add_instances(instances)
        self._commit(extension)
        return tuple(extension.new.nodes)

    def check_expanded_size(self, num_more: int) -> None:
        """Check that a number of nodes of instances can be added.

        Raises:
            ProgramError: `program.too_large`.
        """
        check_expanded_size(self._tables, num_more)

    def add_reads(self, node_id: str, index: int, names: Iterable[str]) -> None:
        """Add variables that a slot reads, once its node has decided."""
        self._tables.add_reads(node_id, index, names)
        self.version += 1
        self._sorted = None

    @property
    def inputs(self) -> frozenset[str]:
        """Declared variables without a producer (an append may still add one)."""
        produced = self._tables.producers.keys() | self._tables.template_variables.keys()
        return frozenset(self.variables.keys() - produced)

    def mark_provided(self, variable: str) -> None:
        """Record that an input got its value after the submission.

        Raises:
            ProgramError: `program.unknown_input`.
        """
        if variable not in self.variables or variable in self._tables.producers:
            raise ProgramError("program.unknown_input", f"`{variable}` is not an input")
        self.version += 1
        self.provided_inputs.add(variable)

    def get_producer(self, variable: str) -> Slot | None:
        """Return the slot that writes a variable, None for inputs and unknown names."""
        number = self._tables.producers.get(variable)
        return None if number is None else self._tables.numbered_slots[number]

    def get_consumers(self, variable: str) -> tuple[Slot, ...]:
        """Return the slots that read a variable, in the order they were added."""
        return _slots_of(self._tables, self._tables.consumers.get(variable, ()))

    def get_potential_readers(self, variable: str) -> tuple[Slot, ...]:
        """Return the slots that may read a variable after a decision."""
        return _slots_of(self._tables, self._tables.potential_readers.get(variable, ()))

    def nodes_after(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that name this one in `after`."""
        return tuple(self._followers.get(node_id, ()))

    def body_of(self, node_id: str) -> BodyRef | None:
        """Return the body that contains a node."""
        return self._tables.body_of.get(node_id)

    def body_nodes(self, node_id: str) -> Mapping[str, Sequence[str]]:
        """Return the nodes in the bodies of a node, by part, as far as they are expanded."""
        return self._tables.body_nodes.get(node_id, {})

    def descendants(self, node_id: str) -> Iterator[str]:
        """Iterate over all nodes in the bodies of a node at any depth, outer nodes first."""
        for part in list(self.body_nodes(node_id).values()):
            for child in list(part):
                yield child
                yield from self.descendants(child)

    def predecessors(self, slot: Slot) -> tuple[Slot, ...]:
        """Return the slots that must end before this one starts; each once."""
        return _slots_of(self._tables, self._tables.predecessors[self.slot_number(slot)])

    def successors(self, slot: Slot) -> tuple[Slot, ...]:
        """Return the slots that wait for this one; each once."""
        return _slots_of(self._tables, self._tables.successors[self.slot_number(slot)])

    def successor_numbers(self, number: int) -> Sequence[int]:
        """Return the numbers of the slots that wait for a slot."""
        return self._tables.successors[number]

    def slot_number(self, slot: Slot) -> int:
        """Return the number of a slot, in the order the slots were added."""
        return self._tables.first_slot[slot.node] + slot.index

    def topological(self) -> list[Slot]:
        """Return all slots in topological order."""
        if self._sorted is None:
            numbers = range(len(self._tables.numbered_slots))
            self._sorted = sort(numbers, self._tables.successors.__getitem__)
        return list(_slots_of(self._tables, self._sorted))

    def lint(self) -> list[LintFault]:
        """Return what is allowed but probably a mistake."""
        outputs = set(self.outputs)
        producers = self._tables.producers
        used = self._tables.consumers.keys() | self._tables.potential_readers.keys() | outputs
        faults: list[LintFault] = []
        for name, number in producers.items():
            if "." not in name and name not in used:
                node = self._tables.numbered_slots[number].node
                message = f"variable `{name}` of node `{node}` is never read"
                fix = "read it, add it to `outputs`, or remove it"
                faults.append(LintFault("variable.unread", message, node, fix))
        for name in self.variables:
            if name not in used and name not in producers:
                message = f"input `{name}` is never read"
                faults.append(LintFault("input.unread", message, None, "remove it"))
        for each in self.nodes.values():
            if each.trailing_reads() is not None:
                message = (
                    f"node `{each.id}` has prompt text after its last output, where no output "
                    "reads it"
                )
                fix = "move the text before the output, or remove it"
                faults.append(LintFault("prompt.trailing", message, each.id, fix))
        if self.nodes and not outputs and not self.open:
            message = "the program has no outputs"
            fix = "list the variables to return in `outputs`"
            faults.append(LintFault("program.no_outputs", message, None, fix))
        return faults

    def add_definitions(self, node: GraphNode) -> None:
        """Add the expressions of a node, which may run later or be added to the graph later."""
        self.definitions.budget.left += STEPS_PER_NODE
        for variable, expression in node.definitions():
            self.definitions.add(variable, expression)

    def tighten_objective(self, variable: str, objective: Objective) -> bool:
        """Apply a later objective of a variable; return whether it is stricter than before."""
        before = self.objectives.get(variable)
        self._set_objectives((), {variable: objective})
        return self.objectives[variable] != before

    def _commit(self, extension: GraphExtension) -> None:
        """Apply a checked extension; cannot fail."""
        self.version += 1
        extension.commit()
        self._set_objectives(extension.new.outputs, extension.objectives)
        # If no existing slot waits for a new one, the new slots follow all existing ones.
        if self._sorted is not None and extension.is_append_only:
            self._sorted += extension.order
        else:
            self._sorted = None
        for node in extension.new.nodes.values():
            for earlier in dict.fromkeys(node.after):
                self._followers.setdefault(earlier, []).append(node.id)
            self.add_definitions(node)

    def _set_objectives(self, outputs: Iterable[str], objectives: Mapping[str, Objective]) -> None:
        """Set objectives, and the default of new outputs.

        A later objective counts only if it is stricter. The default counts as no objective.
        """
        defaults: dict[str, Objective] = dict.fromkeys(outputs, "latency")
        for name, objective in (defaults | dict(objectives)).items():
            is_first = name not in self._given_objectives
            if is_first or _strictness(objective) > _strictness(self.objectives[name]):
                self.objectives[name] = objective
                if isinstance(objective, Deadline):
                    self.deadlines[name] = objective.deadline_s
        self._given_objectives |= objectives.keys()


def _slots_of(tables: GraphTables, numbers: Iterable[int]) -> tuple[Slot, ...]:
    return tuple(tables.numbered_slots[number] for number in numbers)


def _strictness(objective: Objective) -> tuple[int, float]:
    """Return a key that is larger for a stricter objective."""
    if isinstance(objective, Deadline):
        return (2, -objective.deadline_s)
    return (0 if objective == "throughput" else 1, 0.0)


def graph_of(submission: Submission) -> Graph:
    """Return the graph of a submission.

    Raises:
        ProgramError: as `Graph.build`.
    """
    return Graph.build(
        submission.program,
        submission.inputs,
        open=submission.open,
        objectives=submission.objectives,
    )


def bodies_around(graph: Graph, node_id: str) -> Iterator[BodyRef]:
    """Iterate over the bodies that contain a node, the innermost first."""
    body = graph.body_of(node_id)
    while body is not None:
        yield body
        body = graph.body_of(body.control)


def check_append(graph: Graph, append: Append) -> CheckedAppend:
    """Check nodes for `Graph.append`, which checks them again only if the graph has changed.

    Reads only: it may run in a thread, and then gives an outdated result at worst.

    Raises:
        ConflictError: `session.closed` if the graph is closed.
        ProgramError: as in `Graph.build`, with paths into the append.
    """
    if not graph.open:
        raise ConflictError(
            "session.closed",
            "the program accepts no more nodes: it was submitted without `open`, or closed",
        )
    version = graph.version
    extension = GraphExtension(graph._tables, prefix="")
    extension.add(
        append.variables,
        append.nodes,
        append.inputs,
        append.outputs,
        append.objectives,
        is_append=True,
    )
    return CheckedAppend(extension, version)
