"""The requests of one run: planned and unplanned calls in, submissions and appends out.

Calls go into one open program, and into another one when it is full, or when it has ended because
the server could not be reached for some time: then calls without an answer are sent again. Calls
that wait to be sent go together, at most `MAX_BATCH` in one request. A variable that a call reads
and that no call of the same program writes is an input of the program; its value follows when it is
known.

Several requests may be under way at once: the outbox chooses the id of a program, so that calls and
values follow a submission without waiting for its answer. A request refers only to what the
submission contains or what the server has accepted, because requests may arrive in any order.

Out of scope: connections and threads. A driver (`run`) carries out the requests and reports how
they ended.

Invariant: every call is accepted or rejected exactly once. A rejected request with several calls is
split until only the calls at fault are rejected. A server without capacity for a plan still gets
the unplanned calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from conure.server.program.errors import (
    ConureError,
    ExpressionError,
    ProgramError,
    PromptError,
    UnavailableError,
)
from conure.server.program.ir import MAX_NODES, Json
from conure.server.program.status import Event

from ..client import ServerUnreachableError
from ..client.exchange.programs import new_id
from .answer_stream import LEASE_LOST
from .planned_call import seeded_node
from .registry import CallRecord, PlannedCallRegistry, plan_failure

MAX_BATCH = 256
"""Calls in one request. The first of many calls run while the others are sent, and few requests
exceed the size limit of a server."""
MAX_UNDER_WAY = 16
"""Requests without an answer. What is added meanwhile is sent together."""
MAX_NAME_LENGTH = 256
ENDED_CODES = ("session.ended", "session.closed")
"""Codes of an append to a program that has ended or was closed by another client."""
UNKNOWN_PROGRAM = "program.not_found"
"""Code of an append to a program that the server does not have."""
QUOTA_CODES = "quota."
"""Beginning of the codes of an append that exceeds what one program may hold."""

OutboxAction: TypeAlias = Literal["submit", "append", "kill", "close", "cancel"]
"""All but the first and the last are appends to the program."""


@dataclass(eq=False, slots=True)
class OpenProgram:
    """A program that calls of the run are sent to."""

    id: str
    is_open: bool
    """Accepts calls and values."""
    run: Any = None
    """The driver's handle, once the submission was accepted."""
    is_rejected: bool = False
    """The server did not accept the submission."""
    is_full: bool = False
    """Takes no more calls: a limit of the server is reached, or no answer would be read."""
    num_nodes: int = 0
    inputs: set[str] = field(default_factory=set)
    """Its input variables, of the submission and of accepted requests."""
    given: set[str] = field(default_factory=set)
    """Inputs whose values were sent."""
    announced: set[str] = field(default_factory=set)
    """Variables of appends that the server has not accepted yet. No other request may read them,
    because it may arrive first."""
    awaits_submission: bool = False
    """The server does not know the program yet. Requests wait for the answer to its submission."""
    has_finished: bool = False
    is_cancelled: bool = False

    @property
    def takes_calls(self) -> bool:
        """Whether calls can be added. A rejected submission leaves no open program."""
        return self.is_open and not self.is_full


@dataclass(eq=False, slots=True)
class OutboxRequest:
    """One request to the server."""

    action: OutboxAction
    body: dict[str, Any]
    program: OpenProgram
    records: Sequence[CallRecord] = ()
    is_complete: bool = False
    """A submission that nothing will be appended to."""
    is_early: bool = False
    """An append that is sent before the submission of its program has an answer."""

    @property
    def variables(self) -> set[str]:
        """Variables that the request adds to its program."""
        graph = self.body.get("program", self.body)
        return {*graph.get("variables", ()), *(record.variable for record in self.records)}


