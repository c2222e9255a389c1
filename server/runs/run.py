"""One accepted program at work: slots are dispatched, values committed, events written.

Joins the state machine (`execution`) to the world: calls go to engines, client steps to
the client, functions to threads, records to the journal, and events, once the disk has
them, to the feed. Nothing here polls: a value that is committed names the slots that it
made ready, and these are dispatched in the same turn of the loop.

Two clocks of truth. *Inside*, a value stands the moment it is committed in memory, and a
successor call may start on it. *Outside*, it stands when the journal has it: readers, client
steps and functions wait for that (design section 9). Everything of one program goes through
one outbox, in order, so that whatever is on disk is preceded by what it depends on.

Kept true: every waiter is answered, by a value, an error or the end of the program; after
the end nothing is dispatched, and no call, timer or context of the program is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from ..engines.engine import Engine
from ..engines.scheduler import Scheduler
from ..program.errors import ConureError, ExpressionError, RunError
from ..program.expression import evaluate, input_expression
from ..program.graph import Graph
from ..program.ir import AnyNode, Append, Expr, Generate, Json, Objective
from ..program.ir import Call as CallNode
from ..program.ir import Client as ClientNode
from ..program.objective import Performance, get_perf_objective
from ..program.rope import prefix_constant, prefix_hash
from ..program.status import EventType, Phase, Problem, Receipt
from ..program.symbols import Definitions
from ..prompts.model import Model
from ..store.journal import AppendRecord, EndRecord, Journal, ProgramRecord, ValueRecord
from .call import Call, Outcome, release
from .encoder import Encoder, Work
from .execution import Absence, Execution, NodeState, Ready
from .feed import Feed
from .outbox import Outbox
from .receipt import receipt
from .recovery import Past
from .report import ending
from .sharing import Sharing
from .steps import ClientStep, FunctionStep

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Engines that may die under one call before it is taken to be the cause."""
LEASE_S = 10.0
"""How long an attached program lives without a reader."""
DEADLINE, LEASE = "the deadline", "the lease"
"""Timers of a whole program, by names that no node can have."""


