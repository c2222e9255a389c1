"""The state of one program: its values, missing values, nodes and decisions, without I/O.

Every method is a synchronous transition that returns the slots that became ready.

Out of scope: engines, clients and the journal. Times are passed in.

Invariants: a variable is resolved at most once, by a value or as missing. A slot is reported ready
exactly once (`SlotReadiness`). A node that has ended never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..program.errors import ConflictError, NotFoundError
from ..program.graph.graph import CheckedAppend, Graph, Slot, bodies_around
from ..program.graph.instances import BodyInstance, BodyTemplate
from ..program.ir import (
    Append,
    GenerateNode,
    GraphNode,
    Job,
    Json,
    Options,
    RoundEndNode,
    WaitNode,
)
from ..program.nodes.bodies import BodyRef, count_calls
from ..program.nodes.control.base import NodeWithBodies, TemplateNode
from ..program.status import Phase, Problem
from .node_state import WAIT_UNMET, Expansion, FlowCut, MissingValue, NodeState, Ready
from .slot_readiness import SlotReadiness
from .timed_jobs import JobInstance, TimedJobs, enclosing_jobs


class ProgramState:
    """The live state of a program."""

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
        self.missing_values: dict[str, MissingValue] = {}
        self.truncated: set[str] = set()
        """Variables whose text was cut off by `max_tokens`."""
        self.missed_deadlines: set[str] = set()
        """Outputs whose value was not durable at the deadline of their objective."""
        self.timed_jobs = TimedJobs(graph)
        self.timed_jobs.add(n for n in graph.nodes.values() if graph.body_of(n.id) is None)
        self.job_starts: dict[JobInstance, float] = {}
        """When the first node of a job started, for jobs with a timeout."""
        self.node_starts: dict[str, float] = {}
        """When a node started first, for nodes with a timeout that all attempts share."""
        self.append_ids: dict[str, tuple[str, ...]] = {}
        """The nodes of each append that was applied, by its request id."""
        self.nodes: dict[str, NodeState] = {}
        self.templates: dict[str, BodyTemplate] = {}
        """The bodies of control nodes, prepared for instances (`control_flow.bodies`)."""
        self.readiness = SlotReadiness(
            graph, self.nodes, self.values, self.missing_values, on_demand=options.start != "eager"
        )
        self.num_open_calls = 0
        """LLM calls in the graph that have not ended."""
        self.num_reserved_calls = 0
        """Calls of the first item or round of each map and loop inside a body that has not
        expanded yet. Other expansions may never happen, or hours later."""
        self._reservations: dict[str, int] = {}
        self.demanded: set[str] = set()
        """Variables that clients have requested under `start: demand`."""
        self._is_session = is_open
        self._num_live_nodes = 0
        self._add_nodes(graph.nodes)

    # --- growing --------------------------------------------------------------------------

    def append(
        self, append: Append, checked: CheckedAppend | None = None
    ) -> tuple[tuple[str, ...], list[Ready]]:
        """Add all nodes of an append to an open program, or none.

        Returns: the ids of all new nodes, including those in bodies, and the ready slots.

        Raises:
            ProgramError: if the nodes do not fit into the graph.
        """
        added = self.graph.append(append, checked)
        self.timed_jobs.add(append.nodes)
        if append.request_id is not None:
            self.append_ids[append.request_id] = tuple(node.id for node in append.nodes)
        ready: list[Ready] = []
        for variable, value in append.inputs.items():
            if variable in self.values:
                raise ConflictError("variable.committed", f"variable {variable} has a value")
            ready += self.commit(variable, value)
        self._add_nodes(added)
        if append.close:
            self.is_open = False
        if self.readiness.demanded_nodes is None:
            ready += self.readiness.report(added)
        else:
            for variable in append.objectives:  # its client waits for them
                ready += self.demand(variable)
            # A demanded variable may now have a producer, also an indirect one.
            ready += self.readiness.demand_added(added, self.demanded)
        return added, ready

    def start(self) -> list[Ready]:
        """Start the program. State that is restored before reports no slots."""
        return self.readiness.start()

    def grow(self, instances: Sequence[BodyInstance]) -> Expansion:
        """Add instances of bodies, and enter the bodies they belong to.

        Raises:
            ProgramError: `program.too_large` if the graph would be too large.
        """
        added = self.graph.add_instances(instances)
        new = {instance.node.id for instance in instances}
        for _, _, body in instances:
            if body is not None and body.control not in new:
                self.readiness.enter_new_body(body)
                self._release_reservation(body.control)
        self._add_nodes(added)
        if self.readiness.demanded_nodes is None:
            return Expansion(added, self.readiness.report(added))
        return Expansion(added, self.readiness.demand_nodes(added))

    def enter_body(self, body: BodyRef) -> list[Ready]:
        """Enter a body that is in the graph already."""
        return self.readiness.enter_body(body)

    def _add_nodes(self, nodes: Iterable[str]) -> None:
        ids = list(nodes)
        for node_id in ids:
            assert node_id not in self.nodes, node_id
            self.nodes[node_id] = NodeState(self.graph.nodes[node_id])
        self._num_live_nodes += len(ids)
        for node_id in ids:
            match self.graph.nodes[node_id]:
                case GenerateNode():
                    self.num_open_calls += 1
                case TemplateNode() as node if self.graph.body_of(node_id) is not None:
                    self._reservations[node_id] = num_calls = count_calls(node.body)
                    self.num_reserved_calls += num_calls
                case _:
                    pass
        self.readiness.add_nodes(ids)

    def _release_reservation(self, node_id: str) -> None:
        self.num_reserved_calls -= self._reservations.pop(node_id, 0)

    def demand(self, variable: str) -> list[Ready]:
        """Let the ancestors of a variable run under `start: demand`."""
        if self.readiness.demanded_nodes is None or variable in self.demanded:
            return []
        self.demanded.add(variable)
        producer = self.graph.get_producer(variable)
        return [] if producer is None else self.readiness.demand_nodes([producer.node])

    def mark_started(self, node_id: str, slot: int) -> None:
        """Mark a slot that started before a restart and continues from its decisions."""
        self.readiness.mark_started(node_id, slot)
        self.nodes[node_id].phase = "running"

    # --- resolving ------------------------------------------------------------------------

    def is_resolved(self, variable: str) -> bool:
        """Whether a variable has a value or is missing."""
        return variable in self.values or variable in self.missing_values

    def commit(self, variable: str, value: Json) -> list[Ready]:
        """Give a variable its only value."""
        assert not self.is_resolved(variable), variable
        self.values[variable] = value
        return self.readiness.variable_resolved(variable)

    def mark_missing(self, variable: str, missing: MissingValue) -> list[Ready]:
        """Record that a variable will never have a value."""
        assert not self.is_resolved(variable), variable
        self.missing_values[variable] = missing
        return self.readiness.variable_resolved(variable)

    # --- ending ---------------------------------------------------------------------------

    def finish_slot(self, node_id: str, slot: int, *, at: float) -> list[Ready]:
        """Finish a slot whose variables are committed. The last slot ends the node."""
        node_state = self.nodes[node_id]
        node_state.slots_done = slot + 1
        if node_state.slots_done < len(self.graph.slots[node_id]):
            return self.readiness.unblock(node_id, slot + 1)
        return self._end(node_state, "done", at)

    def end(self, node_id: str, phase: Phase, problem: Problem | None, *, at: float) -> list[Ready]:
        """End a node early; variables it has not written are missing. Safe to repeat."""
        node_state = self.nodes[node_id]
        if node_state.has_ended:
            return []
        node_state.problem = problem
        if (cut := _cut_of(self.nodes, node_state, phase, problem)) is not None:
            self._mark_cut(node_id, cut)
        ready = self._end(node_state, phase, at)
        problem = problem or Problem(code=f"node.{phase}", message=f"{node_id}: {phase}")
        missing = MissingValue(phase, problem)
        for slot in self.graph.slots[node_id]:
            for variable in slot.writes:
                if not self.is_resolved(variable):
                    ready += self.mark_missing(variable, missing)
        return ready

    def _end(self, node_state: NodeState, phase: Phase, at: float) -> list[Ready]:
        node_state.phase = phase
        node_state.finished_at = at
        self._num_live_nodes -= 1
        self.num_open_calls -= isinstance(node_state.node, GenerateNode)
        self._release_reservation(node_state.node.id)
        return self.readiness.node_ended(node_state.node.id)

    def _mark_cut(self, node_id: str, cut: FlowCut) -> None:
        """End the control flow of a job after a node, and after the nodes around it.

        The cut of a failure ends at the nearest node that takes failures. If that node has no
        handler and no item left, it fails, and its own failure is a new cut.
        """
        job = self.graph.nodes[node_id].job
        self.nodes[node_id].cut = cut
        for body in bodies_around(self.graph, node_id):
            control = self.graph.nodes[body.control]
            if control.job != job or (cut.reason == "failure" and _tolerates_failures(control)):
                return
            self.nodes[body.control].cut = cut

    def cut_before(self, node_id: str) -> Problem | None:
        """Return why a node never runs: a required `wait` before it ended without its values.

        A node of another job only follows the end of that `wait`, unless the job began after it.
        """
        node = self.graph.nodes[node_id]
        if isinstance(node, RoundEndNode):
            return None  # a loop ends after the round
        for other in node.after:
            if self.nodes[other].cut and self.is_within(node.job, self.graph.nodes[other].job):
                return Problem(code=WAIT_UNMET, message=f"{other} ended without its values")
        return None

    def missing_input(self, slot: Slot) -> MissingValue | None:
        """Return why a slot cannot run because of what it reads; None if nothing is missing.

        A failure is passed on unchanged, so the end of a chain reports the error at its beginning.
        A skipped or killed variable skips its readers.
        """
        missing = self.first_missing(slot.reads)
        if missing is not None and missing.phase in {"killed", "skipped"}:
            return MissingValue("skipped", missing.problem)
        return missing

    def first_missing(self, names: Iterable[str]) -> MissingValue | None:
        """Return the most significant missing value among names: a failure, if there is one."""
        missing = [
            self.missing_values[name] for name in sorted(names) if name in self.missing_values
        ]
        failed = (each for each in missing if each.phase == "failed")
        return next(failed, missing[0] if missing else None)

    def isolates(self, node_id: str) -> bool:
        """Whether a failure of a node affects only its readers instead of ending the program.

        By default, a session isolates the nodes outside of bodies and jobs, because they belong
        to independent requests. A failure in a body goes to the node around it.
        """
        node = self.graph.nodes[node_id]
        if isinstance(node, RoundEndNode):
            return False  # a failure at the end of a round fails the loop
        if node.on_error is not None:
            return node.on_error == "isolate"
        job = self.graph.jobs[node.job]
        is_independent = self._is_session and job == Job() and self.graph.body_of(node_id) is None
        return job.on_error == "isolate" or is_independent

    def is_within(self, job: str, outer: str) -> bool:
        """Whether a job is another one or below it. All jobs are below `main`."""
        return outer in enclosing_jobs(self.graph.jobs, job)

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have ended and no more can be added."""
        if self.is_open:
            return False
        demanded_nodes = self.readiness.demanded_nodes
        if demanded_nodes is None:
            return self._num_live_nodes == 0
        return all(map(self.is_resolved, self.graph.outputs)) and all(
            self.nodes[node_id].has_ended for node_id in demanded_nodes
        )

    # --- reading --------------------------------------------------------------------------

    def check_variable(self, variable: str) -> None:
        """Check that the program has a variable.

        Raises:
            NotFoundError: `variable.not_found`.
        """
        if variable not in self.graph.variables:
            raise NotFoundError(
                "variable.not_found", f"program {self.id} has no variable {variable}"
            )

    def variable_names(self) -> list[str]:
        """Return all variables, declared or produced, in the order of the program."""
        return list(self.graph.variables)

    def phase_of(self, variable: str) -> Phase:
        """Return the phase of a variable."""
        if variable in self.values:
            return "done"
        if variable in self.missing_values:
            return self.missing_values[variable].phase
        producer = self.graph.get_producer(variable)
        return "waiting" if producer is None else self.nodes[producer.node].phase