class SpeculativeOutbox:
    """Decides what to send next."""

    def __init__(
        self,
        registry: PlannedCallRegistry,
        name: str,
        *,
        may_grow: bool = False,
        has_outputs: bool = True,
        session: str | None = None,
        program_ids: list[str] | None = None,
    ) -> None:
        """Start without a program.

        Args:
            registry: registry of the run.
            name: name of the programs.
            may_grow: more calls may follow after those that are planned at first.
            has_outputs: calls that no other call reads are outputs of their program.
            session: session of the programs.
            program_ids: receives the ids of the programs.
        """
        self.programs: list[OpenProgram] = []
        """Submitted, or under way."""
        self.may_grow = may_grow
        self._registry = registry
        self._name = name[:MAX_NAME_LENGTH]
        self._has_outputs = has_outputs
        # An attached program ends when its client is gone.
        self._options: dict[str, Json] = {"detach": False}
        if session is not None:
            self._options["session"] = session
        self._program_ids = program_ids if program_ids is not None else []
        self._split: list[list[CallRecord]] = []
        """Parts of rejected requests; the last one is sent next."""
        self._ending: Literal["", "close", "cancel"] = ""
        self._keeps_awaited = False
        self._under_way: set[OutboxRequest] = set()

    @property
    def has_work(self) -> bool:
        """Whether `next` may return a request, now or after a request under way."""
        with self._registry.lock:
            has_calls = bool(self._registry.unsent or self._split or self._registry.abandoned)
            return has_calls or any(map(self._may_send_to, self.programs))

    def _may_send_to(self, program: OpenProgram) -> bool:
        """Return whether values, or the end, of a program may have to be sent."""
        has_ended = program.has_finished or program.is_cancelled
        lacks_values = not program.inputs <= program.given
        is_open = program.is_open and (lacks_values or bool(self._ending))
        return is_open or (self._ending == "cancel" and not has_ended)

    @property
    def is_busy(self) -> bool:
        """Whether a request has no answer yet."""
        return bool(self._under_way)

    def next(self) -> OutboxRequest | None:
        """Return a request to send now; None if there is none before the next answer or call."""
        with self._registry.lock:
            has_room = len(self._under_way) < MAX_UNDER_WAY
            request = self._next() if has_room else self._next_cancel()
            if request is not None:
                self._under_way.add(request)
            return request

    def accepted(self, request: OutboxRequest, run: Any = None) -> None:
        """Record that the server accepted a request.

        Args:
            request: from `next`.
            run: handle on the new program of a submission.
        """
        with self._registry.lock:
            self._under_way.discard(request)
            program = request.program
            if request.action == "submit":
                program.run, program.awaits_submission = run, False
                self._program_ids.append(program.id)
            else:
                program.announced -= request.variables
                program.inputs.update(request.body.get("variables", ()))

    def rejected(self, request: OutboxRequest, failure: Exception) -> None:
        """Record that the server did not accept a request, or could not be reached."""
        with self._registry.lock:
            self._under_way.discard(request)
            program = request.program
            program.announced -= request.variables
            if request.action == "submit":
                program.is_rejected, program.is_open = True, False
                self.programs.remove(program)
            if request.action not in ("submit", "append"):
                return  # what was to end will end with its program, or with the program's lease
            # Calls of a program that ended before this reply may be in another program already.
            records = [record for record in request.records if record.program == program.id]
            for record in records:
                record.is_sent, record.program = False, ""
            if program.is_cancelled:
                assert self._registry.failure is not None, "the run has ended"
                self._registry.reject(records, self._registry.failure)
                return
            if _is_too_early(request, failure) and not program.is_rejected:
                program.awaits_submission = program.run is None
                program.given -= request.body["inputs"].keys()
                program.num_nodes -= len(request.records)
                self._registry.send_again(records)
                return
            if request.action == "append":
                _note_limit(program, failure)
            # An append may arrive before the submission of its program is rejected.
            if request.action == "append" and not program.takes_calls:
                self._registry.send_again(records)
                if request.records or not program.is_full:
                    return  # the calls that wait for rejected values are sent again, too, or fail
            message = getattr(failure, "message", str(failure))
            if not request.records:
                self._registry.rejections.append(message)
                names = set(request.body["inputs"])
                self._registry.reject_values(names, program.id, _conure_error(failure))
                return
            self._reject(records, failure, message)

    def _reject(self, records: list[CallRecord], failure: Exception, message: str) -> None:
        if len(records) > 1 and _is_fault_of_one_call(failure):
            half = len(records) // 2
            self._split += [records[half:], records[:half]]
            return
        failure = _conure_error(failure)
        planned = [record for record in records if record.is_planned]
        unplanned = [record for record in records if not record.is_planned]
        if planned:
            self._registry.rejections.append(message)
        if isinstance(failure, ServerUnreachableError):
            self._registry.reject(records, failure)
            return
        self._registry.reject(planned, plan_failure(failure))
        if planned and unplanned:
            self._split.append(unplanned)
        else:
            self._registry.reject(unplanned, failure)

    def on_event(self, program: OpenProgram, event: Event) -> None:
        """Process an event of a program, except its end."""
        code = event.data.get("code", "") if event.type == "node.failed" else ""
        with self._registry.lock:
            if code.startswith(QUOTA_CODES) and self._move(event.data["node"]):
                program.is_full = True
            else:
                self._registry.on_event(event)

    def _move(self, node_id: str) -> bool:
        """Queue a call whose answer did not fit into its program for another one, once.

        Returns:
            Whether it was queued.
        """
        records = self._registry.records.values()
        record = next((each for each in records if each.node_id == node_id), None)
        if record is None or record.was_moved or not record.is_open:
            return False
        record.was_moved = True
        self._registry.send_again([record])
        return True

    def _is_awaited(self, program: OpenProgram) -> bool:
        """Return whether the application waits for an answer of a program."""
        records = self._registry.records.values()
        return any(r.is_awaited and r.is_open and r.program == program.id for r in records)

    def program_ended(
        self, program: OpenProgram, failure: Exception, *, has_finished: bool
    ) -> None:
        """Record that no more events of a program will be read.

        Args:
            program: program of this run.
            failure: for its calls without an answer.
            has_finished: it finished; else its events cannot be read.
        """
        with self._registry.lock:
            program.has_finished = has_finished
            calls = [r for r in self._registry.records.values() if r.program == program.id]
            if getattr(failure, "code", "") == LEASE_LOST and self._registry.failure is None:
                program.is_open = False
                self._registry.send_again(calls)
                return
            # A later call may succeed in another program, unless this one was stopped on purpose.
            was_stopped = any(each.stop for each in calls) and not program.is_cancelled
            is_latest = has_finished and program is self.programs[-1]
            is_last = is_latest and (program.is_open or was_stopped)
            program.is_full = program.is_full or not has_finished
            self._registry.end_program(program.id, _conure_error(failure), is_last=is_last)

    def end(self, *, is_cancelled: bool, keeps_awaited: bool = False) -> None:
        """End the programs: cancel them, or close them once everything is sent.

        Args:
            is_cancelled: cancel the programs.
            keeps_awaited: a program with an answer that the application waits for is closed, and
                cancelled only once the application has the answer.
        """
        with self._registry.lock:
            self._keeps_awaited = keeps_awaited
            self._ending = "cancel" if is_cancelled else "close"
            self._registry.close()
            unsent = [*self._registry.unsent, *(r for part in self._split for r in part)]
            if is_cancelled:
                unused = [r for r in unsent if not (keeps_awaited and r.is_awaited)]
            else:
                unused = [r for r in unsent if not r.is_claimed]
            if self._registry.failure is not None:
                self._registry.reject(unused, self._registry.failure)

    def _next(self) -> OutboxRequest | None:
        return (
            self._next_cancel()
            or self._next_kill()
            or self._next_values()
            or self._next_calls()
            or self._next_close()
        )

    def _next_cancel(self) -> OutboxRequest | None:
        """Return the cancellation of a program that the application needs no more."""
        for program in self.programs if self._ending == "cancel" else ():
            has_ended = program.has_finished or program.is_cancelled
            is_kept = self._keeps_awaited and self._is_awaited(program)
            if has_ended or is_kept:
                continue
            program.is_open, program.is_cancelled = False, True
            return OutboxRequest("cancel", {}, program)
        return None

    def _next_kill(self) -> OutboxRequest | None:
        """Return the end of an abandoned call in an open program."""
        programs = {program.id: program for program in self.programs}
        abandoned = self._registry.abandoned
        for record in list(abandoned):
            program = programs.get(record.program)
            if not record.is_open or (program is not None and not program.is_open):
                abandoned.remove(record)
            elif program and program.run is not None and record.variable not in program.announced:
                abandoned.remove(record)
                name, target = f"{record.node_id}_kill", record.variable
                node = {"id": name, "op": "kill", "targets": [target], "when": True}
                program.num_nodes += 1
                return OutboxRequest("kill", {"nodes": [node]}, program)
        return None

    def _next_close(self) -> OutboxRequest | None:
        """Return the end of a program to which nothing will be added."""
        for program in self.programs if self._ending else ():
            can_close = program.run is not None and not program.has_finished
            if can_close and program.is_open and not program.announced:
                program.is_open = False
                return OutboxRequest("close", {"close": True}, program)
        return None

    def _next_values(self) -> OutboxRequest | None:
        """Return a request with values of inputs by which a call on the server can start.

        A value waits here until the other values that its call reads are known, too, and is sent
        with them.
        """
        registry = self._registry
        for program in self.programs:
            known = (program.inputs - program.given) & registry.values.keys()
            if not (program.is_open and known) or program.awaits_submission:
                continue
            missing = program.inputs - program.given - known
            names: set[str] = set()
            for record in registry.records.values():
                is_here = record.program == program.id and record.is_open
                if is_here and not record.call.reads & missing:
                    names |= record.call.reads & known
            if names:
                program.given |= names
                inputs = {name: registry.values[name] for name in sorted(names)}
                is_early = program.run is None
                return OutboxRequest("append", {"inputs": inputs}, program, is_early=is_early)
        return None

    def _next_calls(self) -> OutboxRequest | None:
        registry = self._registry
        program = self.programs[-1] if self.programs else None
        if program is not None and program.takes_calls and program.awaits_submission:
            return None
        while self._split:
            records = [record for record in self._split.pop() if record.is_open]
            if records:
                return self._request(records)
        # Variables that a request cannot read yet: announced ones, and those of calls not taken.
        held = set() if program is None else set(program.announced)
        taken: list[CallRecord] = []
        for record in registry.unsent:
            if len(taken) < MAX_BATCH and not record.call.reads & held:
                taken.append(record)
            else:
                held.add(record.variable)
        if not any(self._can_run(record) for record in taken):
            return None
        chosen = set(taken)
        registry.unsent = deque(record for record in registry.unsent if record not in chosen)
        return self._request(taken)

    def _can_run(self, record: CallRecord) -> bool:
        """Whether all that a call reads has a value, or is an answer that the server makes."""
        registry = self._registry
        return all(
            name in registry.values
            or ((read := registry.records.get(name)) is not None and read.is_sent)
            for name in record.call.reads
        )

    def _request(self, records: list[CallRecord]) -> OutboxRequest:
        program = self.programs[-1] if self.programs else None
        if program is not None and not (
            program.takes_calls and program.num_nodes + len(records) <= MAX_NODES
        ):
            program = None
        if program is None:
            return self._submission(records)
        body = self._graph(records, program)
        is_early = program.run is None
        request = OutboxRequest("append", body, program, records, is_early=is_early)
        self._mark_sent(request, program)
        program.announced |= request.variables
        return request

    def _submission(self, records: list[CallRecord]) -> OutboxRequest:
        body = self._graph(records, None)
        inputs = body.pop("inputs")
        is_complete = (
            not (self.may_grow or self._registry.unsent or self._split)
            and body["variables"].keys() == inputs.keys()
        )
        program = OpenProgram(new_id(), is_open=not is_complete)
        program.inputs.update(body["variables"])
        program.given.update(inputs)
        self.programs.append(program)
        submission = {
            "id": program.id,
            "program": body | {"name": self._name},
            "inputs": inputs,
            "options": self._options,
        }
        request = OutboxRequest("submit", submission, program, records, is_complete)
        self._mark_sent(request, program)
        return request

    def _mark_sent(self, request: OutboxRequest, program: OpenProgram) -> None:
        program.num_nodes += len(request.records)
        program.given.update(request.body.get("inputs", ()))
        for record in request.records:
            record.is_sent, record.program = True, program.id

    def _graph(self, records: list[CallRecord], program: OpenProgram | None) -> dict[str, Any]:
        """The nodes of calls, with the inputs that they read and the program lacks."""
        registry = self._registry
        writers = set(records)
        inputs: dict[str, Json] = {}
        for name in dict.fromkeys(name for r in records for name in sorted(r.call.reads)):
            writer = registry.records.get(name)
            is_written = writer is not None and (
                writer in writers or (program is not None and writer.program == program.id)
            )
            if not is_written and (program is None or name not in program.inputs):
                inputs[name] = {}
        outputs: list[str] = []
        if self._has_outputs:
            read_later = {name for record in registry.unclaimed() for name in record.call.reads}
            outputs = [r.variable for r in records if r.variable not in read_later]
        return {
            "variables": inputs,
            "nodes": [
                {**seeded_node(record.call.node, record.seed), "on_error": "isolate"}
                for record in records
            ],
            "inputs": {name: registry.values[name] for name in inputs if name in registry.values},
            "outputs": outputs,
        }


def _is_too_early(request: OutboxRequest, failure: Exception) -> bool:
    """Whether an append reached a server that has not accepted the submission of its program."""
    return request.is_early and getattr(failure, "code", "") == UNKNOWN_PROGRAM


def _note_limit(program: OpenProgram, failure: Exception) -> None:
    """Record that a program has ended or is full, if the failure of an append says so."""
    code = getattr(failure, "code", "")
    if code in ENDED_CODES:
        program.is_open = False
    elif code.startswith(QUOTA_CODES):
        program.is_full = True


def _conure_error(failure: Exception) -> ConureError:
    """Return a failure as the error of a call: connections and clients raise their own classes."""
    if isinstance(failure, ConureError):
        return failure
    error = UnavailableError("client.stream", f"the connection was lost: {failure!r}")
    error.__cause__ = failure
    return error


def _is_fault_of_one_call(failure: Exception) -> bool:
    """Whether a smaller request may succeed. Against a wrong API key, for example, it cannot."""
    return isinstance(failure, ProgramError | PromptError | ExpressionError | ValueError)
