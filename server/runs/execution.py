"""One program while it runs: which slots are ready, which values stand, how each node ended.

The state machine of a program, without I/O: every method is a plain step that returns the
slots that became ready by it. Knows the graph, values and phases; refuses to know engines,
clients, disks and clocks (times are handed in).

Kept true: a variable is resolved at most once, either by a value or by an absence; a slot
is reported ready exactly once, when everything it reads is resolved, the slot before it is
done and every node it comes after has ended; a node that has ended never changes again.

    values    variable -> JSON                      committed, never replaced
    absences  variable -> (phase, problem)          nobody will ever write it
    missing   (node, slot) -> how many things it still waits for
    open      parts of nodes with bodies whose gate is open: what stands behind a closed one
              waits, and nobody waits for it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..program.control import Place, count_calls
from ..program.errors import ConflictError, NotFoundError
from ..program.graph import Graph, Slot
from ..program.instances import Instance
from ..program.ir import Append, Generate, Job, Json, Loop, Map, Options, Placed, Round, Wait
from ..program.standing import gate
from ..program.status import ENDED, Phase, Problem, Trace


class Ready(NamedTuple):
    """A slot whose time has come."""

    node: str
    slot: int


class Absence(NamedTuple):
    """Why a variable will never have a value."""

    phase: Phase
    problem: Problem


@dataclass(slots=True)
class Usage:
    """Tokens and seconds of one node, summed over its slots, as they were reported."""

    logical: int = 0
    computed: int = 0
    """Of its prompts, and of prefixes that it filled for others as well."""
    cached: int = 0
    recomputed: int = 0
    constant: int = 0
    """Leading tokens of its first prompt that are text of the program."""
    written: int = 0
    """Tokens that a model had written and the first prompt took over."""
    again: int = 0
    """What stood in the context already when its later outputs began."""
    again_constant: int = 0
    again_written: int = 0
    prompt_discarded: int = 0
    """Of prompts that were given up before the engine had said what they cost."""
    decoded: int = 0
    forced: int = 0
    discarded: int = 0
    retokenized: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    block_seconds: float = 0.0


@dataclass(slots=True)
class NodeState:
    """What has become of one node."""

    node: Placed
    phase: Phase = "waiting"
    attempt: int = 0
    engine: str | None = None
    why: str = ""
    problem: Problem | None = None
    prefix_break: bool = False
    constraint_relaxed: bool = False
    slots_done: int = 0
    num_deaths: int = 0
    """Engines that died while it ran on them."""
    num_retries: int = 0
    """Attempts after failures of its own, of which `retries` allows so many."""
    started_at: float | None = None
    finished_at: float | None = None
    usage: Usage = field(default_factory=Usage)
    trace: list[Trace] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether the node is past everything."""
        return self.phase in ENDED


