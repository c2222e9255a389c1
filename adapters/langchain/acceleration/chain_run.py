"""One run of an accelerated chain: starts planned calls and answers the calls of the chain.

Adds the parts that are specific to LangChain to `speculation`: plans of chains, values that the
chain computes, chunks and results, and statistics. Threads and coroutines of any event loop may use
one run.

Out of scope: Runnables; how calls are sent and matched.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from langchain_core.outputs import ChatGenerationChunk, ChatResult

from conure.server.program.errors import ConureError
from conure.server.program.ir import Json

from ...client import Client
from ...client.owned_generator import OwnedGenerator
from ...speculation.answer_stream import AnswerStream
from ...speculation.planned_call import PlannedCall
from ...speculation.registry import CallRecord, PlanFailedError, PlannedCallRegistry
from ...speculation.run import SpeculativeRun, TimeLimit
from ..chat.answer_chunks import CompleteAnswer, chunks_of, result_of
from .plan import AwaitedValue, ChainPlan
from .run_stats import PlanMiss, RunStats


class ChainRun:
    """Matches the calls of one run with its plans, counts and answers them."""

    def __init__(
        self,
        client: Client | None,
        name: str,
        *,
        is_streamed: bool,
        session: str | None = None,
    ) -> None:
        """Create a run; nothing is sent yet.

        Args:
            client: client of the server of the planned calls. None: no call is planned, and the
                run uses the client of the first model that is called.
            name: name of the chain.
            is_streamed: the chain is streamed. Otherwise texts are not requested from the server
                before a call streams.
            session: session of its programs.
        """
        self.stats = RunStats()
        self.is_over = False
        """The chain has ended.

        Calls of tasks and threads that outlive the chain belong to no run.
        """
        self._has_failed = False
        self._has_plans = client is not None
        """Whether plans have calls. Those of a run without a client have none, even after a model
        has bound the run."""
        self._name = name
        self._is_streamed = is_streamed
        self._session = session
        self._binding_lock = threading.Lock()
        """Allocate nothing under this lock. The garbage collector may close a stream, which takes
        the lock of a registry."""
        self._bound_run: SpeculativeRun | None = None
        if client is not None:
            self.bind_to(client)
        self._awaited: dict[str, AwaitedValue] = {}
        """By variable."""
        self._unencodable: dict[str, str] = {}
        """Why a value cannot be sent, by place: the Python expression of a part of the chain."""
        self._names: set[str] = set()
        """Names of the nodes and variables of all plans."""
        self._num_names = 0
        self._wasted: list[CallRecord] = []
        """Unclaimed calls that had ended before the end of the run."""
        self._held: CallRecord | None = None
        """The single call of a direct plan, which is not sent because its model sends it."""
        self._direct: CallRecord | None = None
        """The same call, once its model has claimed it."""

    def bind_to(self, client: Client) -> bool:
        """Bind the run to the first client. Return whether the run can send calls of `client`.

        It can if both clients have the same server and send the same headers, such as the API key.
        """
        if self._bound_run is None:
            made = SpeculativeRun(
                client, self._name, is_streamed=self._is_streamed, session=self._session
            )
            with self._binding_lock:
                self._bound_run = self._bound_run or made
        return self._run.identity == client.identity

    @property
    def _run(self) -> SpeculativeRun:
        assert self._bound_run is not None, "a run is bound to a client before its calls are used"
        return self._bound_run

    @property
    def _registry(self) -> PlannedCallRegistry:
        return self._run.calls

    def prefix(self) -> str:
        """Return a prefix for the names of one more plan.

        The first plan, and plans without calls, need none.
        """
        if not self._has_plans:
            return ""
        with self._registry.lock:
            is_first = self._num_names == 0
            prefix = self._next_name("in{}_")
            return "" if is_first else prefix

    def begin(
        self, plans: Sequence[tuple[ChainPlan, Mapping[str, Json]]], *, is_start: bool = False
    ) -> None:
        """Start planned calls.

        Args:
            plans: each with the values that follow from the input of its chain.
            is_start: the chain has not begun to run.
        """
        if not self._has_plans:
            return
        with self._registry.lock:
            for plan, _ in plans:
                self._names |= plan.names
                self._run.outbox.may_grow |= plan.may_grow
                self.stats.num_planned += len(plan.calls)
                for awaited in plan.awaited.values():
                    self._awaited.update({view.variable: awaited for view in awaited.source.views})
        calls = [call for plan, _ in plans for call in plan.calls]
        values = {name: value for _, inputs in plans for name, value in inputs.items()}
        if is_start and any(plan.is_direct for plan, _ in plans):
            self._registry.plan(calls, values, is_held=True)
            (self._held,) = (self._registry.records[call.variable] for call in calls)
        else:
            self._run.plan(calls, values, is_alone=is_start)

    def observe(self, awaited: AwaitedValue, computed: Any) -> None:
        """Process a value that planned calls wait for."""
        if not self._has_plans:
            return
        encoded = awaited.values(computed)
        if encoded.reason:
            self._unencodable[awaited.place] = encoded.reason
        self._run.set_values(encoded.values)

    # --- calls of the chain ---------------------------------------------------------------

    def is_direct(self, nodes: Sequence[dict[str, Json]]) -> bool:
        """Return whether the model sends a call itself, as outside of an accelerated chain.

        True at most once per run: for the only call of a direct plan.
        """
        if self._held is None or len(nodes) != 1:
            return False
        with self._registry.lock:
            if self._held is None or self._run.outbox.programs:
                return False  # an open program takes the call
            self._direct = self._registry.claim(nodes[0], only=self._held)
            if self._direct is None:
                return False
            self._held = None
            self.stats.num_served += 1
            return True

    def note_direct_program(self, program: str) -> None:
        """Record the program of the direct call."""
        assert self._direct is not None, "`is_direct` has returned true"
        self._direct.program = program

    def result(self, nodes: Sequence[dict[str, Json]], timeout_s: float | None) -> ChatResult:
        """Wait for the answers to a call of the chain, one for each node. Blocks.

        Raises:
            NotReadyError: if an answer is missing `timeout_s` seconds after the call.
            ConureError: if the call failed.
        """
        with self._claimed(nodes) as records:
            limit = TimeLimit(timeout_s, self._run.clock)
            pairs = zip(records, nodes, strict=True)
            return result_of([self._answer(record, node, limit) for record, node in pairs])

    async def aresult(
        self, nodes: Sequence[dict[str, Json]], timeout_s: float | None
    ) -> ChatResult:
        """`result`, for coroutines."""
        with self._claimed(nodes) as records:
            limit = TimeLimit(timeout_s, self._run.clock)
            pairs = zip(records, nodes, strict=True)
            answers = [await self._aanswer(record, node, limit) for record, node in pairs]
            return result_of(answers)

    def chunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> Generator[ChatGenerationChunk, None, None]:
        """Yield the answer to a call of the chain in chunks; raises as `result`. Blocks.

        Raises:
            GeneratorExit: if the call fails after the chain has failed. Then only the garbage
                collector still reads: it closes a generator of LangChain, which reads its input to
                the end, and an error would be printed.
        """
        record = self._claim(node)
        self._run.follow_texts()
        limit = TimeLimit(timeout_s, self._run.clock)
        follow = self._run.follow(record, partial(self._resend, node), limit)
        try:
            with closing(follow) as events:
                for stream, event in events:
                    yield from chunks_of(stream, event)
        except ConureError as problem:
            if self._has_failed:
                raise GeneratorExit from problem
            raise

    async def achunks(
        self, node: dict[str, Json], timeout_s: float | None
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        """`chunks`, for coroutines.

        Raises:
            CancelledError: if the call fails after the chain has failed. After the failure of one
                of its parallel parts, a stream does not read the errors of the others, and asyncio
                would print them.
        """
        record = self._claim(node)
        self._run.follow_texts()
        limit = TimeLimit(timeout_s, self._run.clock)
        follow = self._run.afollow(record, partial(self._resend, node), limit)
        try:
            async with OwnedGenerator(follow) as events:
                async for stream, event in events:
                    for chunk in chunks_of(stream, event):
                        yield chunk
        except ConureError as problem:
            if self._has_failed:
                raise asyncio.CancelledError("the chain has failed") from problem
            raise

    def _answer(
        self, record: CallRecord, node: dict[str, Json], limit: TimeLimit
    ) -> CompleteAnswer:
        stream: AnswerStream | None = None
        with closing(self._run.follow(record, partial(self._resend, node), limit)) as events:
            for stream, event in events:
                stream.feed(event)
        assert stream is not None, "the end of an answer is an event"
        return CompleteAnswer(stream.result(), stream.program)

    async def _aanswer(
        self, record: CallRecord, node: dict[str, Json], limit: TimeLimit
    ) -> CompleteAnswer:
        follow = self._run.afollow(record, partial(self._resend, node), limit)
        stream: AnswerStream | None = None
        async with OwnedGenerator(follow) as events:
            async for stream, event in events:
                stream.feed(event)
        assert stream is not None, "the end of an answer is an event"
        return CompleteAnswer(stream.result(), stream.program)

    # --- end ------------------------------------------------------------------------------

    def end(self, *, is_failed: bool) -> RunStats:
        """End the run.

        Cancel its programs if the chain failed, or if a call that was sent has not ended. Otherwise
        close them. Blocks until programs are cancelled. Closing is not waited for.
        """
        if self._end(is_failed=is_failed):
            self._run.wait_until_sent()
        return self._finished()

    async def aend(self, *, is_failed: bool) -> RunStats:
        """`end`, for coroutines; completes even if the caller is cancelled."""
        try:
            if self._end(is_failed=is_failed):
                await self._run.await_until_sent()
        finally:
            self._finished()
        return self.stats

    def _end(self, *, is_failed: bool) -> bool:
        """Start the end of the run, and return whether its programs are cancelled.

        A program with calls of tasks and threads that outlive the chain is not cancelled, unless
        the chain failed.
        """
        self.is_over, self._has_failed = True, is_failed
        if self._bound_run is None:
            return False
        with self._registry.lock:
            is_cancelled = is_failed or not self._registry.is_settled()
            records = self._registry.records.values()
            # Calls that ended unused. `_finished` adds those that were running when they were
            # cancelled.
            self._wasted = [each for each in records if not each.is_claimed and each.has_ended]
        self._run.end(is_cancelled=is_cancelled, keeps_awaited=not is_failed)
        return is_cancelled

    def _finished(self) -> RunStats:
        """Complete the statistics after the end of the run."""
        if self._bound_run is None:
            return self.stats
        first = next((p.id for p in self._run.outbox.programs), "")
        self.stats.program = first if self._direct is None else self._direct.program
        self.stats.refusals = list(self._registry.rejections)
        with self._registry.lock:
            records = list(self._registry.records.values())
        self.stats.num_in_first_program = sum(
            each.is_claimed and bool(each.program) and each.program == self.stats.program
            for each in records
        )
        stopped = [each for each in records if each.was_started and not each.is_claimed]
        wasted = dict.fromkeys([*self._wasted, *stopped])
        self.stats.wasted = [each.call.place for each in wasted]
        return self.stats

    # --- matching -------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, nodes: Sequence[dict[str, Json]]) -> Generator[list[CallRecord], None, None]:
        """Claim the planned calls for a call of the chain; release them at the end of the block."""
        records = [self._claim(node) for node in nodes]
        try:
            yield records
        finally:
            self._registry.release(records)
            self._run.flush()

    def _claim(self, node: dict[str, Json]) -> CallRecord:
        """Return the planned call for a call of the chain; else send the chain's call."""
        with self._registry.lock:
            record = self._registry.claim(node)
            if record is None:
                return self._send(node, self._miss())
            self.stats.num_served += 1
            if record is self._held:
                self._held = None
                self._registry.send_again([record])
                self._run.flush()
            return record

    def _resend(
        self, node: dict[str, Json], failed: CallRecord, failure: PlanFailedError
    ) -> CallRecord:
        """Send a call of the chain whose planned call failed because of its plan."""
        with self._registry.lock:
            self.stats.num_served -= 1
            place = failed.call.place
            return self._send(node, PlanMiss(place, f"{place}: planned, but {failure.code}"))

    def _send(self, node: dict[str, Json], miss: PlanMiss) -> CallRecord:
        self.stats.misses.append(miss)
        self._run.outbox.may_grow = True  # an unexpected call is often followed by others
        variable = self._next_name("miss{}")
        output = {**node["output"], "variable": variable}
        named = {**node, "id": f"{variable}_call", "output": output}
        return self._run.add_unplanned(PlannedCall("", variable, named, frozenset()))

    def _next_name(self, form: str) -> str:
        """Return a numbered name, or beginning of names, that no name of a plan begins with.

        The caller holds the lock of the calls. A second lock would cause deadlocks: the garbage
        collector may close a stream in any thread, which takes the lock of the calls.
        """
        while True:
            self._num_names += 1
            name = form.format(self._num_names)
            if not any(taken.startswith(name) for taken in self._names):
                return name

    def _miss(self) -> PlanMiss:
        """Explain a miss by a planned call that the chain has not made.

        A call that waits for a value of the chain is preferred to one that was sent.
        """
        sent = []
        for record in self._registry.unclaimed():
            call, missing = record.call, record.call.reads - self._registry.values.keys()
            if not missing:
                sent.append(call)
            for name in sorted(missing & self._awaited.keys()):
                awaited = self._awaited[name]
                why = self._unencodable.get(awaited.place, "it is not computed yet")
                return PlanMiss(call.place, f"{awaited.place} ({awaited.what}): {why}")
        if sent:
            place = sent[0].place
            return PlanMiss(place, f"{place}: another prompt, or other settings")
        return PlanMiss("", "not in the plan")
