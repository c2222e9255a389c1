"""Client steps: the functions that a program requests from its client.

Responsibility: read a program's events, return the function to run next, turn its result into the
answer for the server, and collect the outputs and failures that the events report.
Out of scope: connections and threads; a client runs the functions and sends the answers.
Invariants: a `ClientStepDeduplicator` returns each request id at most once, even if the server
repeats the event.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from conure.server.program.decoding.bodies import MAX_BODY_BYTES
from conure.server.program.decoding.typed_json import convert_record
from conure.server.program.errors import ConureError, ProgramError, RunError
from conure.server.program.ir import Json
from conure.server.program.status import (
    ENDED,
    Event,
    EventType,
    Problem,
    ProgramStatus,
    PutValue,
    Receipt,
)

from ..nodes import iter_nodes
from .exchange.problems import failure_of
from .failures import Failures
from .json_encoding import encode_json

logger = logging.getLogger(__name__)

Function: TypeAlias = Callable[..., Any]
"""Called with the step's `args` as keyword arguments; returns JSON, or an awaitable of JSON."""

MAX_VALUE_BYTES = MAX_BODY_BYTES - 1_000
"""Size limit of a value as JSON. The rest of the request needs less than 1,000 bytes."""

STEP_EVENTS: Final[tuple[EventType, ...]] = (
    "client.requested",
    "node.failed",
    "program.finished",
    "variable.committed",
)
"""The events that a run needs. A stream of all types would send every token of every text."""

MAX_CLOSED = 1_000
"""Maximum number of programs without a session whose request ids are kept."""


class StepResult(NamedTuple):
    """The result of a program."""

    id: str
    status: str
    outputs: dict[str, Json]
    """By name. An output that was skipped, or whose failure was isolated, is not included."""
    receipt: Receipt


class StepRequest(NamedTuple):
    """The server's request to run a function."""

    request_id: str
    node: str
    name: str
    output: str
    """The variable that gets the result."""
    args: dict[str, Json]
    function: Function


def call_step_function(step: StepRequest) -> Any:
    """Call the function of a step and return what it returns: JSON, or an awaitable.

    Raises:
        RuntimeError: if the function raises StopIteration, which a coroutine cannot raise.
        Exception: what the function raises.
    """
    try:
        return step.function(**step.args)
    except StopIteration as problem:
        message = f"the function raised StopIteration({problem.value!r}); return a value instead"
        raise RuntimeError(message) from problem


class ClientStepDeduplicator:
    """Records which step requests a client has claimed, over all programs that it runs."""

    def __init__(self) -> None:
        self._claimed: dict[str, set[str]] = {}
        self._num_sessions: Counter[str] = Counter()
        """Open sessions by program."""
        self._closed: dict[str, None] = {}
        """Programs without an open session, in the order of their last sessions' ends."""
        self._lock = threading.Lock()

    def open(
        self,
        program_id: str,
        outputs: list[str],
        status: ProgramStatus | None = None,
        program: Any = None,
        *,
        is_attached: bool = False,
    ) -> ClientStepSession:
        """Return a session that serves a program.

        Args:
            program_id: id of the program.
            outputs: names of its outputs.
            status: status of the program, if it was submitted earlier. Steps that have ended and
                attempts that have expired are not run again.
            program: the program itself, if it is known.
            is_attached: whether another client may have submitted the program, and may run the
                steps for which this one has no function.
        """
        # Made first: an invalid program raises here, and such a session is never closed.
        failures = Failures(program)
        session = ClientStepSession(
            self, program_id, outputs, status, failures, is_attached=is_attached
        )
        with self._lock:
            self._num_sessions[program_id] += 1
            self._closed.pop(program_id, None)
        return session

    def close(self, program_id: str) -> None:
        """Record that a session of a program has ended.

        The request ids of the program are dropped after the last sessions of `MAX_CLOSED` further
        programs, unless another session serves it.
        """
        with self._lock:
            self._num_sessions[program_id] -= 1
            if self._num_sessions[program_id]:
                return
            del self._num_sessions[program_id]
            self._closed[program_id] = None
            if len(self._closed) > MAX_CLOSED:
                oldest = next(iter(self._closed))
                del self._closed[oldest]
                self._claimed.pop(oldest, None)

    def claim(self, program_id: str, request_id: str) -> bool:
        """Return whether this is the first claim of a request."""
        with self._lock:
            claimed = self._claimed.setdefault(program_id, set())
            if request_id in claimed:
                return False
            claimed.add(request_id)
            return True

    def release(self, program_id: str, request_id: str) -> None:
        """Undo a claim: the request has no answer, and may be claimed again."""
        with self._lock:
            self._claimed.get(program_id, set()).discard(request_id)