class Execution:
    """A program's live state."""

    def __init__(
        self,
        program_id: str,
        tenant: str,
        graph: Graph,
        inputs: Mapping[str, Json],
        options: Options,
        *,
        name: str,
        is_open: bool,
        created_at: float,
    ) -> None:
        self.id = program_id
        self.tenant = tenant
        self.name = name
        self.graph = graph
        self.options = options
        self.is_open = is_open
        self.created_at = created_at
        self.finished_at: float | None = None
        self.phase: Phase = "accepted"
        self.problem: Problem | None = None
        self.values: dict[str, Json] = dict(inputs)
        self.given: frozenset[str] = frozenset(inputs)
        self.absences: dict[str, Absence] = {}
        self.nodes: dict[str, NodeState] = {}
        self.wanted: set[str] | None = None if options.start == "eager" else set()
        self._asked: set[str] = set()
        self._is_session = is_open
        self._missing: dict[tuple[str, int], int] = {}
        self._open: set[Place] = set()
        self._quorums: dict[tuple[str, int], int | None] = {}
        """Slots that do not wait for all they read: how many values are enough, None once that
        is decided."""
        self._num_unended = 0
        self._num_open_in: Counter[str] = Counter()
        self.num_open_calls = 0
        """LLM calls in the graph that have not ended."""
        self._claims: dict[str, int] = {}
        self.num_claimed_calls = 0
        """Calls of a first item or round of each map and loop that has not begun, and stands in an
        item, a round or a branch that has come. Others may never begin, or in hours."""
        self._reported: set[tuple[str, int]] = set()
        self._is_started = False
        self._count(graph.nodes)

    # --- growing --------------------------------------------------------------------------

    def append(self, append: Append) -> tuple[tuple[str, ...], list[Ready]]:
        """Add nodes to an open program, all or none; returns their ids and what is ready.

        Raises:
            ProgramError: if the nodes do not fit into the graph.
        """
        added = self.graph.append(append)
        ready: list[Ready] = []
        for variable, value in append.inputs.items():
            if variable in self.values:
                raise ConflictError("variable.committed", f"variable {variable} has a value")
            ready += self.commit(variable, value)
        self.given |= append.inputs.keys()
        self._count(added)
        if append.close:
            self.is_open = False
        if self.wanted is None:
            ready += self._ready(
                (node_id, slot.index) for node_id in added for slot in self.graph.slots[node_id]
            )
        else:
            # What was asked for may have got a producer now, however far back.
            self._want(self._asked)
            ready += self._ready(self._missing)
        return added, ready

    def start(self) -> list[Ready]:
        """Begin: from here on slots are reported. Before, a past can be restored in silence."""
        self._is_started = True
        return self._ready(self._missing)

    def grow(self, instances: Sequence[Instance]) -> tuple[tuple[str, ...], list[Ready]]:
        """Add instances of bodies; returns their nodes and what is ready. The gates of the parts
        that they came for are open.

        Raises:
            ProgramError: `program.too_large` if the graph would be too large.
        """
        added = self.graph.grow(instances)
        fresh = {instance.node.id for instance in instances}
        for _, _, place in instances:
            if place is not None and place.control not in fresh:
                self._open.add(place)
                self._unclaim(place.control)
        self._count(added)
        if self.wanted is not None:
            self.wanted.update(added)
        return added, self._ready(
            (node_id, slot.index) for node_id in added for slot in self.graph.slots[node_id]
        )

    def open(self, place: Place) -> list[Ready]:
        """A part was chosen: what stands in it may start, and its end is waited for."""
        self._open.add(place)
        nodes = self.graph.parts(place.control).get(place.part, ())
        for node_id in nodes:
            self._await_end(node_id)
        return self._count_down((node_id, 0) for node_id in nodes)

    def read(self, node_id: str, slot: int, names: Iterable[str]) -> None:
        """A slot that is not ready comes to read more names."""
        known = self.graph.slots[node_id][slot].reads
        more = {name for name in names if name not in known}
        self.graph.read(node_id, slot, more)
        self._missing[node_id, slot] += sum(not self.is_resolved(name) for name in more)

    def is_entered(self, node_id: str) -> bool:
        """Whether a node stands behind no closed gate, and under `start: demand` is asked for."""
        if self.wanted is not None and node_id not in self.wanted:
            return False
        place = self.graph.place(node_id)
        while place is not None:
            if place not in self._open:
                return False
            place = self.graph.place(place.control)
        return True

    def begun(self, node_id: str, slot: int) -> None:
        """A slot has begun in an earlier life of the server, and goes on by what it began."""
        self._reported.add((node_id, slot))
        self.nodes[node_id].phase = "running"

    def is_due(self, node_id: str, slot: int) -> bool:
        """Whether a slot that was ready still is: its node may have ended, or it may be held."""
        state = self.nodes[node_id]
        is_next = slot == state.slots_done and not self._missing[node_id, slot]
        return is_next and not state.has_ended

    def waits_only_for(self, node_id: str, slot: int, names: Iterable[str]) -> bool:
        """Whether a slot would be ready if these variables were there, none of which is."""
        return self._missing[node_id, slot] == len(set(names)) and not self.nodes[node_id].has_ended

    def hold(self, node_id: str, slot: int) -> None:
        """Keep a slot from being ready, even if it was, until `let_go`."""
        self._missing[node_id, slot] += 1
        self._reported.discard((node_id, slot))

    def let_go(self, node_id: str, slot: int) -> list[Ready]:
        """What held a slot is over."""
        return self._count_down([(node_id, slot)])

    def _count(self, nodes: Iterable[str]) -> None:
        ids = list(nodes)
        for node_id in ids:
            assert node_id not in self.nodes, node_id
            self.nodes[node_id] = NodeState(self.graph.nodes[node_id])
        self._num_unended += len(ids)
        for node_id in ids:
            node = self.graph.nodes[node_id]
            place = self.graph.place(node_id)
            for slot in self.graph.slots[node_id]:
                missing = self._count_reads(node, slot)
                if slot.index == 0:
                    missing += sum(not self.nodes[other].has_ended for other in node.after)
                    missing += place is not None and place not in self._open
                else:
                    missing += 1
                self._missing[node_id, slot.index] = missing
            match node:
                case Generate():
                    self.num_open_calls += 1
                case Map() | Loop() if self.graph.place(node_id) is not None:
                    self._claims[node_id] = num_calls = count_calls(node.body)
                    self.num_claimed_calls += num_calls
                case _:
                    pass
        for node_id in ids:
            if self.graph.place(node_id) in self._open:
                self._await_end(node_id)

    def _unclaim(self, node_id: str) -> None:
        self.num_claimed_calls -= self._claims.pop(node_id, 0)

    def num_open_in(self, node_id: str) -> int:
        """Nodes that have not ended, of those that stand in the bodies of a node and may run."""
        return self._num_open_in[node_id]

    def _count_reads(self, node: Placed, slot: Slot) -> int:
        if isinstance(node, Wait) and slot.index == 1 and node.mode != "all":
            self._quorums[node.id, 1] = 1 if node.mode == "any" else node.mode
            return int(not self._has_quorum(node.id, 1))
        return sum(not self.is_resolved(name) for name in slot.reads)

    def _await_end(self, node_id: str) -> None:
        """The node around this one waits for its end."""
        place = self.graph.place(node_id)
        assert place is not None
        if not self.nodes[node_id].has_ended:
            _, close = gate(self.graph.nodes[place.control])
            self._missing[place.control, close] += 1
            self._num_open_in[place.control] += 1

    def _has_quorum(self, node_id: str, slot: int) -> bool:
        """Whether it is decided that enough variables have a value, or never will."""
        enough = self._quorums[node_id, slot]
        assert enough is not None
        reads = self.graph.slots[node_id][slot].reads
        num_values = sum(name in self.values for name in reads)
        num_lost = sum(name in self.absences for name in reads)
        if num_values < enough <= len(reads) - num_lost:
            return False
        self._quorums[node_id, slot] = None
        return True

    def _ready(self, keys: Iterable[tuple[str, int]]) -> list[Ready]:
        return [Ready(*key) for key in keys if not self._missing[key] and self._take(key)]

    def want(self, variable: str) -> list[Ready]:
        """Somebody asks for a variable: under `start: demand`, its ancestors may run now."""
        if self.wanted is None or variable in self._asked:
            return []
        self._asked.add(variable)
        self._want([variable])
        return self._ready(self._missing)

    def _want(self, variables: Iterable[str]) -> None:
        assert self.wanted is not None
        producers = map(self.graph.get_producer, variables)
        stack = [producer.node for producer in producers if producer is not None]
        seen: set[str] = set()
        while stack:
            node_id = stack.pop()
            if node_id in seen:
                continue
            seen.add(node_id)
            stack += self.graph.nodes[node_id].after
            stack += self.graph.inside(node_id)
            if (place := self.graph.place(node_id)) is not None:
                stack.append(place.control)
            for slot in self.graph.slots[node_id]:
                before = map(self.graph.get_producer, slot.reads | slot.sees)
                stack += [producer.node for producer in before if producer is not None]
        self.wanted |= seen

    # --- resolving ------------------------------------------------------------------------

    def is_resolved(self, variable: str) -> bool:
        """Whether the variable has a value or will never have one."""
        return variable in self.values or variable in self.absences

    def commit(self, variable: str, value: Json) -> list[Ready]:
        """Give a variable its only value."""
        assert not self.is_resolved(variable), variable
        self.values[variable] = value
        return self._resolved(variable)

    def lose(self, variable: str, absence: Absence) -> list[Ready]:
        """A variable will never have a value."""
        assert not self.is_resolved(variable), variable
        self.absences[variable] = absence
        return self._resolved(variable)

    def _resolved(self, variable: str) -> list[Ready]:
        keys = [(slot.node, slot.index) for slot in self.graph.get_consumers(variable)]
        if self._quorums:
            keys = [key for key in keys if key not in self._quorums or self._decides(key)]
        return self._count_down(keys)

    def _decides(self, key: tuple[str, int]) -> bool:
        """Whether what was resolved just now decided a quorum."""
        return self._quorums[key] is not None and self._has_quorum(*key)

    def _count_down(self, keys: Iterable[tuple[str, int]]) -> list[Ready]:
        ready = []
        for key in keys:
            if key not in self._missing:
                continue  # a node that is being appended is counted when it is added
            self._missing[key] -= 1
            if self._missing[key] == 0 and self._take(key):
                ready.append(Ready(*key))
        return ready

    def _take(self, key: tuple[str, int]) -> bool:
        node_id, slot = key
        state = self.nodes[node_id]
        if not self._is_started or key in self._reported or state.has_ended:
            return False
        if slot < state.slots_done:  # done before a restart
            return False
        if self.wanted is not None and node_id not in self.wanted:
            return False
        self._reported.add(key)
        return True

    # --- ending ---------------------------------------------------------------------------

    def finish_slot(self, node_id: str, slot: int, *, at: float) -> list[Ready]:
        """A slot did its work (its variables were committed before); may end the node."""
        state = self.nodes[node_id]
        state.slots_done = slot + 1
        if state.slots_done < len(self.graph.slots[node_id]):
            return self._count_down([(node_id, slot + 1)])
        return self._end(state, "done", at)

    def end(self, node_id: str, phase: Phase, problem: Problem | None, *, at: float) -> list[Ready]:
        """End a node before its time: what it has not written is absent from now on.

        Ending a node that has ended is safe and does nothing.
        """
        state = self.nodes[node_id]
        if state.has_ended:
            return []
        state.problem = problem
        ready = self._end(state, phase, at)
        absence = Absence(
            phase, problem or Problem(code=f"node.{phase}", message=f"{node_id}: {phase}")
        )
        for slot in self.graph.slots[node_id]:
            for variable in slot.writes:
                if not self.is_resolved(variable):
                    ready += self.lose(variable, absence)
        return ready

    def _end(self, state: NodeState, phase: Phase, at: float) -> list[Ready]:
        state.phase = phase
        state.finished_at = at
        self._num_unended -= 1
        node_id = state.node.id
        keys = [(other, 0) for other in self.graph.followers(node_id)]
        place = self.graph.place(node_id)
        self.num_open_calls -= isinstance(state.node, Generate)
        self._unclaim(node_id)
        if place is not None and place in self._open:
            self._num_open_in[place.control] -= 1
            keys.append((place.control, gate(self.graph.nodes[place.control])[1]))
        return self._count_down(keys)

    def absence_for(self, slot: Slot) -> Absence | None:
        """Why this slot cannot run, by what it reads.

        A failure goes on as the same failure, so that whoever asks for the end of a chain
        learns what broke at its beginning; a skipped or killed variable skips its readers.
        """
        absence = self.absence_among(slot.reads)
        if absence is not None and absence.phase in {"killed", "skipped"}:
            return Absence("skipped", absence.problem)
        return absence

    def absence_among(self, names: Iterable[str]) -> Absence | None:
        """The absence that counts most among these: a failure, if there is one."""
        found = [self.absences[name] for name in sorted(names) if name in self.absences]
        return next((each for each in found if each.phase == "failed"), found[0] if found else None)

    def isolates(self, node_id: str) -> bool:
        """Whether a failure of this node stays with its readers instead of ending the program.

        A session is many people's work laid side by side: unless told otherwise, it isolates. In
        a body it is the node around it that a failure goes to.
        """
        node = self.graph.nodes[node_id]
        if isinstance(node, Round):
            # The end of a round is part of the loop: a failure of it is the loop's.
            return False
        if node.on_error is not None:
            return node.on_error == "isolate"
        job = self.graph.jobs[node.job]
        is_alone = self._is_session and job == Job() and self.graph.place(node_id) is None
        return job.on_error == "isolate" or is_alone

    def is_within(self, job: str, outer: str) -> bool:
        """Whether a job is another one or stands below it; all stand below `main`."""
        while job != outer and job != "main":
            job = self.graph.jobs[job].parent or "main"
        return job == outer

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to run and nobody may add more."""
        if self.is_open:
            return False
        if self.wanted is None:
            return self._num_unended == 0
        return all(map(self.is_resolved, self.graph.outputs)) and all(
            self.nodes[node_id].has_ended for node_id in self.wanted
        )

    # --- reading --------------------------------------------------------------------------

    def check_variable(self, variable: str) -> None:
        """Make sure that the program has this variable.

        Raises:
            NotFoundError: if it has not.
        """
        if variable not in self.graph.variables:
            raise NotFoundError(
                "variable.not_found", f"program {self.id} has no variable {variable}"
            )

    def variable_names(self) -> list[str]:
        """Every variable, declared or produced, in the order of the program."""
        return list(self.graph.variables)

    def phase_of(self, variable: str) -> Phase:
        """Where a variable stands."""
        if variable in self.values:
            return "done"
        if variable in self.absences:
            return self.absences[variable].phase
        producer = self.graph.get_producer(variable)
        return "waiting" if producer is None else self.nodes[producer.node].phase
