"""The interface between a program run and the executors of its node kinds.

`NodeExecutor` is the base class of the executors, one per node kind. `NodeContext` offers them the
operations that change their program: publish a value, complete a slot, fail a node, attach new
nodes, write an event.

Responsibility: dispatching ready slots, and the consequences of a value, an end or a failure.

Out of scope: node kinds (`node_registry` maps them to executors), the start and end of a program
(`ProgramRun`), engines and clients.

Invariants: a slot is dispatched at most once per attempt, and never after the end of the program.
A value or decision is in the outbox before anything that follows from it starts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET

from ..program.errors import ConureError, ExpressionError, RunError
from ..program.expressions.evaluate import input_expression
from ..program.expressions.value_schema import find_mismatch, mismatch_code
from ..program.graph.instances import BodyInstance
from ..program.ir import GraphNode, Json, Node
from ..program.nodes.bodies import BodyRef
from ..program.status import EventType, Phase, Problem
from ..store.journal import ValueRecord
from .calls.aborted_outputs import AbortedOutputs
from .calls.outputs import OutputResult
from .node_state import NODE_KILLED, MissingValue, NodeState, Ready
from .persistence.event_stream import EventStream
from .persistence.journaled_events import ExpansionHistory, RecoveredState
from .persistence.outbox import Outbox
from .program_state import ProgramState
from .program_watch import QUARANTINED, TurnLimitError, problem_of
from .quota import ProgramQuota
from .services import RuntimeServices
from .slot_work import SlotWork, SuspendedError
from .timers import Timers

logger = logging.getLogger(__name__)

STEPS_PER_SLOT, STEPS_PER_END, STEPS_PER_NEW_NODE = 60, 30, 20
"""Minimum number of steps of a turn for a dispatched slot, an ended node and a new node."""
BYTES_PER_STEP = 500
"""Bytes of an encoded value that count as one step of a turn."""
MAX_META_BYTES = 4_096
"""Maximum JSON of a node's `meta` that its events repeat."""
NODES_AT_ONCE = 32
"""New nodes that executors register at a time."""

N = TypeVar("N", bound=Node)
E = TypeVar("E")


class NodeExecutor(Generic[N]):
    """Runs the nodes of one kind in one program. Only `kind` and `run` must be defined."""

    kind: ClassVar[type[Node]]
    """The record of the nodes."""
    starts_running: ClassVar[bool] = True
    """Whether a node is `running` as soon as a slot is dispatched."""

    def __init__(self, context: NodeContext) -> None:
        self.context = context
        self.state = context.state

    def run(self, node: N, slot: int) -> None:
        """Run a ready slot. Expressions are evaluated by `context.work`.

        Raises:
            ConureError: if the node fails.
            SuspendedError: if a computation is long. The slot runs again when it has ended.
        """
        raise NotImplementedError

    def abandon(self, node_id: str) -> None:
        """Stop the current attempt of a node of this kind; safe to repeat."""

    def child_failed(self, node: N, body: BodyRef, problem: Problem) -> list[Ready]:
        """Handle the failure of a node in a body of `node`; the default fails `node`.

        Returns: slots that became ready.
        """
        self.context.fail_with(node.id, problem)
        return []

    # --- hooks, called for changes of the program -----------------------------------------

    def nodes_added(self, nodes: Sequence[str]) -> None:
        """Handle new nodes of any kind."""

    def nodes_announced(self, control: str, instances: Sequence[BodyInstance]) -> None:
        """Handle nodes that are added unless the node `control` ends first."""

    def node_ended(self, node_id: str) -> None:
        """Handle the end of a node of any kind."""

    def text_appended(self, variable: str) -> None:
        """Handle new text of a variable that a call is generating, one of `followed_texts`."""

    def restore(self, recovered: RecoveredState) -> None:
        """Restore what was journaled before a restart; called before the program starts."""

    def resume(self) -> None:
        """Continue interrupted work after a restart; called after the program has started."""

    def release(self) -> None:
        """Release all resources: the program is over, or the server stops."""

    # --- recovery -------------------------------------------------------------------------

    @classmethod
    def replay(cls, state: ProgramState, node: N, history: ExpansionHistory) -> None:
        """Repeat the expansions that follow from the committed decisions of a node."""

    @classmethod
    def absent_outputs(cls, state: ProgramState, node: N) -> Mapping[str, MissingValue]:
        """Return the outputs that have no value because the body that ran gave none."""
        return {}

    @classmethod
    def is_slot_complete(cls, state: ProgramState, node: N, slot: int) -> bool:
        """Whether a slot whose variables are all committed has nothing left to do."""
        return True