class ClientStepSession:
    """Collects the events of one program and finds the client steps to run."""

    def __init__(
        self,
        deduplicator: ClientStepDeduplicator,
        program_id: str,
        outputs: list[str],
        status: ProgramStatus | None,
        failures: Failures,
        *,
        is_attached: bool,
    ) -> None:
        self._deduplicator = deduplicator
        self._is_attached = is_attached
        self._queued: set[str] = set()
        """Request ids of steps whose functions have not begun."""
        self._status = status
        """Status of the program when the session began.

        None if this client has just submitted it.
        """
        self._program_id = program_id
        self._outputs = dict.fromkeys(outputs)
        self._values: dict[str, Json] = {}
        self._failures = failures
        self._causes: dict[str, BaseException] = {}
        """Exceptions of functions that failed in this process, by node."""
        self._last_event: dict[str, Json] | None = None

    def on_event(self, event: Event, functions: Mapping[str, Function]) -> StepRequest | None:
        """Record an event; return the step to run if the event requests a new one."""
        data = event.data
        if event.type == "client.requested":
            name = data["name"]
            if self._has_ended(data) or not self._must_run(name, functions):
                return None
            if not self._deduplicator.claim(self._program_id, data["request_id"]):
                return None
            function = functions.get(name, _UnknownFunction(name))
            self._queued.add(data["request_id"])
            return StepRequest(
                data["request_id"], data["node"], name, data["output"], data["args"], function
            )
        if event.type == "variable.committed" and data["variable"] in self._outputs:
            self._values[data["variable"]] = data["value"]
        elif event.type == "node.failed":
            problem = convert_record(data, Problem)
            self._failures.add(data.get("node", ""), problem)
        elif event.type == "program.finished":
            self._last_event = data
        return None

    def _must_run(self, name: str, functions: Mapping[str, Function]) -> bool:
        """Return whether this client runs a step, or fails it for lack of a function."""
        if name in functions or not self._is_attached:
            return True
        logger.warning(
            "client step %r of program %s waits for another client: `functions` lacks it",
            name,
            self._program_id,
        )
        return False

    def _has_ended(self, request: Mapping[str, Any]) -> bool:
        """Return whether a request had been answered or had expired when the session began."""
        if self._status is None:
            return False
        output = self._status.variables.get(request["output"])
        if output is not None and output.status in ENDED:
            return True
        node = self._status.nodes.get(request["node"])
        return node is not None and request.get("attempt", 0) < node.attempt

    def begin(self, step: StepRequest) -> None:
        """Record that the function of a step begins."""
        self._queued.discard(step.request_id)

    def release(self, step: StepRequest) -> None:
        """Let another reader of the program run a step whose answer was not sent."""
        self._deduplicator.release(self._program_id, step.request_id)

    def close(self) -> None:
        """Let another reader of the program run the steps whose functions have not begun."""
        for request_id in list(self._queued):
            self._deduplicator.release(self._program_id, request_id)

    def failed(self, step: StepRequest, problem: BaseException) -> PutValue:
        """Record a function's exception as a possible cause of the program's failure.

        Returns:
            The answer that reports the exception to the server.
        """
        self._causes[step.node] = problem
        return _failure_answer(step, problem)

    def missing_outputs(self) -> list[str]:
        """Return the outputs whose values no event has reported."""
        return [name for name in self._outputs if name not in self._values]

    def add_value(self, name: str, value: Json) -> None:
        """Record the value of a missing output."""
        self._values[name] = value

    def needs_status(self) -> bool:
        """Return whether `result` needs the program's status because `program.finished` was not
        received.
        """
        return self._last_event is None

    def result(self, status: ProgramStatus | None) -> StepResult:
        """Return the result of the program.

        Args:
            status: status of the program, if `needs_status`.

        Raises:
            ConureError: if the program failed or was cancelled.
        """
        phase: str
        problem: Problem | None
        if self._last_event is not None:
            phase = self._last_event["status"]
            receipt = convert_record(self._last_event.get("receipt") or {}, Receipt)
            has_problem = "code" in self._last_event
            problem = convert_record(self._last_event, Problem) if has_problem else None
        else:
            assert status is not None
            phase = status.status
            receipt = status.receipt or Receipt()
            problem = status.error or None  # UNSET is false
        if phase != "done":
            code = None if problem is None else problem.code
            node = self._failures.root_failure(code)
            cause = None if node is None else self._causes.get(node)
            raise self._error(phase, node, problem) from cause
        outputs = {name: self._values[name] for name in self._outputs if name in self._values}
        return StepResult(self._program_id, phase, outputs, receipt)

    def _error(self, phase: str, node: str | None, problem: Problem | None) -> ConureError:
        if node is not None:
            error = failure_of(self._failures[node])
            error.add_note(f"in node {node!r} of program {self._program_id}")
            return error
        if problem is not None:
            error = failure_of(problem)
            error.add_note(f"in program {self._program_id}")
            return error
        return RunError(f"run.{phase}", f"program {self._program_id} is {phase}")


