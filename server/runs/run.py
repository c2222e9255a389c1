"""One accepted program at work: slots are dispatched, values committed, events written.

Joins the state machine (`execution`) to the world: calls go to engines, client steps to
the client, functions to threads, records to the journal, and events, once the disk has
them, to the feed. Nothing here polls: a value that is committed names the slots that it
made ready, and these are dispatched in the same turn of the loop.

Two clocks of truth. *Inside*, a value stands the moment it is committed in memory, and a
successor call may start on it. *Outside*, it stands when the journal has it: readers, client
steps and functions wait for that. Everything of one program goes through
one outbox, in order, so that whatever is on disk is preceded by what it depends on.

Kept true: every waiter is answered, by a value, an error or the end of the program; after
the end nothing is dispatched, and no call, timer or context of the program is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from msgspec import UNSET

from ..engines.engine import Engine
from ..program.errors import ConureError, ExpressionError, RunError
from ..program.expression import evaluate, input_expression
from ..program.instances import Instance
from ..program.ir import Append, Expr, Generate, Json, Objective, Placed, Round
from ..program.ir import Call as CallNode
from ..program.ir import Client as ClientNode
from ..program.status import EventType, Phase, Problem, Receipt
from ..program.value import has_type, kind_of
from ..prompts.prompt import Rendered
from ..prompts.tokenizer import Encoded
from ..store.journal import AppendRecord, EndRecord, ProgramRecord, ValueRecord
from .bodies import Bodies
from .call import Call
from .calls import Calls
from .clocks import Clocks
from .execution import Absence, Execution, NodeState, Ready
from .feed import Feed
from .flow import Flow, is_tolerant
from .outbox import Outbox
from .output import Outcome
from .receipt import receipt
from .recovery import Past
from .report import ending
from .room import Guest
from .steps import ClientStep, Steps
from .world import World
from .yields import Yields

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Engines that may die under one call before it is taken to be the cause."""


