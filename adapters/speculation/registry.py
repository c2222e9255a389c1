"""The calls of one run: which are planned, which the application made, and how each one ended.

The server works on the planned calls while the application runs. A call of the application claims
the planned call with the same key. A planned call has a key once the variables that its prompt
reads have values. A call without a planned counterpart is added as it is made.

Out of scope: requests, connections and frameworks. Listeners are called under the lock, from the
thread that reports the event; they must not block.

Invariants: a planned call is claimed at most once, and only by a call with exactly the same request
to the model; each listener receives a result event or an exception. Thread-safe.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TypeAlias

from conure.server.program.errors import ConureError, ExpressionError, RunError
from conure.server.program.ir import Json
from conure.server.program.status import Event, ProgramStatus

from ..client.connection import FAILURE_EVENTS
from .answer_stream import RESULT_EVENTS, TEXT_EVENTS, call_failure
from .planned_call import SEED_BITS, PlannedCall, holds, request_key
from .siblings import SiblingGroups

CallListener: TypeAlias = Callable[["Event | Exception"], None]
"""Receives the events of one call; an exception means that no event follows."""

_STOP_CODES = "program."
"""Prefix of the codes of nodes that were killed because the server stopped their program."""
_PLAN_FAULTS = ("expr.", "program.", "variable.")
"""Prefixes of codes that a node can fail with because of its plan."""


class PlanFailedError(ConureError):
    """A planned call has no answer because of its plan; the same call may succeed alone."""


@dataclass(eq=False, slots=True)
class CallRecord:
    """One call of a run."""

    call: PlannedCall
    is_planned: bool
    is_claimed: bool = False
    is_awaited: bool = False
    """The application waits for its answer."""
    was_moved: bool = False
    """The call failed in a full program and was sent to another one."""
    program: str = ""
    """Id of the program that it was sent to."""
    is_sent: bool = False
    """A request with it is under way or was accepted."""
    is_answered: bool = False
    has_ended: bool = False
    """The server answered or failed the call."""
    was_started: bool = False
    """An engine was running the call when the program of the call was cancelled."""
    stop: ConureError | None = None
    """The server stopped its program: the failure of the call, unless it is sent again."""
    failure: Exception | None = None
    """Why it has no answer."""
    history: list[Event] = field(default_factory=list)
    listeners: list[CallListener] = field(default_factory=list)
    seed: int = field(default_factory=lambda: secrets.randbits(SEED_BITS))
    """Of an answer without a given seed. It stays the same in another program, so that a text that
    was streamed in part continues there."""

    @property
    def variable(self) -> str:
        """Receives the answer."""
        return self.call.variable

    @property
    def node_id(self) -> str:
        """Id of its node."""
        return str(self.call.node["id"])

    @property
    def is_open(self) -> bool:
        """Whether it may still get an answer."""
        return not self.is_answered and self.failure is None

    @property
    def is_abandoned(self) -> bool:
        """Whether the application made the call and does not wait for its answer any more."""
        return self.is_open and self.is_claimed and not self.is_awaited


class PlannedCallRegistry:
    """The calls of one run, and the values that are known."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[str, Json] = {}
        """Values given by the application, and committed answers."""
        self.records: dict[str, CallRecord] = {}
        """By variable."""
        self.unsent: deque[CallRecord] = deque()
        self.abandoned: list[CallRecord] = []
        """Open calls whose answers the application does not wait for any more."""
        self.rejections: list[str] = []
        """Messages of the server about rejected requests that had planned calls or their values."""
        self.failure: Exception | None = None
        """Why the run takes no more calls."""
        self._siblings = SiblingGroups()
        self._by_node: dict[str, CallRecord] = {}
        self._unkeyed: list[CallRecord] = []
        """Planned calls that read variables without values."""
        self._by_key: dict[bytes, deque[CallRecord]] = defaultdict(deque)
        """Unclaimed planned calls."""

    # --- calls ----------------------------------------------------------------------------

    def plan(
        self,
        calls: Iterable[PlannedCall],
        values: Mapping[str, Json] | None = None,
        *,
        is_held: bool = False,
    ) -> None:
        """Add planned calls.

        Args:
            calls: with variables that no other call of the run has.
            values: of variables that they read.
            is_held: the run does not send them.
        """
        with self.lock:
            self.values.update(values or {})
            calls = list(calls)
            for call in calls:
                self._unkeyed.append(self._add(call, is_planned=True, is_held=is_held))
            self._siblings.add(calls, self.values.keys(), self.records)
            self._update_keys()

    def set_values(self, values: Mapping[str, Json]) -> None:
        """Add values that the application computed.

        A variable keeps its first value, which is also the one that the server has. A call of the
        application that reads a later value matches no planned call.
        """
        with self.lock:
            self.values.update({n: values[n] for n in values.keys() - self.values.keys()})
            self._update_keys()

    def sibling_wait_s(self) -> float:
        """Return how long the known values should wait for values of sibling calls."""
        with self.lock:
            return self._siblings.wait_s(self.values)

    def claim(
        self, node: Mapping[str, Json], *, only: CallRecord | None = None
    ) -> CallRecord | None:
        """Return the planned call with the same request to the model as `node`.

        Each planned call is returned at most once. With `only`, no other call is returned.

        Raises:
            ValueError: if the prompt cannot be encoded as UTF-8.
        """
        key = request_key(node, {})
        with self.lock:
            planned = self._by_key.get(key)
            if not planned or (only is not None and planned[0] is not only):
                return None
            record = planned.popleft()
            record.is_claimed = record.is_awaited = True
            return record

    def has_planned(self, node: Mapping[str, Json]) -> bool:
        """Return whether `claim` would find a planned call.

        Raises:
            ValueError: if the prompt cannot be encoded as UTF-8.
        """
        with self.lock:
            return bool(self._by_key.get(request_key(node, {})))

    def add_unplanned(self, call: PlannedCall) -> CallRecord:
        """Add a call that the application makes and that no planned call matches."""
        with self.lock:
            record = self._add(call, is_planned=False)
            record.is_claimed = record.is_awaited = True
            return record

    def unclaimed(self) -> list[CallRecord]:
        """Return planned calls that the application did not make.

        Failed calls and calls whose condition is false are left out.
        """
        with self.lock:
            keyed = [record for records in self._by_key.values() for record in records]
            return [*self._unkeyed, *keyed]

    def is_settled(self) -> bool:
        """Return whether every call that was sent has ended."""
        with self.lock:
            return all(record.has_ended for record in self.records.values() if record.is_sent)

    def _add(self, call: PlannedCall, *, is_planned: bool, is_held: bool = False) -> CallRecord:
        record = CallRecord(call, is_planned, failure=self.failure)
        self.records[call.variable] = self._by_node[record.node_id] = record
        if record.is_open and not is_held:
            self.unsent.append(record)
        return record

    def _update_keys(self) -> None:
        """Give a key to planned calls whose variables have values; drop those that cannot run."""
        unkeyed: list[CallRecord] = []
        for record in self._unkeyed:
            if not record.call.reads <= self.values.keys():
                unkeyed.append(record)
            elif holds(record.call.node.get("when"), self.values):
                # A prompt that cannot be rendered or encoded matches no call.
                with contextlib.suppress(ExpressionError, ValueError):
                    self._by_key[request_key(record.call.node, self.values)].append(record)
        self._unkeyed = unkeyed

    # --- results --------------------------------------------------------------------------

    def listen(self, record: CallRecord, listener: CallListener) -> None:
        """Pass past and future events of a call to a listener."""
        with self.lock:
            for event in record.history:
                listener(event)
            if record.failure is not None:
                listener(record.failure)
            elif not record.is_answered:
                record.listeners.append(listener)

    def unlisten(self, record: CallRecord, listener: CallListener) -> None:
        """Stop passing events to a listener: the application does not wait for the answer."""
        with self.lock:
            with contextlib.suppress(ValueError):
                record.listeners.remove(listener)
            self.release([record])

    def release(self, records: Iterable[CallRecord]) -> None:
        """Record that the application does not wait for the answers of calls that it has made."""
        with self.lock:
            for record in records:
                if record.is_awaited and record.is_open:
                    if record.is_sent:
                        self.abandoned.append(record)
                    else:
                        self.reject([record], _abandoned())
                record.is_awaited = False

    def on_event(self, event: Event) -> None:
        """Process an event of a program of the run. The end of a program is `end_program`."""
        with self.lock:
            record = self.records.get(event.data.get("variable", ""))
            record = record or self._by_node.get(event.data.get("node", ""))
            if record is None or record.has_ended:
                return  # a text may arrive after the answer, over another stream
            record.has_ended = event.type in RESULT_EVENTS
            if event.type == "node.killed" and event.data.get("code", "").startswith(_STOP_CODES):
                record.stop = call_failure(event)  # the end of the program follows
            elif event.type in FAILURE_EVENTS:
                self._end_failed(record, event)
            elif record.is_open and event.type in TEXT_EVENTS:
                record.history.append(event)
                self._notify(record, event)
            elif record.is_open and event.type == "variable.committed":
                record.is_answered = True
                record.history = [event]  # it contains the text of the events before
                self.values[record.variable] = event.data["value"]
                self._update_keys()
                self._notify(record, event)

    def reject(self, records: Iterable[CallRecord], failure: Exception) -> None:
        """Fail calls that the server did not accept, and unsent calls that read their answers."""
        with self.lock:
            records = list(records)
            for record in records:
                record.is_sent = False
            self._fail(records, failure)
            lost = self.dependents({record.variable for record in records})
            self._fail([each for each in lost if not each.is_sent], plan_failure(failure))

    def reject_values(self, names: AbstractSet[str], program: str, failure: Exception) -> None:
        """Fail the calls of a program that wait for values that the server did not accept."""
        with self.lock:
            lost = [each for each in self.dependents(names) if each.program == program]
            self._fail(lost, plan_failure(failure))

    def end_program(self, program: str, failure: Exception, *, is_last: bool) -> None:
        """Fail the open calls of a program that finished or whose events cannot be read.

        Args:
            program: its id.
            failure: passed to their listeners.
            is_last: the run takes no more calls, and all open calls fail.
        """
        with self.lock:
            if is_last:
                self.close(failure)
            records = self.records.values()
            ended = [each for each in records if is_last or each.program == program]
            self._fail(ended, failure)
            lost = self.dependents({record.variable for record in ended if record.failure})
            self._fail(lost, plan_failure(failure))

    def send_again(self, records: Iterable[CallRecord]) -> None:
        """Queue calls whose program does not answer them, before all that is unsent."""
        with self.lock:
            records = list(records)
            # Its program was to end these calls. Nothing ends them in another one.
            self.reject([each for each in records if each.is_abandoned], _abandoned())
            again = [record for record in records if record.is_open]
            for record in again:
                record.is_sent, record.has_ended, record.program = False, False, ""
                record.stop = None
            self.unsent.extendleft(reversed(again))

    def close(self, failure: Exception | None = None) -> None:
        """Take no more calls: new ones fail."""
        with self.lock:
            ended = RunError("run.ended", "the program of this run has ended")
            self.failure = self.failure or failure or ended

    def note_started(self, status: ProgramStatus) -> None:
        """Mark the calls that an engine had, according to the status of a cancelled program."""
        with self.lock:
            for node_id, node in status.nodes.items():
                record = self._by_node.get(node_id)
                if record is not None and node.engine is not None:
                    record.was_started = True

    def dependents(self, names: AbstractSet[str]) -> list[CallRecord]:
        """Return the open calls that wait for variables, or for the answers of such calls."""
        found: dict[str, CallRecord] = {}
        waiting = {name: record for name, record in self.records.items() if record.is_open}
        while more := {
            name: record
            for name, record in waiting.items()
            if name not in found and record.call.reads & (names | found.keys())
        }:
            found |= more
        return list(found.values())

    def _end_failed(self, record: CallRecord, event: Event) -> None:
        failure = call_failure(event)
        is_fault_of_plan = event.type == "node.skipped" or failure.code.startswith(_PLAN_FAULTS)
        if record.is_planned and is_fault_of_plan:
            failure = plan_failure(failure)
        self._fail([record], failure)
        # Calls in the same program are skipped by the server.
        lost = [r for r in self.dependents({record.variable}) if r.program != record.program]
        self._fail(lost, plan_failure(failure))

    def _fail(self, records: Iterable[CallRecord], failure: Exception) -> None:
        failed = [record for record in records if record.is_open]
        names = {record.variable for record in failed}
        if not names:
            return
        self._unkeyed = [r for r in self._unkeyed if r.variable not in names]
        for key, calls in self._by_key.items():
            self._by_key[key] = deque(r for r in calls if r.variable not in names)
        self.unsent = deque(r for r in self.unsent if r.variable not in names)
        for record in failed:
            record.failure = record.stop or failure
            self._notify(record, record.failure)

    def _notify(self, record: CallRecord, event: Event | Exception) -> None:
        for listener in list(record.listeners):
            listener(event)


def _abandoned() -> RunError:
    return RunError("run.ended", "the application does not wait for the answer any more")


def plan_failure(failure: Exception) -> PlanFailedError:
    """Return the failure of a planned call that was rejected, failed or was skipped."""
    if isinstance(failure, PlanFailedError):
        return failure
    code = getattr(failure, "code", type(failure).__name__)
    return PlanFailedError(code, getattr(failure, "message", str(failure)))
