"""The append-only graph of a program: who produces what, who waits for whom.

A program is a graph that is closed at submission; a session's graph stays open and grows
by `append`. Knows names, slots and edges. Refuses to know whether anything has run: values
are only known as "given", which forbids a producer.

Kept true: every variable has at most one producer, every name that is read is produced or
declared, the slots have no cycle, and an append that is refused has changed nothing.

Slots have numbers inside, in the order they came, and edges are lists of numbers: an edge
stands from the producer of a variable to each reader, from a slot to the next of its node,
and from the last slot of a node to the first of those that come `after` it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .control import Place
from .errors import ConflictError, ProgramError
from .growth import Growth, check_growth
from .instances import Instance
from .ir import Append, Expr, Json, Loop, Objective, Placed, Program, Round
from .order import sort
from .standing import Standing
from .symbols import Definitions
from .validation import Slot, tail_reads

__all__ = ["Graph", "Slot"]


class Graph:
    """A checked program; use `build`. Its attributes are for reading."""

    def __init__(self, *, open: bool) -> None:  # noqa: A002 - the wire's word for a session
        self.open = open
        """Whether `append` is allowed."""
        standing = Standing()
        self._standing = standing
        self.nodes = standing.nodes
        self.slots = standing.slots
        self.variables = standing.variables
        """Everything that has a name, declared or produced."""
        self.outputs = standing.outputs
        self.jobs = standing.jobs
        """Also those that are only named by nodes: they belong to `main`."""
        self.given = standing.given
        """Inputs that have a value, so that no node can become their producer."""
        self.objectives: dict[str, Objective] = {}
        """One for every output."""
        self.definitions = Definitions()
        """What `expr` nodes compute, for ropes."""
        self._explicit: set[str] = set()
        self._followers: dict[str, list[str]] = {}
        self._sorted: list[int] | None = []

    @classmethod
    def build(
        cls,
        program: Program,
        inputs: Mapping[str, Json],
        *,
        open: bool = False,  # noqa: A002 - the wire's word for a session
        objectives: Mapping[str, Objective] | None = None,
    ) -> Graph:
        """The graph of a submission.

        Raises:
            ProgramError: with the path into the submission of the first thing that is wrong.
        """
        graph = cls(open=open)
        growth = Growth(graph._standing, prefix="program.")
        growth.add_jobs(program.jobs)
        growth.add(
            program.variables, program.nodes, inputs, program.outputs, dict(objectives or {})
        )
        graph._commit(growth)
        return graph

    def append(self, append: Append) -> tuple[str, ...]:
        """Let a session's graph grow, or close it; returns the ids of the new nodes.

        Raises:
            ConflictError: `session.closed` if the graph is closed.
            ProgramError: as in `build`, with paths into the append; nothing has changed then.
        """
        if not self.open:
            raise ConflictError(
                "session.closed",
                "the program takes no more nodes: it was submitted whole or closed",
            )
        growth = Growth(self._standing, prefix="")
        growth.add(append.variables, append.nodes, append.inputs, append.outputs, append.objectives)
        self._commit(growth)
        if append.close:
            self.open = False
        return tuple(growth.new.nodes)

    def grow(self, instances: Sequence[Instance]) -> tuple[str, ...]:
        """Add instances of a body that is in the graph; returns the ids of the new nodes.

        Raises:
            ProgramError: `program.too_large` if the graph would be too large.
        """
        growth = Growth(self._standing, prefix="")
        growth.add_instances(instances)
        self._commit(growth)
        return tuple(growth.new.nodes)

    def check_growth(self, num_more: int) -> None:
        """Make sure that so many nodes of instances may come.

        Raises:
            ProgramError: `program.too_large`.
        """
        check_growth(self._standing, num_more)

    def read(self, node_id: str, index: int, names: Iterable[str]) -> None:
        """A slot of a node with bodies comes to read these, now that it has decided."""
        self._standing.read(node_id, index, names)
        self._sorted = None

    @property
    def inputs(self) -> frozenset[str]:
        """Declared variables that no node produces (an append may still do that)."""
        made = self._standing.producers.keys() | self._standing.hidden.keys()
        return frozenset(self.variables.keys() - made)

    def give(self, variable: str) -> None:
        """Note that an input got its value after the submission.

        Raises:
            ProgramError: `program.unknown_input` if there is no such input.
        """
        if variable not in self.variables or variable in self._standing.producers:
            raise ProgramError("program.unknown_input", f"`{variable}` is no input")
        self.given.add(variable)

    def get_producer(self, variable: str) -> Slot | None:
        """The slot that writes a variable, None for inputs and unknown names."""
        number = self._standing.producers.get(variable)
        return None if number is None else self._standing.numbered[number]

    def get_consumers(self, variable: str) -> tuple[Slot, ...]:
        """The slots that read a variable, in the order they came."""
        return tuple(
            self._standing.numbered[number] for number in self._standing.consumers.get(variable, ())
        )

    def get_seers(self, variable: str) -> tuple[Slot, ...]:
        """The slots that may come to read a variable: of what stands behind a decision."""
        return tuple(
            self._standing.numbered[number] for number in self._standing.seers.get(variable, ())
        )

    def followers(self, node_id: str) -> tuple[str, ...]:
        """The nodes that have this one in `after`."""
        return tuple(self._followers.get(node_id, ()))

    def place(self, node_id: str) -> Place | None:
        """In which body a node stands; None: in none."""
        return self._standing.places.get(node_id)

    def parts(self, node_id: str) -> Mapping[str, Sequence[str]]:
        """What stands in the bodies of a node, by part, as far as it has come."""
        return self._standing.parts.get(node_id, {})

    def inside(self, node_id: str) -> Iterator[str]:
        """Every node in the bodies of a node, however deep, outer ones first."""
        for part in list(self.parts(node_id).values()):
            for child in list(part):
                yield child
                yield from self.inside(child)

    def predecessors(self, slot: Slot) -> tuple[Slot, ...]:
        """The slots that must have ended before this one starts; each once."""
        return tuple(
            self._standing.numbered[number] for number in self._standing.before[self.number(slot)]
        )

    def successors(self, slot: Slot) -> tuple[Slot, ...]:
        """The slots that wait for this one; each once."""
        return tuple(
            self._standing.numbered[number] for number in self._standing.behind[self.number(slot)]
        )

    def number(self, slot: Slot) -> int:
        """The place of a slot in the order they came."""
        return self._standing.first[slot.node] + slot.index

    def topological(self) -> list[Slot]:
        """All slots, every one behind those it waits for."""
        if self._sorted is None:
            self._sorted = sort(
                range(len(self._standing.numbered)), self._standing.behind.__getitem__
            )
        return [self._standing.numbered[number] for number in self._sorted]

    def lint(self) -> list[str]:
        """What is allowed and probably not meant."""
        found: list[str] = []
        outputs = set(self.outputs)
        used = self._standing.consumers.keys() | self._standing.seers.keys()
        for variable, number in self._standing.producers.items():
            if "." not in variable and variable not in used and variable not in outputs:
                node = self._standing.numbered[number].node
                found.append(f"variable `{variable}` of node `{node}` is read by nobody")
        for variable in self.variables:
            is_used = variable in used or variable in outputs
            if not is_used and variable not in self._standing.producers:
                found.append(f"input `{variable}` is read by nobody")
        found += (
            f"node `{node.id}` has a prompt that goes on after its last output: nobody reads that"
            for node in self.nodes.values()
            if tail_reads(node) is not None
        )
        if self.nodes and not outputs and not self.open:
            found.append("the program has no outputs")
        return found

    def _commit(self, growth: Growth) -> None:
        """Take over what was checked; nothing here can fail."""
        growth.join()
        self._set_objectives(growth.new.outputs, growth.objectives)
        # New slots that no old one waits for stand rightly behind all old ones.
        if self._sorted is not None and growth.is_behind:
            self._sorted += growth.order
        else:
            self._sorted = None
        for node in growth.new.nodes.values():
            for earlier in dict.fromkeys(node.after):
                self._followers.setdefault(earlier, []).append(node.id)
            self.define(node)

    def define(self, node: Placed) -> None:
        """Note what a node computes: that is known before it has run, or is in the graph at all."""
        match node:
            case Expr():
                self.definitions.add(node.output, node.expr)
            case Loop():
                for name, (init, _) in node.carry.items():
                    self.definitions.add(f"{name}.0", init)
            case Round():
                for name, following in node.carry.items():
                    self.definitions.add(name, following)
            case _:
                pass

    def demand(self, output: str, objective: Objective) -> bool:
        """Take a later word on an output; True if it is stricter than what stood before.

        A word on a variable that is no output is safe and changes nothing.
        """
        before = self.objectives.get(output)
        if before is None or objective == before:
            return False
        self._set_objectives((), {output: objective})
        return self.objectives[output] != before

    def _set_objectives(self, outputs: Iterable[str], objectives: Mapping[str, Objective]) -> None:
        """Default for new outputs; a later word on an old one counts only if it is stricter."""
        for output in outputs:
            self.objectives[output] = "latency"
        for output, objective in objectives.items():
            before = self.objectives[output]
            if output not in self._explicit or before == "throughput":
                self.objectives[output] = objective
            self._explicit.add(output)