class Run:
    """A program between its acceptance and its end. Also the host of its calls."""

    def __init__(self, execution: Execution, world: World, *, ended: Callable[[], None]) -> None:
        self.execution = execution
        self.feed = Feed(execution.id)
        self.scheduler = world.scheduler
        self.is_over = False
        self.receipt: Receipt | None = None
        self.outbox = Outbox(execution.id, world.journal, self.feed, ended)
        self._world = world
        self._calls = Calls(execution, world, self)
        self._steps = Steps(self, world.functions, world.function_threads)
        self._flow = Flow(execution, self, Bodies(execution))
        self._yields = Yields(execution, self.feed)
        self._clocks = Clocks(execution, self, feed=self.feed, outbox=self.outbox)
        self._work: deque[Ready] = deque()
        self._is_working = False
        self._started_before: AbstractSet[str] = frozenset()
        """Nodes that ran in an earlier life of the server, and did not end."""

    # --- life -----------------------------------------------------------------------------

    def accept(self, record: ProgramRecord) -> asyncio.Future[None]:
        """Put the program on disk together with its first event; all else of it follows."""
        self.emit("program.accepted", outputs=list(self.execution.graph.outputs))
        self.outbox.settle(self.execution.values)
        return self.outbox.accept(record)

    def resume(self, past: Past) -> None:
        """Go on after a restart: what was on disk is restored in `execution` already."""
        self._started_before = past.started
        self._steps.asked = past.asked
        self._calls.past = past.outputs
        self._flow.resume()
        # Whatever was before this life has a lower number, committed values included.
        self.feed.first_seq = self._world.journal.last_seq + 1
        self.outbox.settled |= self.execution.values.keys() | self.execution.absences.keys()
        self.start()
        self._flow.go_on()

    def start(self) -> None:
        """Dispatch what is ready; the program is on disk, or on its way there."""
        self.execution.phase = "running"
        self._calls.expect(self.execution.graph.nodes)
        self._yields.expect(self.execution.graph.nodes)
        self._clocks.start()
        self.advance(self.execution.start())

    def append(self, append: Append, body: bytes) -> None:
        """Add nodes to the open program; they are on disk after the outbox's next barrier.

        Raises:
            ProgramError: if they do not fit.
            ConflictError: if an input has a value already.
        """
        known = set(self.execution.values)
        added, ready = self.execution.append(append)
        self.outbox.add(AppendRecord(program=self.execution.id, body=body))
        self.outbox.settle(name for name in self.execution.values if name not in known)
        self._calls.expect(added)
        self._yields.expect(added)
        if added:
            self.emit("nodes.appended", nodes=list(added))
        self.advance(ready)

    def want(self, variable: str, objective: Objective | None) -> None:
        """Somebody asks for this variable: it may start now, and be more urgent than it was."""
        if self.is_over:
            return
        self.touch()
        if objective is not None and self.execution.graph.demand(variable, objective):
            self._calls.weigh()
        self.advance(self.execution.want(variable))

    def touch(self) -> None:
        """Somebody asked about the program: an attached one lives on for a while."""
        self._clocks.touch()

    def cancel(self) -> None:
        """The client wants the program no more."""
        problem = Problem(code="program.cancelled", message="the program was cancelled")
        self.stop("cancelled", problem)

    def lose(self, variable: str, problem: Problem) -> None:
        """An input will never come: its readers fail with the client's own reason."""
        self.execution.graph.give(variable)
        ready = self.execution.lose(variable, Absence("failed", problem))
        self.emit("variable.failed", variable=variable, code=problem.code, message=problem.message)
        self.outbox.settle([variable])
        self.advance(ready)

    def stop(self, phase: Phase, problem: Problem) -> None:
        """End the program before its time; safe when it has ended."""
        if self.is_over:
            return
        self.is_over = True
        self._release()
        execution = self.execution
        now = time.time()
        node_phase: Phase = "killed" if phase == "failed" else phase
        for node_id, state in execution.nodes.items():
            if not state.has_ended:
                self._end_node(node_id, node_phase, problem, now)
        execution.phase = phase
        execution.problem = problem
        self._finish(now)

    def park(self) -> None:
        """The server goes away: let go of everything and leave the program as it is on disk."""
        self.is_over = True
        self.feed.drain()
        self._release()
        self.outbox.abandon()

    def engine_lost(self, engine: str) -> None:
        """An engine died: its calls of this program wait again, a few times."""
        for node_id in self._calls.engine_lost(engine):
            state = self.execution.nodes[node_id]
            state.num_deaths += 1
            if state.num_deaths >= MAX_DEATHS:
                problem = f"{state.num_deaths} engines died while node {node_id} ran on them"
                self.fail(node_id, RunError("engine.lost", problem))
                continue
            state.attempt += 1
            self.emit(
                "node.restarted",
                node_id,
                engine=engine,
                why="its engine died",
                attempt=state.attempt,
            )

    # --- dispatching ----------------------------------------------------------------------

    def advance(self, ready: list[Ready]) -> None:
        """Dispatch slots; what they make ready at once joins the same queue, so that a chain of
        ten thousand expressions needs no stack.
        """
        self._work.extend(ready)
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._work and not self.is_over:
                self._dispatch(*self._work.popleft())
        finally:
            self._is_working = False
        if not self.is_over and self.execution.is_complete:
            self._complete()

    def _dispatch(self, node_id: str, slot: int) -> None:
        execution = self.execution
        state = execution.nodes[node_id]
        if not execution.is_due(node_id, slot):
            return
        node = state.node
        absence = execution.absence_for(execution.graph.slots[node_id][slot])
        try:
            if slot == 0 and not self._is_wanted(node):
                self._skip(node_id, Problem(code="node.when", message="`when` was false"))
                return
            if absence is not None and not is_tolerant(node, slot):
                self._absent(node_id, absence)
                return
            if state.started_at is None:
                self._first_start(state)
            self._begin(node_id, slot)
        except ExpressionError as error:
            self._expression_failed(node_id, error, absence)
        except ConureError as error:
            self.fail(node_id, error)
        except Exception:
            # Whoever committed what made this slot ready has nothing to do with it.
            logger.exception("node %s could not be started", node_id)
            message = f"the server made a mistake in node {node_id}"
            self.fail(node_id, RunError("server.internal", message))

    def _first_start(self, state: NodeState) -> None:
        """A node runs for the first time in this life of the server."""
        node = state.node
        state.started_at = time.time()
        state.attempt = max(state.attempt, 1)
        if node.id in self._started_before:
            state.attempt += 1
            why = "the server was started again"
            self.emit("node.restarted", node.id, why=why, attempt=state.attempt)
        self._clocks.watch(node)

    def _is_wanted(self, node: Placed) -> bool:
        if node.when is UNSET:
            return True
        return bool(evaluate(input_expression(node.when), self.execution.values))

    def _begin(self, node_id: str, slot: int) -> None:
        state = self.execution.nodes[node_id]
        values = self.execution.values
        match state.node:
            case Generate():
                self._calls.prepare(node_id, slot)
            case Expr(expr=expr, output=output):
                state.phase = "running"
                ready = self._commit(output, evaluate(expr, values), node=node_id)
                self.slot_over(node_id, slot, ready)
            case (ClientNode() | CallNode()) as node:
                state.phase = "running"
                args = {name: evaluate(expr, values) for name, expr in node.args.items()}
                self._steps.start(node, state.attempt, args)
            case node:
                self._flow.run(node, slot)

    # --- what calls report (calls.CallHost) -----------------------------------------------

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if it is alive."""
        return self._world.engine(name)

    def prompt_ready(self, call: Call, slot: int, rendered: Rendered, encoded: Encoded) -> None:
        """A prompt is encoded: its call may wait for an engine."""
        node_id = call.node.id
        try:
            call.enqueue(slot, rendered, encoded)
        except ConureError as error:
            self.fail(node_id, error)
            return
        if slot == 0:
            self.emit("node.queued", node_id, attempt=call.state.attempt)

    def prompt_broken(self, call: Call, slot: int, error: Exception) -> None:
        """A prompt cannot be made of the values that are there."""
        node_id = call.node.id
        absence = self.execution.absence_for(self.execution.graph.slots[node_id][slot])
        if absence is not None and isinstance(error, KeyError):
            self._absent(node_id, absence)
        elif isinstance(error, ExpressionError):
            self._expression_failed(node_id, error, absence)
        elif isinstance(error, ConureError):
            self.fail(node_id, error)
        else:
            logger.error("encoding node %s failed", node_id, exc_info=error)
            problem = f"the prompt of node {node_id} could not be encoded"
            self.fail(node_id, RunError("server.internal", problem))

    def slot_started(self, call: Call, slot: int) -> None:
        """A call runs on an engine now."""
        state = call.state
        target = call.targets[slot]
        self._calls.writes(call, slot)
        self.feed.begin_text(target.variable, state.node.id, state.node.job, state.attempt)
        self.emit(
            "node.started", state.node.id, engine=state.engine, why=state.why, attempt=state.attempt
        )

    def slot_grew(self, call: Call, slot: int, text: str) -> None:
        """More text of an output."""
        variable = call.targets[slot].variable
        self.feed.grow(variable, text)
        self._yields.grew(variable)
        self._calls.grew(call, slot, text)

    def slot_done(self, call: Call, slot: int, outcome: Outcome) -> None:
        """An output is whole."""
        node_id = call.node.id
        self.feed.complete(outcome.variable, outcome.told)
        try:
            ready = self._commit(outcome.variable, outcome.value, node=node_id, outcome=outcome)
        except ConureError as error:
            self.call_failed(call, error)
            return
        self.slot_over(node_id, slot, ready)
        if not self.is_over:
            self._calls.wrote(call, slot)

    def call_failed(self, call: Call, error: ConureError) -> None:
        """A call ended without its output: try again if its author allows, else fail."""
        self.step_failed(call.node.id, error)

    # --- what steps report ----------------------------------------------------------------

    def step_done(self, node_id: str, value: Json) -> None:
        """A client step or a function has its value."""
        step = self._steps.pop(node_id)
        if step is None or self.is_over:
            return
        try:
            ready = [] if step.output is None else self._commit(step.output, value, node=node_id)
        except ConureError as error:
            self.step_failed(node_id, error)
            return
        self.slot_over(node_id, 0, ready)

    def step_failed(self, node_id: str, error: ConureError) -> None:
        """A step of any kind failed: run it again if `retries` allows, else fail its node."""
        state = self.execution.nodes[node_id]
        self._steps.pop(node_id)
        self._calls.drop(node_id)
        if self.is_over or state.has_ended:
            return
        is_partial = state.slots_done > 0
        if state.num_retries < state.node.retries and not is_partial:
            state.num_retries += 1
            state.attempt += 1
            self.emit("node.restarted", node_id, why=error.code, attempt=state.attempt, retry=True)
            self.advance([Ready(node_id, 0)])
            return
        self.fail(node_id, error)

    @property
    def program_id(self) -> str:
        """The program's id."""
        return self.execution.id

    def client_step(self, node_id: str) -> ClientStep | None:
        """The client step of this node, while it waits for its client."""
        return self._steps.asked_of_client(node_id)

    # --- committing -----------------------------------------------------------------------

    def commit(self, variable: str, value: Json) -> None:
        """The client gives an input its value."""
        self.execution.graph.give(variable)
        self.advance(self._commit(variable, value, node=None))

    def _commit(
        self, variable: str, value: Json, *, node: str | None, outcome: Outcome | None = None
    ) -> list[Ready]:
        """Give a variable its value, in memory now and on disk with the next batch.

        Its readers are returned and not started: its node ends first.

        Raises:
            RunError: `variable.type` if it is declared to be something else.
        """
        execution = self.execution
        declared = execution.graph.variables[variable].type
        if not has_type(value, declared):
            message = f"variable {variable} is declared as {declared}, not as {kind_of(value)}"
            raise RunError("variable.type", message)
        attempt = execution.nodes[node].attempt if node is not None else 1
        record = ValueRecord(
            program=execution.id,
            variable=variable,
            value=msgspec.json.encode(value),
            text=None if outcome is None else outcome.text,
            token_ids=None if outcome is None else outcome.token_ids,
            tokenizer_hash=None if outcome is None else self._world.model.tokenizer_hash,
            epoch=0 if outcome is None else outcome.epoch,
            attempt=attempt,
        )
        self.outbox.add(record)
        self.emit("variable.committed", node, variable=variable, value=value)
        self.outbox.settle([variable])
        return execution.commit(variable, value)

    def slot_over(self, node_id: str, slot: int, ready: list[Ready]) -> None:
        """A slot has done its work; `ready` is dispatched with what follows.

        A node may have ended by its own work: a kill that hit the node around it.
        """
        now = time.time()
        state = self.execution.nodes[node_id]
        if state.has_ended:
            self.advance(ready)
            return
        ready += self.execution.finish_slot(node_id, slot, at=now)
        if state.has_ended:
            self._forget(node_id)
            self.emit("node.finished", node_id, attempt=state.attempt, **_account(state))
        elif state.slots_done >= self._flow.doomed.get(node_id, state.slots_done + 1):
            problem = Problem(code="node.killed", message="what follows in it was killed before")
            ready += self._end_node(node_id, "killed", problem, now)
        self.advance(ready)

    def _forget(self, node_id: str) -> None:
        self.feed.hide(node_id)
        self._calls.end(node_id)
        self._steps.drop(node_id)
        self._clocks.forget(node_id)
        self._flow.ended(node_id)
        self._world.room.count(self.execution)

    # --- failing --------------------------------------------------------------------------

    def fail(self, node_id: str, error: ConureError) -> None:
        """A node fails, and the node around it or the program with it unless that is isolated."""
        problem = Problem(code=error.code, message=error.message)
        isolates = self.execution.isolates(node_id)
        if self.execution.nodes[node_id].has_ended:
            return
        ready = self._end_node(node_id, "failed", problem, time.time())
        place = self.execution.graph.place(node_id)
        if isolates:
            self.advance(ready)
        elif place is None:
            self.stop("failed", problem)
        else:
            self.advance(ready + self._flow.failed_inside(place, node_id, problem))

    def _skip(self, node_id: str, problem: Problem) -> None:
        self.advance(self._end_node(node_id, "skipped", problem, time.time()))

    def _absent(self, node_id: str, absence: Absence) -> None:
        if absence.phase == "failed" and isinstance(self.execution.graph.nodes[node_id], Round):
            # What its loop carries on failed elsewhere, and so the loop cannot go on.
            self.fail(node_id, RunError(absence.problem.code, absence.problem.message))
        elif absence.phase == "failed":
            self.advance(self._end_node(node_id, "failed", absence.problem, time.time()))
        else:
            self._skip(node_id, absence.problem)

    def _expression_failed(
        self, node_id: str, error: ExpressionError, absence: Absence | None
    ) -> None:
        if error.code == "variable.absent" and absence is not None:
            self._absent(node_id, absence)
        else:
            self.fail(node_id, error)

    def _end_node(self, node_id: str, phase: Phase, problem: Problem, at: float) -> list[Ready]:
        if self.execution.nodes[node_id].has_ended:
            return []
        ready = self.execution.end(node_id, phase, problem, at=at)
        self._forget(node_id)
        kinds: dict[Phase, EventType] = {"failed": "node.failed", "skipped": "node.skipped"}
        self.emit(
            kinds.get(phase, "node.killed"),
            node_id,
            code=problem.code,
            message=problem.message,
            **_account(self.execution.nodes[node_id]),
        )
        for slot in self.execution.graph.slots[node_id]:
            self.outbox.settle(v for v in slot.writes if v in self.execution.absences)
        # What is in its bodies has lost its reason: nobody failed there, nobody was waited for.
        inner: Phase = "killed" if phase == "failed" else phase
        for child in self.execution.graph.parts(node_id).values():
            for child_id in child:
                ready += self._end_node(child_id, inner, problem, at)
        return ready

    # --- what deciding nodes need (flow.FlowHost) -------------------------------------------

    def write(self, variable: str, value: Json, node_id: str) -> list[Ready]:
        """Give a variable its value; returns what is ready by it."""
        return self._commit(variable, value, node=node_id)

    def lose_output(self, variable: str, absence: Absence) -> list[Ready]:
        """A variable of a node that goes on will have no value."""
        self.outbox.settle([variable])
        return self.execution.lose(variable, absence)

    def end_node(self, node_id: str, phase: Phase, problem: Problem) -> list[Ready]:
        """End a node and all that is in its bodies; returns what is ready by it."""
        return self._end_node(node_id, phase, problem, time.time())

    def foresee(self, node_id: str, instances: list[Instance]) -> None:
        """What comes into the graph for this node unless it ends before."""
        self._calls.foresee(node_id, instances)

    def ask_room(self, guest: Guest) -> None:
        """Let items of a map come as the server has room for their calls."""
        self._world.room.ask(guest)

    def grown(self, node_id: str, nodes: tuple[str, ...]) -> None:
        """Instances came into the graph for this node."""
        self._calls.expect(nodes)
        self._yields.expect(nodes)
        self.emit("nodes.appended", node_id, nodes=list(nodes))
        self._world.room.count(self.execution)

    # --- ending ---------------------------------------------------------------------------

    def _complete(self) -> None:
        execution = self.execution
        self.is_over = True
        failed = [
            absence.problem
            for output in execution.graph.outputs
            if (absence := execution.absences.get(output)) and absence.phase == "failed"
        ]
        execution.phase = "failed" if failed else "done"
        execution.problem = failed[0] if failed else None
        self._finish(time.time())

    def _finish(self, now: float) -> None:
        execution = self.execution
        execution.finished_at = now
        self._release()
        self.receipt = receipt(execution, blocks_held=self._calls.num_held)
        told = msgspec.to_builtins(self.receipt)
        self.emit("program.finished", status=execution.phase, receipt=told)
        problem = execution.problem
        self.outbox.add(
            EndRecord(
                program=execution.id,
                status=execution.phase,
                finished_at=now,
                receipt=msgspec.json.encode(self.receipt),
                error=None if problem is None else msgspec.json.encode(problem),
                nodes=msgspec.json.encode(ending(execution)),
            )
        )
        self.outbox.end()

    def _release(self) -> None:
        self._clocks.stop()
        self._calls.abandon()
        self._steps.abandon()

    def emit(self, event_type: EventType, node: str | None = None, **data: Any) -> None:
        """Write an event, of a node or of the whole program."""
        if node is not None:
            definition = self.execution.graph.nodes[node]
            data = {"node": node, "job": definition.job, **data}
            if definition.meta is not None:
                data["meta"] = definition.meta
        self.outbox.emit(event_type, **data)


def _account(state: NodeState) -> dict[str, Any]:
    """What a node that ends has cost, for the receipt of a later life of the server."""
    if state.started_at is None:
        return {}
    told = {name: number for name, number in msgspec.to_builtins(state.usage).items() if number}
    account = {"engine": state.engine, "started_at": state.started_at}
    return account | ({"usage": told} if told else {})