class World(Protocol):
    """What a program needs of the server around it."""

    scheduler: Scheduler
    encoder: Encoder
    functions: Mapping[str, Callable[..., Any]]
    function_threads: ThreadPoolExecutor

    @property
    def journal(self) -> Journal:
        """Where everything is written."""
        ...

    @property
    def model(self) -> Model:
        """The model of the engines."""
        ...

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if it is alive."""
        ...

    def run_ended(self, run: Run) -> None:
        """The end of the program is on disk."""
        ...


class Run:
    """A program between its acceptance and its end. Also the host of its calls."""

    def __init__(self, execution: Execution, world: World, *, number: int) -> None:
        self.execution = execution
        self.feed = Feed(execution.id)
        self.scheduler = world.scheduler
        self.is_over = False
        self.receipt: Receipt | None = None
        self.outbox = Outbox(execution.id, world.journal, self.feed, lambda: world.run_ended(self))
        self._world = world
        self._number = number
        self._sharing = Sharing()
        self._calls: dict[str, Call] = {}
        self._steps: dict[str, ClientStep | FunctionStep] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._performance: dict[str, Performance] = {}
        self._hashes: dict[str, tuple[bytes, ...]] = {}
        self._work: deque[Ready] = deque()
        self._is_working = False
        self._lease_at = time.monotonic()
        self._past = Past()

    # --- life -----------------------------------------------------------------------------

    def accept(self, record: ProgramRecord) -> asyncio.Future[None]:
        """Put the program on disk together with its first event; `start` comes after."""
        self.emit("program.accepted", outputs=list(self.execution.graph.outputs))
        self.outbox.settle(self.execution.values)
        return self.outbox.accept(record)

    def resume(self, past: Past) -> None:
        """Go on after a restart: what was on disk is restored in `execution` already."""
        self._past = past
        # Whatever was before this life has a lower number, committed values included.
        self.feed.first_seq = self._world.journal.last_seq + 1
        self.outbox.settled |= self.execution.values.keys() | self.execution.absences.keys()
        self.start()

    def start(self) -> None:
        """Dispatch what is ready; the program is on disk."""
        if self.is_over:
            return  # the server went away while the disk took it: it starts with the next one
        self.execution.phase = "running"
        self._expect(self.execution.graph.nodes)
        loop = asyncio.get_running_loop()
        options = self.execution.options
        if options.deadline_s is not None:
            left_s = self.execution.created_at + options.deadline_s - time.time()
            self._timers[DEADLINE] = loop.call_later(max(left_s, 0), self._deadline)
        for name, job in self.execution.graph.jobs.items():
            if job.timeout_s is not None:
                self._timers[f"job {name}"] = loop.call_later(
                    job.timeout_s, self._job_timeout, name
                )
        if not options.detach:
            self._check_lease()
        self._advance(self.execution.start())

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
        self._expect(added)
        if added:
            self.emit("nodes.appended", nodes=list(added))
        self._advance(ready)

    def want(self, variable: str, objective: Objective | None) -> None:
        """Somebody asks for this variable: it may start now, and be more urgent than it was."""
        if self.is_over:
            return
        if objective is not None and self.execution.graph.demand(variable, objective):
            self._performance = get_perf_objective(self.execution.graph)
        self._advance(self.execution.want(variable))

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
        self._advance(ready)

    def stop(self, phase: Phase, problem: Problem) -> None:
        """End the program before its time; safe when it has ended."""
        if self.is_over:
            return
        self.is_over = True
        self._release()
        execution = self.execution
        for call in list(self._calls.values()):
            call.abandon()
        for step in list(self._steps.values()):
            step.abandon()
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
        for call in self._calls.values():
            call.abandon()
        for step in self._steps.values():
            step.abandon()
        self.outbox.abandon()

    def engine_lost(self, engine: str) -> None:
        """An engine died: its calls of this program wait again, a few times."""
        self._sharing.lose_engine(engine)
        for node_id, call in list(self._calls.items()):
            if not call.is_on(engine) or not call.engine_lost():
                continue
            state = self.execution.nodes[node_id]
            state.num_deaths += 1
            if state.num_deaths >= MAX_DEATHS:
                problem = f"{state.num_deaths} engines died while node {node_id} ran on them"
                self._fail(node_id, RunError("engine.lost", problem))
                continue
            state.attempt += 1
            self.emit(
                "node.restarted",
                node_id,
                engine=engine,
                why="its engine died",
                attempt=state.attempt,
            )

    def _expect(self, nodes: Iterable[str]) -> None:
        """Read off the graph what new calls will share and how urgent they are."""
        graph = self.execution.graph
        self._performance = get_perf_objective(graph)
        calls = [
            node_id
            for node_id in nodes
            if isinstance(graph.nodes[node_id], Generate)
            and not self.execution.nodes[node_id].has_ended
        ]
        if len(calls) == 1 and not self.execution.is_open and len(self._hashes) == 0:
            return  # nobody to share with
        for node_id in calls:
            node = graph.nodes[node_id]
            assert isinstance(node, Generate)
            hashes = prefix_hash(node, _definitions(node, graph))
            self._hashes[node_id] = hashes
            self._sharing.expect(node_id, hashes[: _num_shareable(node, hashes)])

    # --- dispatching ----------------------------------------------------------------------

    def _advance(self, ready: list[Ready]) -> None:
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
        if state.has_ended:
            return
        node = state.node
        absence = execution.absence_for(execution.graph.slots[node_id][slot])
        try:
            if slot == 0 and not self._is_wanted(node):
                self._skip(node_id, Problem(code="node.when", message="`when` was false"))
                return
            if absence is not None and not _may_tolerate_absence(node):
                self._absent(node_id, absence)
                return
            if state.started_at is None:
                self._first_start(state)
            self._begin(node_id, slot)
        except ExpressionError as error:
            self._expression_failed(node_id, error, absence)
        except ConureError as error:
            self._fail(node_id, error)

    def _first_start(self, state: NodeState) -> None:
        """A node runs for the first time in this life of the server."""
        node = state.node
        state.started_at = time.time()
        state.attempt = max(state.attempt, 1)
        if node.id in self._past.started:
            state.attempt += 1
            why = "the server was started again"
            self.emit("node.restarted", node.id, why=why, attempt=state.attempt)
        # A client step counts the time of every question by itself, and may ask again.
        if node.timeout_s is not None and not isinstance(node, ClientNode):
            self._timers[node.id] = asyncio.get_running_loop().call_later(
                node.timeout_s, self._node_timeout, node.id
            )

    def _is_wanted(self, node: AnyNode) -> bool:
        if node.when is UNSET:
            return True
        return bool(evaluate(input_expression(node.when), self.execution.values))

    def _begin(self, node_id: str, slot: int) -> None:
        state = self.execution.nodes[node_id]
        values = self.execution.values
        match state.node:
            case Generate():
                self._prepare(node_id, slot)
            case Expr(expr=expr, output=output):
                state.phase = "running"
                ready = self._commit(output, evaluate(expr, values), node=node_id)
                self._slot_over(node_id, slot, ready)
            case ClientNode() as node:
                state.phase = "running"
                args = {name: evaluate(expr, values) for name, expr in node.args.items()}
                step = ClientStep(self, node, state.attempt, args)
                self._steps[node_id] = step
                step.ask(asked_already=step.request_id in self._past.asked)
            case CallNode() as node:
                state.phase = "running"
                args = {name: evaluate(expr, values) for name, expr in node.args.items()}
                function = self._world.functions.get(node.function)
                if function is None:
                    message = f"no function {node.function} is registered on this server any more"
                    raise RunError("call.unknown_function", message)
                threads = self._world.function_threads
                self._steps[node_id] = FunctionStep(self, node, function, args, threads)

    def _prepare(self, node_id: str, slot: int) -> None:
        call = self._calls.get(node_id)
        if call is None:
            call = self._calls[node_id] = self._new_call(node_id)
        reads = self.execution.graph.slots[node_id][slot].reads
        values = {
            name: self.execution.values[name] for name in reads if name in self.execution.values
        }
        size = sum(len(v) if isinstance(v, str) else 256 for v in values.values())

        def done(rendered: Any, encoded: Any) -> None:
            if call.is_over:
                return
            try:
                call.enqueue(slot, rendered, encoded)
            except ConureError as error:
                self._fail(node_id, error)
                return
            if slot == 0:
                self.emit("node.queued", node_id, attempt=call.state.attempt)

        def broken(error: Exception) -> None:
            if call.is_over:
                return
            absence = self.execution.absence_for(self.execution.graph.slots[node_id][slot])
            if absence is not None and isinstance(error, KeyError):
                self._absent(node_id, absence)
            elif isinstance(error, ExpressionError):
                self._expression_failed(node_id, error, absence)
            elif isinstance(error, ConureError):
                self._fail(node_id, error)
            else:
                logger.error("encoding node %s failed", node_id, exc_info=error)
                problem = f"the prompt of node {node_id} could not be encoded"
                self._fail(node_id, RunError("server.internal", problem))

        self._world.encoder.submit(
            Work(call, slot, values, _num_static_chars(call.node) + size, done, broken)
        )

    def _new_call(self, node_id: str) -> Call:
        execution = self.execution
        state = execution.nodes[node_id]
        node = state.node
        assert isinstance(node, Generate)
        hashes = self._hashes.get(node_id, ())
        performance = self._performance.get(node_id)
        is_latency = performance is None or performance.kind == "latency"
        call = Call(
            execution.id,
            state,
            self._world.model,
            self._sharing,
            self,
            hashes=hashes,
            constants=prefix_constant(node, _definitions(node, execution.graph)),
            rank=_rank(node.priority, is_latency, self._number),
            group=None if performance is None else performance.group,
            salt=execution.tenant,
            keeps_all=execution.is_open or not self._hashes,
            traces=execution.options.trace,
        )
        if state.slots_done:
            call.restore(self._past.outputs, execution.values, state.slots_done)
        return call

    # --- what calls report (call.Host) ----------------------------------------------------

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if it is alive."""
        return self._world.engine(name)

    def slot_started(self, call: Call, slot: int) -> None:
        """A call runs on an engine now."""
        state = call.state
        target = call.targets[slot]
        self.feed.begin_text(target.variable, state.node.id, state.node.job, state.attempt)
        self.emit(
            "node.started", state.node.id, engine=state.engine, why=state.why, attempt=state.attempt
        )

    def slot_grew(self, call: Call, slot: int, text: str) -> None:
        """More text of an output."""
        self.feed.grow(call.targets[slot].variable, text)

    def slot_done(self, call: Call, slot: int, outcome: Outcome) -> None:
        """An output is whole."""
        node_id = call.node.id
        self.feed.complete(outcome.variable, outcome.text)
        ready = self._commit(outcome.variable, outcome.value, node=node_id, outcome=outcome)
        self._slot_over(node_id, slot, ready)

    def call_failed(self, call: Call, error: ConureError) -> None:
        """A call ended without its output: try again if its author allows, else fail."""
        self.step_failed(call.node.id, error)

    # --- what steps report ----------------------------------------------------------------

    def step_done(self, node_id: str, value: Json) -> None:
        """A client step or a function has its value."""
        step = self._steps.pop(node_id, None)
        if step is None or self.is_over:
            return
        ready = [] if step.output is None else self._commit(step.output, value, node=node_id)
        self._slot_over(node_id, 0, ready)

    def step_failed(self, node_id: str, error: ConureError) -> None:
        """A step of any kind failed: run it again if `retries` allows, else fail its node."""
        state = self.execution.nodes[node_id]
        self._steps.pop(node_id, None)
        call = self._calls.pop(node_id, None)
        if call is not None:
            call.abandon()
        if self.is_over or state.has_ended:
            return
        is_partial = state.slots_done > 0
        if state.num_retries < state.node.retries and not is_partial:
            state.num_retries += 1
            state.attempt += 1
            self.emit("node.restarted", node_id, why=error.code, attempt=state.attempt, retry=True)
            self._advance([Ready(node_id, 0)])
            return
        self._fail(node_id, error)

    @property
    def program_id(self) -> str:
        """The program's id."""
        return self.execution.id

    def client_step(self, node_id: str) -> ClientStep | None:
        """The client step of this node, while it waits for its client."""
        step = self._steps.get(node_id)
        return step if isinstance(step, ClientStep) else None

    # --- committing -----------------------------------------------------------------------

    def commit(self, variable: str, value: Json) -> None:
        """The client gives an input its value."""
        self.execution.graph.give(variable)
        self._advance(self._commit(variable, value, node=None))

    def _commit(
        self, variable: str, value: Json, *, node: str | None, outcome: Outcome | None = None
    ) -> list[Ready]:
        """Give a variable its value, in memory now and on disk with the next batch.

        Its readers are returned and not started: its node ends first.
        """
        execution = self.execution
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

    def _slot_over(self, node_id: str, slot: int, ready: list[Ready]) -> None:
        now = time.time()
        ready += self.execution.finish_slot(node_id, slot, at=now)
        state = self.execution.nodes[node_id]
        if state.has_ended:
            self._forget(node_id)
            self.emit("node.finished", node_id, engine=state.engine, attempt=state.attempt)
        self._advance(ready)

    def _forget(self, node_id: str) -> None:
        if (call := self._calls.pop(node_id, None)) is not None:
            call.abandon()
        if (step := self._steps.pop(node_id, None)) is not None:
            step.abandon()
        if (timer := self._timers.pop(node_id, None)) is not None:
            timer.cancel()

    # --- failing --------------------------------------------------------------------------

    def _fail(self, node_id: str, error: ConureError) -> None:
        problem = Problem(code=error.code, message=error.message)
        isolates = self.execution.isolates(node_id)
        ready = self._end_node(node_id, "failed", problem, time.time())
        if isolates:
            self._advance(ready)
        else:
            self.stop("failed", problem)

    def _skip(self, node_id: str, problem: Problem) -> None:
        self._advance(self._end_node(node_id, "skipped", problem, time.time()))

    def _absent(self, node_id: str, absence: Absence) -> None:
        if absence.phase == "failed":
            self._advance(self._end_node(node_id, "failed", absence.problem, time.time()))
        else:
            self._skip(node_id, absence.problem)

    def _expression_failed(
        self, node_id: str, error: ExpressionError, absence: Absence | None
    ) -> None:
        if error.code == "variable.absent" and absence is not None:
            self._absent(node_id, absence)
        else:
            self._fail(node_id, error)

    def _end_node(self, node_id: str, phase: Phase, problem: Problem, at: float) -> list[Ready]:
        if self.execution.nodes[node_id].has_ended:
            return []
        ready = self.execution.end(node_id, phase, problem, at=at)
        for held in self._sharing.arrive(node_id):
            state = self.execution.nodes[node_id]
            release(held, self, state, self._world.model.limits.block_size)
        self._forget(node_id)
        kinds: dict[Phase, EventType] = {"failed": "node.failed", "skipped": "node.skipped"}
        self.emit(
            kinds.get(phase, "node.killed"), node_id, code=problem.code, message=problem.message
        )
        for slot in self.execution.graph.slots[node_id]:
            self.outbox.settle(v for v in slot.writes if v in self.execution.absences)
        return ready

    def _node_timeout(self, node_id: str) -> None:
        self._timers.pop(node_id, None)
        timeout_s = self.execution.nodes[node_id].node.timeout_s
        self._fail(node_id, RunError("node.timeout", f"node {node_id} took over {timeout_s:g} s"))

    def _job_timeout(self, job: str) -> None:
        for node_id, state in self.execution.nodes.items():
            if self.is_over:
                return
            if not state.has_ended and self.execution.is_within(state.node.job, job):
                self._fail(node_id, RunError("job.timeout", f"job {job} ran out of time"))

    def _deadline(self) -> None:
        deadline_s = self.execution.options.deadline_s
        message = f"the program did not end within {deadline_s:g} s"
        self.stop("deadline_exceeded", Problem(code="program.deadline_exceeded", message=message))

    def _check_lease(self) -> None:
        """An attached program lives as long as somebody reads it."""
        if self.is_over:
            return
        now = time.monotonic()
        if self.feed.num_readers or self.outbox.has_waiters:
            self._lease_at = now
        if now - self._lease_at >= LEASE_S:
            message = f"nobody read the attached program for {LEASE_S:g} s"
            self.stop("cancelled", Problem(code="program.lease_lost", message=message))
            return
        loop = asyncio.get_running_loop()
        self._timers[LEASE] = loop.call_later(LEASE_S / 5, self._check_lease)

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
        self.receipt = receipt(execution, blocks_held=self._blocks_held())
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
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        states = list(self.execution.nodes.values())
        for held in self._sharing.release_all():
            release(held, self, states[0], self._world.model.limits.block_size)

    def _blocks_held(self) -> int:
        return sum(call.num_blocks for call in self._calls.values()) + self._sharing.num_held

    def emit(self, event_type: EventType, node: str | None = None, **data: Any) -> None:
        """Write an event, of a node or of the whole program."""
        if node is not None:
            definition = self.execution.graph.nodes[node]
            data = {"node": node, "job": definition.job, **data}
            if definition.meta is not None:
                data["meta"] = definition.meta
        self.outbox.emit(event_type, **data)


