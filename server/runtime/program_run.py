"""The run of one accepted program, from acceptance to its end.

Connects the program's state to the server: node executors run its slots (`NodeContext`), records
go to the journal, and events go to readers once they are durable. Nothing polls: a committed value
names the slots that it made ready, and they are dispatched at once, or in later turns if there are
many.

Inside the server, a value exists as soon as it is committed in memory, and a consumer may start.
Outside, it exists once the journal has it: readers, client steps and functions wait for that. All
records of a program go through one outbox in order, so a durable record never lacks a predecessor.

Invariants: every waiter is answered by a value, an error or the end of the program. After the end
nothing is dispatched, and no call, timer or context of the program remains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from ..program.content import encoded_size
from ..program.errors import ConureError, RunError
from ..program.expressions.budget import MAX_STEPS
from ..program.graph.graph import CheckedAppend, check_append
from ..program.ir import Append, Json, Objective
from ..program.status import Phase, Problem, QuotaUse, Receipt
from ..store.journal import AppendRecord, EndRecord, ProgramRecord
from .calls.priority_table import PriorityTable
from .calls.program_calls import ProgramCalls
from .calls.suspects import is_cause
from .node_context import NodeContext, break_cycles
from .node_registry import node_executors
from .node_state import MissingValue, NodeState
from .persistence.journaled_events import RecoveredState
from .program_state import ProgramState
from .reporting.receipt import make_receipt
from .reporting.single_requests import ServerSpeed
from .reporting.status_parts import end_snapshot
from .services import RuntimeServices
from .steps.client_step import ClientStepExecutor

BYTES_PER_NODE = 4_096
"""Memory that a node uses, roughly."""
MAX_NODES_INLINE = 256
"""Nodes of a program whose calls are ranked at its start, and whose receipt is made and calls are
counted at its end, on the event loop."""


class ProgramRun:
    """A program between its acceptance and its end."""

    def __init__(
        self,
        state: ProgramState,
        services: RuntimeServices,
        *,
        on_durable_end: Callable[[], None],
    ) -> None:
        self.state = state
        self.receipt: Receipt | None = None
        self.context = NodeContext(
            state,
            services,
            stop=self.stop,
            close=self.close_idle,
            complete=self._complete,
            on_durable_end=lambda: _report_end(self),
        )
        self._on_durable_end = on_durable_end
        self.events = self.context.events
        self.outbox = self.context.outbox
        self._services = services
        self._finishing: asyncio.Task[None] | None = None
        self._timers = self.context.timers
        executors = {kind: executor(self.context) for kind, executor in node_executors().items()}
        self.context.executors = executors
        self._calls = self.context.executor(ProgramCalls)
        self.context.quota.live_bytes = sum(map(encoded_size, state.values.values()))

    @property
    def num_bytes(self) -> int:
        """Rough memory of the program: the bytes of its values, and 4 KiB per node."""
        return self.context.quota.live_bytes + len(self.state.nodes) * BYTES_PER_NODE

    @property
    def quotas(self) -> dict[str, QuotaUse]:
        """What the program has used of its quotas."""
        steps = max(0, MAX_STEPS - self.context.work.budget.left)
        return self.context.quota.usage(num_nodes=len(self.state.nodes), steps=steps)

    @property
    def is_over(self) -> bool:
        """Whether the program has ended or was suspended."""
        return self.context.is_over

    # --- start ----------------------------------------------------------------------------

    def accept(self, record: ProgramRecord) -> asyncio.Future[None]:
        """Write the program and its first event to the journal; later records follow them."""
        self.context.emit("program.accepted", outputs=list(self.state.graph.outputs))
        self.outbox.mark_durable_on_commit(self.state.values)
        return self.outbox.accept(record)

    def start(self, priorities: PriorityTable | None = None) -> None:
        """Dispatch the ready slots of a program that is durable or on its way to the journal.

        `priorities`: those of its calls, if they are known.
        """
        if priorities is not None:
            self._calls.priorities.preset(priorities)
        self.state.phase = "running"
        self.context.nodes_added(list(self.state.graph.nodes))
        self._timers.start()
        self.context.advance(self.state.start())

    def resume(self, recovered: RecoveredState) -> None:
        """Continue after a restart; `state` is restored already."""
        self.context.started_before = recovered.started
        for executor in self.context.executors.values():
            executor.restore(recovered)
        # All events of earlier server processes have a lower number.
        self.events.first_seq = self._services.journal.last_seq + 1
        self.outbox.durable_variables |= self.state.values.keys() | self.state.missing_values.keys()
        if recovered.stop is not None:
            self.stop(*recovered.stop)
            return
        _restart_nodes(self.context)
        self.start()
        for executor in self.context.executors.values():
            executor.resume()

    # --- requests -------------------------------------------------------------------------

    def append(self, append: Append, body: bytes, checked: CheckedAppend) -> None:
        """Add nodes to the open program. They are durable after the outbox's next barrier.

        Raises:
            ProgramError: if they do not fit.
            ConflictError: if an input already has a value.
            RunError: `quota.live_bytes` or `quota.journal_bytes` if they are too large.
        """
        self.context.quota.check_journal(len(body))
        if append.inputs:
            self.context.quota.hold(len(msgspec.json.encode(append.inputs)))
        self._services.watch.begin(self.state.id)
        try:
            self._append(append, body, checked)
        finally:
            self._services.watch.end()

    def _append(self, append: Append, body: bytes, checked: CheckedAppend) -> None:
        added, ready = self.state.append(append, checked)
        self.outbox.add(AppendRecord(program=self.state.id, body=body))
        self.outbox.mark_durable_on_commit(append.inputs)
        self.context.nodes_added(added)
        self._timers.start_objectives()
        if added:
            self.context.emit("nodes.appended", nodes=list(added))
        self.context.advance(ready)

    def close_idle(self) -> bool:
        """Close an open program whose nodes have all ended; return whether that ended it."""
        if self.state.is_open and all(each.has_ended for each in self.state.nodes.values()):
            close = Append(close=True)
            checked = check_append(self.state.graph, close)
            self.append(close, b'{"close":true}', checked)
        return self.is_over

    def demand(self, variable: str, objective: Objective | None) -> None:
        """Let the producers of a requested variable run, with the priority of an objective."""
        if self.is_over:
            return
        self._timers.renew_leases()
        graph, is_open = self.state.graph, not self.state.is_resolved(variable)
        if objective is not None and is_open and graph.tighten_objective(variable, objective):
            self._calls.objective_tightened(variable)
            self._timers.start_objectives()
        self.context.advance(self.state.demand(variable))

    def renew_lease(self) -> None:
        """Restart the leases of the program: a client has sent a request for it."""
        self._timers.renew_leases()

    def commit_input(self, variable: str, value: Json) -> None:
        """Commit an input that a client sent."""
        ready = self.context.publish(variable, value, None)
        self.state.graph.mark_provided(variable)
        self.context.advance(ready)

    def fail_input(self, variable: str, problem: Problem) -> None:
        """Record that an input will never arrive. Its readers fail with the client's error."""
        self.state.graph.mark_provided(variable)
        ready = self.state.mark_missing(variable, MissingValue("failed", problem))
        self.context.emit(
            "variable.failed", variable=variable, code=problem.code, message=problem.message
        )
        self.outbox.mark_durable_on_commit([variable])
        self.context.advance(ready)

    @property
    def client_steps(self) -> ClientStepExecutor:
        """The client steps that wait for their client."""
        return self.context.executor(ClientStepExecutor)

    def engine_lost(self, engine: str) -> list[NodeState]:
        """Withdraw the calls of an engine that died, and return their nodes."""
        nodes = [self.state.nodes[node_id] for node_id in self._calls.engine_lost(engine)]
        for node_state in nodes:
            node_state.num_deaths += 1
        return nodes

    def retry_call(self, node_state: NodeState, engine: str, others: list[int]) -> None:
        """Queue a withdrawn call again, or fail it as the cause of the death.

        Args:
            node_state: its node.
            engine: the engine that died.
            others: for each other call that was on the engine, how many engines died under it.
        """
        node_id = node_state.node.id
        if self.context.is_over or node_state.has_ended:
            return  # the failure of an earlier node ended it
        if is_cause(node_state.num_deaths, others):
            message = f"{node_state.num_deaths} engines died while node {node_id} ran on them"
            self.context.fail(node_id, RunError("engine.lost", message))
            return
        node_state.attempt += 1
        self._calls.requeue(node_id)
        self.context.emit(
            "node.restarted",
            node_id,
            engine=engine,
            why="its engine died",
            attempt=node_state.attempt,
        )

    # --- end ------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop the program for the client."""
        problem = Problem(code="program.cancelled", message="the program was cancelled")
        self.stop("cancelled", problem)

    def stop(self, phase: Phase, problem: Problem) -> None:
        """End the program early; safe when it has ended."""
        if self.is_over:
            return
        self.context.is_over = True
        self._release()
        self._end_nodes(iter(list(self.state.nodes)), phase, problem)

    def _end_nodes(self, nodes: Iterator[str], phase: Phase, problem: Problem) -> None:
        """End nodes until the turn ends, and the others in later turns; then end the program."""
        turns = self._services.turns
        node_phase: Phase = "killed" if phase == "failed" else phase
        for node_id in nodes:
            self.context.end_node(node_id, node_phase, problem)
            if turns.has_ended:
                self.outbox.wait_turn(turns, lambda: self._end_nodes(nodes, phase, problem))
                return
        self.state.phase = phase
        self.state.problem = problem
        self._finish()

    def suspend(self, reason: ConureError | None = None) -> None:
        """Release everything: the program was not accepted or cannot be resumed.

        Args:
            reason: the error of the requests that wait; None: the server stops, and the journal
                still has the program.
        """
        self.context.is_over = True
        self.context.aborted.drop_callback()
        if self._finishing is not None:
            self._finishing.cancel()
        if reason is None:
            self.events.drain()
        else:
            self.events.close()
        self._release()
        self.outbox.abandon(reason)
        _break_cycles(self)

    def _complete(self) -> None:
        state = self.state
        self.context.is_over = True
        missing = (state.missing_values.get(output) for output in state.graph.outputs)
        failures = [each.problem for each in missing if each and each.phase == "failed"]
        state.phase = "failed" if failures else "done"
        state.problem = failures[0] if failures else None
        self._finish()

    def _finish(self) -> None:
        state = self.state
        state.finished_at = max(self._services.clock.now(), state.created_at)
        self._release()
        self.context.aborted.when_settled(lambda: _write_end_of(self))

    def _write_end(self, receipt: Receipt, record: EndRecord) -> None:
        self.receipt = receipt
        fields = msgspec.to_builtins(receipt)
        problem = self.state.problem
        error = {} if problem is None else {"code": problem.code, "message": problem.message}
        self.context.emit("program.finished", status=self.state.phase, receipt=fields, **error)
        self.outbox.add(record)
        self.outbox.end()

    def _release(self) -> None:
        self.context.work.stop()
        self._timers.stop()
        for executor in self.context.executors.values():
            executor.release()