def answer_of(step: StepRequest, value: Any) -> PutValue:
    """Return the answer with a step's value.

    Raises:
        TypeError: if the value is not JSON.
        ExpressionError: `expr.number` if it contains NaN or an infinity.
        ProgramError: `client.value_too_large` if the value exceeds the server's request limit.
    """
    # Encoded here, so that a value that cannot be sent fails the step and not the connection.
    encoded = encode_json(value)
    if len(encoded) > MAX_VALUE_BYTES:
        raise ProgramError(
            "client.value_too_large",
            f"the value has {len(encoded):,} bytes as JSON, and a server accepts at most "
            f"{MAX_VALUE_BYTES:,}; return less, or a reference to where the value is stored",
        )
    return PutValue(value=msgspec.Raw(encoded), request_id=step.request_id)


def _failure_answer(step: StepRequest, problem: BaseException) -> PutValue:
    if isinstance(problem, ConureError):
        code, message = problem.code, problem.message
    else:
        code, message = "client.failed", f"{type(problem).__name__}: {problem}"
    error = Problem(code=code, message=f"{step.name}: {message}"[:10_000])
    return PutValue(error=error, request_id=step.request_id)


def check_functions(program: Any, functions: Mapping[str, Function]) -> None:
    """Check that every client step of a program has a function.

    Raises:
        ProgramError: `client.no_function` if one has none.
    """
    for node in iter_nodes(program):
        name = str(node.get("name"))
        if node["op"] == "client" and name not in functions:
            raise ProgramError(
                "client.no_function",
                f"the program has a client step {name!r}, but `functions` has "
                f"{sorted(functions) or 'no entries'}; pass a function of that name",
            )


class _UnknownFunction:
    """Fails a step whose function this client does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, **args: Json) -> Json:
        raise ProgramError(
            "client.no_function",
            f"this client has no function {self._name!r}; pass it in `functions`",
        )