def _rank(priority: int, is_latency: bool, number: int) -> float:
    """Lower runs first: by priority, then latency before throughput, then program by program.

    Older programs first: work on what has been started ends sooner than a little of everything.
    """
    return -priority * 2.0**44 + (0.0 if is_latency else 2.0**42) + float(number)


def _definitions(node: Generate, graph: Graph) -> Definitions | None:
    """What `expr` nodes compute, for hashes; a splice stays closed, so that the boundaries of a
    hash are those of the rendered prompt.
    """
    has_splice = isinstance(node.messages, list) and any(m.splice for m in node.messages)
    return None if has_splice else graph.definitions


def _num_shareable(node: Generate, hashes: tuple[bytes, ...]) -> int:
    """Boundaries before the first output: what the call's first fill consists of."""
    if isinstance(node.prompt, list):
        outputs = (i for i, segment in enumerate(node.prompt) if isinstance(segment.output, str))
        return next(outputs, len(hashes))
    return len(hashes) - 1


def _num_static_chars(node: Generate) -> int:
    if isinstance(node.prompt, list):
        return sum(len(s.text) for s in node.prompt if isinstance(s.text, str))
    total = 0
    for message in node.messages or []:
        if isinstance(message.content, str):
            total += len(message.content)
        elif isinstance(message.content, list):
            total += sum(len(s.text) for s in message.content if isinstance(s.text, str))
    return total


def _may_tolerate_absence(node: Any) -> bool:
    """Only `first` goes on when a variable has no value; look for it before giving up."""
    return b'"first"' in msgspec.json.encode(node)