class NodeContext:
    """The operations of a program's nodes on their program."""

    def __init__(
        self,
        state: ProgramState,
        services: RuntimeServices,
        *,
        stop: Callable[[Phase, Problem], None],
        close: Callable[[], bool],
        complete: Callable[[], None],
        on_durable_end: Callable[[], None],
    ) -> None:
        self.state = state
        self.services = services
        self.events = EventStream(state.id)
        self.quota = ProgramQuota(services.quota_limits)
        self.outbox = Outbox(
            state.id, services.journal, self.events, self.quota, services.clock, on_durable_end
        )

        def has_reader() -> bool:
            return self.events.num_readers > 0 or self.outbox.has_waiters

        def miss_deadline(variable: str, deadline_s: float) -> None:
            if variable not in self.outbox.durable_variables:
                state.missed_deadlines.add(variable)
                self.emit("objective.missed", variable=variable, deadline_s=deadline_s)

        self.timers = Timers(
            state,
            services.clock,
            idle_s=services.idle_s,
            fail=self.fail,
            stop=stop,
            close=close,
            miss=miss_deadline,
            has_reader=has_reader,
            num_changes=lambda: self.events.num_changes,
        )
        self.aborted = AbortedOutputs()
        self.is_over = False
        self.executors: Mapping[type[Node], NodeExecutor[Any]] = {}
        self.started_before: AbstractSet[str] = frozenset()
        """Nodes that were running when the server stopped."""
        self.work = SlotWork(state.values, services.turns, lambda slot: self.advance([slot]))
        """The computations of slots."""
        self.stop_before_slot: dict[str, int] = {}
        """For each killed call that must still generate outputs: the slot before which it ends."""
        self.followed_texts: set[str] = set()
        """Variables whose text an executor follows while it is generated."""
        self._stop = stop
        self._complete = complete
        self._queue: deque[Ready] = deque()
        self._new_nodes: deque[str] = deque()
        """Nodes to register with the executors before the next slot is dispatched."""
        self.to_end: deque[tuple[str, Phase, Problem]] = deque()
        """Nodes to end before any other work: in bodies of ended nodes, or because of a kill."""
        self._is_busy = False
        """Whether `_work_off` runs, or is scheduled for a later turn."""
        self._hooks: dict[str, list[Callable[..., None]]] = {}
        self._short_metas: dict[str, bool] = {}
        """Whether events repeat the `meta` of a node, by node."""

    def executor(self, kind: type[E]) -> E:
        """Return the executor of a class."""
        return next(each for each in self.executors.values() if isinstance(each, kind))

    def executor_of(self, node: GraphNode) -> NodeExecutor[Any]:
        """Return the executor of a node."""
        return self.executors[type(node)]

    # --- dispatching ----------------------------------------------------------------------

    def advance(self, ready: Iterable[Ready]) -> None:
        """Dispatch slots until the turn ends, and the remaining slots in later turns.

        Slots that become ready meanwhile are added to the same queue, so a chain of ten thousand
        expressions needs no recursion.
        """
        self._queue.extend(ready)
        if not self._is_busy:
            self._is_busy = True
            self._work_off()

    def _work_off(self) -> None:
        """Process the queues for one turn, and schedule another turn for the rest.

        An error outside of a node's own work fails the program, which would otherwise never end.
        """
        has_more, problem = False, None
        try:
            with self.services.watch.turn(self.state.id):
                has_more = self._work_for_a_turn()
        except TurnLimitError as error:
            logger.error("program %s is quarantined: a turn took %s", self.state.id, error)
            problem = problem_of(QUARANTINED, f"a turn took {error}")
        except Exception:
            logger.exception("program %s failed with an internal error", self.state.id)
            message = "internal server error; see the server's log"
            problem = Problem(code="server.internal", message=message)
        except BaseException:
            self._is_busy = False
            raise
        if problem is not None:
            # Here, no error refers to the objects of the turn, which may fill the memory.
            self._is_busy = False
            if not self.is_over:
                self._stop("failed", problem)
            return
        if has_more:
            self.outbox.wait_turn(self.services.turns, self._work_off)
            return
        self._is_busy = False
        if not self.is_over and self.state.is_complete:
            self._complete()

    def _work_for_a_turn(self) -> bool:
        """Process the queues until they are empty or the turn ends; return whether work is left."""
        while not self.is_over:
            if self.services.turns.has_ended:
                return True
            if self.to_end:
                self._queue.extend(self.end_node(*self.to_end.popleft()))
            elif self._new_nodes:
                self._register_nodes()
            elif self._queue:
                self._dispatch(self._queue.popleft())
            else:
                return False
        return False

    def _dispatch(self, ready: Ready) -> None:
        node_id, slot = ready
        if not self.state.readiness.is_due(node_id, slot):
            return
        self.services.turns.spend(STEPS_PER_SLOT)
        self.work.begin(ready)
        node_state = self.state.nodes[node_id]
        node = node_state.node
        definition = self.state.graph.slots[node_id][slot]
        missing = self.state.missing_input(definition)
        try:
            if slot == 0 and node.after and (cut := self.state.cut_before(node_id)) is not None:
                self.advance(self.end_node(node_id, "skipped", cut))
                return
            has_condition = slot == 0 and node.when is not UNSET
            if has_condition and not self.work.evaluate(input_expression(node.when)):
                problem = Problem(code="node.when", message="`when` was false")
                self.advance(self.end_node(node_id, "skipped", problem))
                return
            if missing is not None and not definition.tolerates_missing:
                self.advance(self.end_node(node_id, *_end_of(missing)))
                return
            if node_state.started_at is None:
                self.start_node(node_state)
            executor = self.executor_of(node)
            if executor.starts_running:
                node_state.phase = "running"
            executor.run(node, slot)
        except SuspendedError:
            return  # `work` dispatches the slot again when the computation has ended
        except Exception as error:
            if isinstance(error, MemoryError) and self.state.id in self.services.watch.watched:
                raise TurnLimitError("too much memory") from error
            # The error fails this node. It must not reach the caller, which only made the slot
            # ready.
            self.fail_slot(node_id, slot, error)

    def start_node(self, node_state: NodeState) -> None:
        """Record the first start of a node in this server process, and start its timers."""
        node = node_state.node
        node_state.started_at = self.services.clock.now()
        node_state.attempt = max(node_state.attempt, 1)
        if node.id in self.started_before:
            node_state.attempt += 1
            why = "the server was started again"
            self.emit("node.restarted", node.id, why=why, attempt=node_state.attempt)
        is_new = node.id not in self.state.node_starts
        self.timers.start_node(node)
        is_timed = node.id in self.state.node_starts
        if is_new and is_timed and self.executor_of(node).starts_running:
            # Its timeout counts from here, also after a restart. No other event records the start.
            self.emit("node.started", node.id, attempt=node_state.attempt)

    # --- values and completion ------------------------------------------------------------

    def publish(
        self, variable: str, value: Json, node_id: str | None, result: OutputResult | None = None
    ) -> list[Ready]:
        """Commit the value of a variable in memory, and add it to the outbox.

        Args:
            variable: the variable.
            value: its value.
            node_id: the producer of the value; None for an input.
            result: the result of the LLM call that generated the value.

        Returns: slots that became ready. The caller passes them to `advance` or `complete_slot`
            after it has updated the state of the producer.

        Raises:
            RunError: `variable.type` or `variable.schema` if the value is not as declared,
                `quota.live_bytes`, `quota.journal_bytes` or `quota.events` if it is too large.
        """
        state = self.state
        declared = state.graph.variables[variable]
        mismatch = find_mismatch(value, declared)
        if mismatch is not None:
            code = mismatch_code(value, declared)
            raise RunError(code, f"variable {variable} {mismatch}")
        encoded = msgspec.json.encode(value)
        self.services.turns.spend(len(encoded) // BYTES_PER_STEP)
        self.quota.check_journal(2 * len(encoded))  # a value and its event
        self.quota.hold(len(encoded))
        record = ValueRecord(
            program=state.id,
            variable=variable,
            value=encoded,
            text=None if result is None else result.text,
            token_ids=None if result is None else result.token_ids,
            tokenizer_hash=None if result is None else self.services.model.tokenizer_hash,
            epoch=0 if result is None else result.epoch,
            attempt=1 if node_id is None else state.nodes[node_id].attempt,
        )
        self.outbox.add(record)
        marks = {}
        if result is not None and result.is_truncated:
            state.truncated.add(variable)
            marks["truncated"] = True
        self.emit("variable.committed", node_id, variable=variable, value=value, **marks)
        self.outbox.mark_durable_on_commit([variable])
        return state.commit(variable, value)

    def mark_missing(self, variable: str, missing: MissingValue) -> list[Ready]:
        """Record that a variable will have no value; return the slots that became ready."""
        self.outbox.mark_durable_on_commit([variable])
        return self.state.mark_missing(variable, missing)

    def append_text(self, variable: str, text: str, logprobs: Sequence[Json] = ()) -> None:
        """Append streamed text, and the log probabilities of its tokens, to a variable."""
        self.events.append_text(variable, text, logprobs)
        if text and variable in self.followed_texts:
            self._notify("text_appended", variable)

    def complete_slot(self, node_id: str, slot: int, ready: list[Ready]) -> None:
        """Complete a slot, then dispatch `ready` and the slots that become ready by its end.

        If the node has already ended (for example, a `kill` node ran when the value of the node
        was published), only dispatches `ready`.
        """
        node_state = self.state.nodes[node_id]
        if not node_state.has_ended:
            ready += self.state.finish_slot(node_id, slot, at=self.services.clock.now())
            limit = self.stop_before_slot.get(node_id)
            if node_state.has_ended:
                self._node_ended(node_id)
                usage = _usage_fields(node_state)
                self.emit("node.finished", node_id, attempt=node_state.attempt, **usage)
            elif limit is not None and node_state.slots_done >= limit:
                message = "the outputs after this one were killed"
                ready += self.end_node(
                    node_id, "killed", Problem(code=NODE_KILLED, message=message)
                )
        self.advance(ready)

    def attach(self, node_id: str, nodes: tuple[str, ...]) -> None:
        """Announce instances that were added to the graph for a node."""
        self.nodes_added(nodes)
        self.emit("nodes.appended", node_id, nodes=list(nodes))
        self.services.call_quota.count(self.state)

    def nodes_added(self, nodes: Sequence[str]) -> None:
        """Notify all executors of new nodes, before the next slot is dispatched."""
        self._new_nodes.extend(nodes)

    def _register_nodes(self) -> None:
        count = min(len(self._new_nodes), NODES_AT_ONCE)
        nodes = [self._new_nodes.popleft() for _ in range(count)]
        budget = self.state.graph.definitions.budget
        before = budget.left
        self._notify("nodes_added", nodes)
        self.services.turns.spend(count * STEPS_PER_NEW_NODE + before - budget.left)

    def announce(self, control: str, instances: Sequence[BodyInstance]) -> None:
        """Announce nodes that are added unless the node `control` ends first."""
        self._notify("nodes_announced", control, instances)

    # --- failures -------------------------------------------------------------------------

    def fail(self, node_id: str, error: ConureError) -> None:
        """Fail a node. Unless the failure is isolated, fail the node around it or the program."""
        self.fail_with(node_id, Problem(code=error.code, message=error.message))

    def fail_with(self, node_id: str, problem: Problem) -> None:
        """Fail a node as `fail` does, with a problem that may name its cause."""
        if self.is_over or self.state.nodes[node_id].has_ended:
            return
        is_isolated = self.state.isolates(node_id)
        ready = self.end_node(node_id, "failed", problem)
        if not is_isolated:
            body = self.state.graph.body_of(node_id)
            if body is None:
                self._stop("failed", problem)
                return
            control = self.state.nodes[body.control]
            if not control.has_ended:
                problem = prefix_with_node(problem, node_id)
                ready += self.executor_of(control.node).child_failed(control.node, body, problem)
        self.advance(ready)

    def fail_slot(
        self, node_id: str, slot: int, error: Exception, *, is_rendering: bool = False
    ) -> None:
        """End a node whose slot raised an error: fail it, or skip it for a missing input.

        Args:
            node_id: The node.
            slot: The slot whose start or work raised the error.
            error: The cause.
            is_rendering: Whether the error was raised while a prompt was rendered. A `KeyError`
                then means a missing input.
        """
        missing = self.state.missing_input(self.state.graph.slots[node_id][slot])
        reads_missing = (is_rendering and isinstance(error, KeyError)) or (
            isinstance(error, ExpressionError) and error.code == "variable.absent"
        )
        if missing is not None and reads_missing:
            self.advance(self.end_node(node_id, *_end_of(missing)))
        elif isinstance(error, ConureError):
            self.fail(node_id, error)
        else:
            logger.error("node %s failed with an internal error", node_id, exc_info=error)
            message = f"internal server error in node {node_id}; see the server's log"
            self.fail(node_id, RunError("server.internal", message))

    def retry_or_fail(self, node_id: str, error: ConureError) -> None:
        """Run a failed node again if its `retries` allow it, otherwise fail it.

        A call that has committed an output is not retried.
        """
        node_state = self.state.nodes[node_id]
        self.executor_of(node_state.node).abandon(node_id)
        if self.is_over or node_state.has_ended:
            return
        if node_state.num_retries < node_state.node.retries and not node_state.slots_done:
            self.restart_node(node_state, error.code)
            self.advance([Ready(node_id, 0)])
            return
        self.fail(node_id, error)

    def restart_node(self, node_state: NodeState, why: str) -> None:
        """Count a retry of a node and write its event."""
        node_state.num_retries += 1
        node_state.attempt += 1
        node_id = node_state.node.id
        self.emit("node.restarted", node_id, why=why, attempt=node_state.attempt, retry=True)

    def end_node(self, node_id: str, phase: Phase, problem: Problem) -> list[Ready]:
        """End a node early, with all nodes in its bodies; return the slots that became ready.

        Nodes in large bodies end in later turns, but before any other slot is dispatched.
        """
        node_state = self.state.nodes[node_id]
        if node_state.has_ended:
            return []
        ready = self.state.end(node_id, phase, problem, at=self.services.clock.now())
        self._node_ended(node_id)
        event_types: dict[Phase, EventType] = {"failed": "node.failed", "skipped": "node.skipped"}
        self.emit(
            event_types.get(phase, "node.killed"),
            node_id,
            code=problem.code,
            message=problem.message,
            **({"cause": problem.cause} if problem.cause else {}),
            **_usage_fields(node_state),
        )
        for slot in self.state.graph.slots[node_id]:
            missing = (name for name in slot.writes if name in self.state.missing_values)
            self.outbox.mark_durable_on_commit(missing)
        turns = self.services.turns
        turns.spend(STEPS_PER_END)
        if self.is_over:
            return ready  # the end of a program ends all its nodes
        # The nodes in the bodies did not fail themselves.
        inner_phase: Phase = "killed" if phase == "failed" else phase
        for children in self.state.graph.body_nodes(node_id).values():
            if turns.has_ended:
                self.to_end.extend((child, inner_phase, problem) for child in children)
            else:
                for child in children:
                    ready += self.end_node(child, inner_phase, problem)
        return ready

    def _node_ended(self, node_id: str) -> None:
        self.timers.cancel(node_id)
        self._notify("node_ended", node_id)
        self.services.call_quota.count(self.state)

    def _notify(self, hook: str, *args: object) -> None:
        """Call a hook of all executors whose class overrides it."""
        hooks = self._hooks.get(hook)
        if hooks is None:
            default = getattr(NodeExecutor, hook)
            overriding = (e for e in self.executors.values() if getattr(type(e), hook) != default)
            hooks = self._hooks[hook] = [getattr(executor, hook) for executor in overriding]
        for notify in hooks:
            notify(*args)

    # --- events ---------------------------------------------------------------------------

    def emit(self, event_type: EventType, node: str | None = None, **data: Any) -> None:
        """Write an event of a node, or of the whole program."""
        if node is not None:
            definition = self.state.graph.nodes[node]
            data = {"node": node, "job": definition.job, **data}
            if definition.meta is not None and _is_short(definition, self._short_metas):
                data["meta"] = definition.meta
        self.outbox.emit(event_type, **data)


def _is_short(node: GraphNode, known: dict[str, bool]) -> bool:
    """Return whether events repeat the `meta` of a node; `known` has the earlier results."""
    if node.id not in known:
        known[node.id] = len(msgspec.json.encode(node.meta)) <= MAX_META_BYTES
    return known[node.id]


def prefix_with_node(problem: Problem | None, node_id: str) -> Problem:
    """Return the failure of a node as the cause of another one, with the node's name."""
    assert problem is not None
    is_named = node_id in problem.message
    message = problem.message if is_named else f"{node_id}: {problem.message}"
    return Problem(code=problem.code, message=message, cause=node_id)


def break_cycles(context: NodeContext) -> None:
    """Drop the references back to a context whose program has ended.

    The memory of the program is then freed by reference counting, before a garbage collection.
    """
    context.executors, context._hooks = {}, {}
    context._stop = context._complete = _ignore
    context.timers.break_cycles()
    context.work.break_cycles()


def _ignore(*_: object) -> None:
    """Do nothing: the program has ended."""


def _end_of(missing: MissingValue) -> tuple[Phase, Problem]:
    """Return the phase and the problem with which a node ends that reads a missing value."""
    return ("failed" if missing.phase == "failed" else "skipped"), missing.problem


def _usage_fields(node_state: NodeState) -> dict[str, Any]:
    """Return the usage of an ended node as event fields. A restarted server reads them from the
    journal to write the receipt and to show the node.
    """
    if node_state.started_at is None:
        return {}
    fields: dict[str, Any] = {"engine": node_state.engine, "started_at": node_state.started_at}
    if node_state.prefix_break:
        fields["prefix_break"] = True
    if node_state.constraint_relaxed:
        fields["constraint_relaxed"] = True
    if not node_state.has_usage:
        return fields
    usage = {name: n for name, n in msgspec.to_builtins(node_state.usage).items() if n}
    return fields | ({"usage": usage} if usage else {})