def _restart_nodes(context: NodeContext) -> None:
    """Start the nodes that wait between two of their slots, and their timers, after a restart.

    The other nodes start when a slot is dispatched.
    """
    for node_state in context.state.nodes.values():
        has_started = node_state.phase == "running" or node_state.slots_done > 0
        if has_started and not node_state.has_ended:
            node_state.phase = "running"
            context.start_node(node_state)


def _report_end(run: ProgramRun) -> None:
    """Report the durable end of a program."""
    run._on_durable_end()
    _break_cycles(run)


def _break_cycles(run: ProgramRun) -> None:
    """Let the memory of a program be free without a garbage collection."""
    run._on_durable_end = _ignore
    break_cycles(run.context)


def _ignore() -> None:
    """Do nothing: the end was reported."""


def _write_end_of(run: ProgramRun) -> None:
    """Make and write the receipt of a program that changes no more."""
    describe = partial(
        _describe_end, run.state, run._calls.num_contexts, run._services.server_speed()
    )
    if len(run.state.nodes) <= MAX_NODES_INLINE:
        run._write_end(*describe())
        return

    async def finish() -> None:
        run._write_end(*await run._services.turns.in_thread(describe))

    run._finishing = asyncio.get_running_loop().create_task(finish())


def _describe_end(
    state: ProgramState, blocks_held: int, speed: ServerSpeed
) -> tuple[Receipt, EndRecord]:
    """Return the receipt and the last record of a program that has ended, and changes no more."""
    receipt = make_receipt(state, blocks_held=blocks_held, speed=speed)
    assert state.finished_at is not None
    record = EndRecord(
        program=state.id,
        status=state.phase,
        finished_at=state.finished_at,
        receipt=msgspec.json.encode(receipt),
        error=None if state.problem is None else msgspec.json.encode(state.problem),
        nodes=end_snapshot(state),
    )
    return receipt, record