def check_same_append(program: str, nodes: Sequence[str], append: Append) -> None:
    """Check that an append has the nodes of an earlier one with the same request id.

    Raises:
        ConflictError: `idempotency.conflict`.
    """
    if list(nodes) != [node.id for node in append.nodes]:
        raise request_id_taken(program, append)


def request_id_taken(program: str, append: Append) -> ConflictError:
    """Return the error of an append whose request id belongs to another one."""
    return ConflictError(
        "idempotency.conflict",
        f"request_id {append.request_id} belongs to another append to program {program}: "
        "give each append an id of its own",
    )


def _cut_of(
    nodes: Mapping[str, NodeState], node_state: NodeState, phase: Phase, problem: Problem | None
) -> FlowCut | None:
    """Return why the nodes after an ended node never run; None if they may run."""
    node = node_state.node
    if problem is None:
        return None
    if problem.code == WAIT_UNMET:
        cuts = [cut for other in node.after if (cut := nodes[other].cut) is not None]
        is_failure = bool(cuts) and all(cut.reason == "failure" for cut in cuts)
        return cuts[0] if is_failure else FlowCut("absence", problem)
    if phase != "failed":
        return None
    if isinstance(node, WaitNode):
        return FlowCut("failure", problem) if node.required else None
    cause = None if problem.cause is None else nodes.get(problem.cause)
    if _tolerates_failures(node) and cause is not None:
        return cause.cut  # no handler took the failure, or no item succeeded
    return None


def _tolerates_failures(node: GraphNode) -> bool:
    return isinstance(node, NodeWithBodies) and node.tolerates_failures
