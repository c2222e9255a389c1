"""What a client says to the server and how it reads the answers, without any I/O.

Every operation is a *flow*: a generator that yields requests and pauses and receives
replies, so that threads and coroutines run the same one. Knows paths, bodies, problem+json
and when a request may be repeated. Refuses to know sockets, clocks and event streams.

Kept true: a request is repeated only where the server cannot do its work twice: reads,
writes of one value, submissions under an idempotency key, and what was refused before any
work (429, 503) or never reached the server.

    ServerUnreachableError     no answer came, after all retries (`client.unreachable`)
    NotReadyError              the value was not there within the time that was given for it
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import msgspec

from conure.server.program.errors import (
    ConflictError,
    ConureError,
    ExpressionError,
    NotFoundError,
    ProgramError,
    PromptError,
    RunError,
    UnavailableError,
)
from conure.server.program.ir import Append, Json, Options, Program, Submission
from conure.server.program.status import (
    ENDED,
    Accepted,
    Problem,
    ProgramStatus,
    PutValue,
    VariableStatus,
)

T = TypeVar("T")

POLL_S = 20.0
"""One long poll; a longer wait is several of them."""

EVENT_STREAM: Final = "text/event-stream"
EVENT_HEADERS: Final = {"accept": EVENT_STREAM, "accept-encoding": "identity"}


class ServerUnreachableError(UnavailableError):
    """No answer came from the server; `was_sent` tells whether the request may have arrived,
    and `is_known` whether the server has answered this client before.
    """

    def __init__(self, message: str, *, was_sent: bool = False, is_known: bool = True) -> None:
        super().__init__("client.unreachable", message)
        self.was_sent = was_sent
        self.is_known = is_known


class NotReadyError(ConureError, TimeoutError):
    """The variable has no value yet; it may still get one."""

    status = 408


class Request(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    body: bytes | None = None
    query: dict[str, str] = {}  # noqa: RUF012 - a tuple's default; nobody writes into it
    headers: dict[str, str] = {}  # noqa: RUF012
    wait_s: float = 0.0
    """How long the server may rightly take on top of the client's own timeout."""
    repeatable: bool = True
    is_followed: bool = False
    """The answer may be a stream of events, which is left open then."""


class Reply(NamedTuple):
    """One HTTP answer, whole but for a stream of events."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: Any = None
    """The connection on which the events come, if they do."""


class Pause(NamedTuple):
    """Wait this long before going on."""

    delay_s: float


Flow: TypeAlias = Generator[Request | Pause, Reply | None, T]


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, how soon and for how long a request is repeated.

    A server that refuses is asked `max_retries` times again. One that does not answer is asked
    until it was out of reach for `patience_s`, as while it is started again; who never had an
    answer from it is told sooner, after `first_patience_s`: most likely there is none.
    """

    max_retries: int = 4
    """0: nothing is ever repeated."""
    first_s: float = 0.1
    most_s: float = 2.0
    """Between two tries, at most; the pauses before it double."""
    most_asked_s: float = 60.0
    """A Retry-After beyond this is not waited for: the refusal is raised."""
    patience_s: float = 15.0
    first_patience_s: float = 2.0
    noise: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = time.monotonic

    def within(self, wait_s: float) -> Retry:
        """The same for somebody who waits no longer: a break of a moment is still got over."""
        patience_s = min(self.patience_s, max(wait_s, self.first_patience_s))
        return replace(self, patience_s=patience_s)

    def delay_s(self, attempt: int, asked_s: float | None = None) -> float:
        """Seconds before repeat number `attempt` (from 0): jittered, never less than asked."""
        most_s = min(self.most_s, self.first_s * 2.0 ** min(attempt, 60))
        if asked_s is None:
            # Half of it is certain, or an unlucky client knocks many times in no time.
            return self.noise.uniform(most_s / 2, most_s)
        return asked_s + self.noise.uniform(0, most_s) / 4


class Outage:
    """How long a server has been out of reach for one request or stream."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._num_tries = 0
        self._began_s = 0.0

    def over(self) -> None:
        """The server has answered."""
        self._num_tries = 0

    def pause_s(self, failure: ServerUnreachableError) -> float:
        """Seconds to wait before the next try.

        Raises:
            ServerUnreachableError: the failure, if it went on for long enough.
        """
        retry, now_s = self._retry, self._retry.clock()
        if self._num_tries == 0:
            self._began_s = now_s
        patience_s = retry.patience_s if failure.is_known else retry.first_patience_s
        left_s = patience_s - (now_s - self._began_s)
        if left_s <= 0 or retry.max_retries == 0:
            raise failure
        delay_s = min(left_s, retry.delay_s(self._num_tries))
        self._num_tries += 1
        return delay_s


def repeat(request: Request, retry: Retry) -> Flow[Reply]:
    """Send a request until it is answered, refused for good, or out of patience."""
    num_refusals = 0
    outage = Outage(retry)
    while True:
        try:
            reply = yield request
            assert reply is not None
        except ServerUnreachableError as failure:
            if failure.was_sent and not request.repeatable:
                raise
            yield Pause(outage.pause_s(failure))
            continue
        outage.over()
        if reply.status not in (429, 502, 503, 504) or num_refusals >= retry.max_retries:
            return reply
        if reply.status in (502, 504) and not request.repeatable:
            return reply
        if _is_verdict(reply):
            return reply
        asked_s = retry_after_s(reply.headers)
        if asked_s is not None and asked_s > retry.most_asked_s:
            return reply
        yield Pause(retry.delay_s(num_refusals, asked_s))
        num_refusals += 1


def ask(request: Request, retry: Retry, shape: type[T]) -> Flow[T]:
    """Send a request and read its answer as `shape`.

    Raises:
        ConureError: the class that belongs to the answer's status, with the server's code.
    """
    return _read(request, (yield from repeat(request, retry)), shape)


def _read(request: Request, reply: Reply, shape: type[T]) -> T:
    if reply.status >= 400:
        raise error_of(reply)
    try:
        return msgspec.json.decode(reply.body, type=shape)
    except msgspec.MsgspecError as problem:
        raise ConureError(
            "client.answer",
            f"{request.method} {request.path} answered {reply.status} with something that is not "
            f"{shape.__name__}: {problem}; is this a Conure server?",
            status=reply.status,
        ) from problem


def submission_body(
    program: Program | Submission | Mapping[str, Json],
    *,
    inputs: Mapping[str, Json] | None = None,
    objectives: Mapping[str, Json] | None = None,
    options: Options | Mapping[str, Json] | None = None,
    is_open: bool = False,
) -> dict[str, Any]:
    """The JSON of a submission, from a program or from a submission that is completed."""
    if isinstance(program, Submission):
        body: dict[str, Any] = dict(msgspec.to_builtins(program))
    elif isinstance(program, Mapping) and "program" in program:
        body = dict(program)
    else:
        body = {"program": program}
    if inputs:
        body["inputs"] = {**body.get("inputs", {}), **inputs}
    if objectives:
        body["objectives"] = {**body.get("objectives", {}), **objectives}
    if options is not None:
        given = msgspec.to_builtins(options) if isinstance(options, Options) else options
        body["options"] = {**body.get("options", {}), **given}
    if is_open:
        body["open"] = True
    return body


def submit(body: Mapping[str, Any], retry: Retry, *, key: str | None) -> Flow[Accepted]:
    """Submit a program; without a key one is drawn, so that a lost answer costs nothing."""
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    request = Request("POST", "/v1/programs", msgspec.json.encode(body), headers=headers)
    return (yield from ask(request, retry, Accepted))


def follow(
    body: Mapping[str, Any], retry: Retry, *, key: str | None, query: Mapping[str, Any]
) -> Flow[tuple[Accepted, Any]]:
    """Submit a program, and have its events as the answer: the connection on which they come.

    None comes on it where the server only says that it took the program.
    """
    headers = {"Idempotency-Key": key or uuid.uuid4().hex, **EVENT_HEADERS}
    request = Request(
        "POST",
        "/v1/programs",
        msgspec.json.encode(body),
        query=dict(query),
        headers=headers,
        is_followed=True,
    )
    reply = yield from repeat(request, retry)
    if reply.stream is None:
        return _read(request, reply, Accepted), None
    url = reply.headers["location"]
    outputs = msgspec.to_builtins(body["program"]).get("outputs", [])
    name = unquote(url.rpartition("/")[2])
    return Accepted(id=name, status="accepted", outputs=outputs, url=url), reply.stream


def get(
    program: str, variable: str, retry: Retry, *, wait_s: float | None, clock: Callable[[], float]
) -> Flow[Json]:
    """Wait for the value of a variable; None waits as long as it takes."""
    path = f"{program_path(program)}/variables/{quote(variable, safe='')}"
    end = None if wait_s is None else clock() + wait_s
    while True:
        poll_s = POLL_S if end is None else max(0.0, min(POLL_S, end - clock()))
        query = {"wait_s": f"{poll_s:.3f}"}
        request = Request("GET", path, query=query, wait_s=poll_s)
        patience = retry if end is None else retry.within(end - clock())
        found = yield from ask(request, patience, VariableStatus)
        if found.value is not msgspec.UNSET:
            return found.value
        if found.status in ENDED:
            raise absence(variable, found)
        if end is not None and clock() >= end:
            raise NotReadyError(
                "client.not_ready",
                f"{variable!r} is {found.status} after {wait_s:g} s; it may still get a value",
            )


def status(program: str, retry: Retry) -> Flow[ProgramStatus]:
    """What is known about a program."""
    return (yield from ask(Request("GET", program_path(program)), retry, ProgramStatus))


def accepted_of(status: ProgramStatus) -> Accepted:
    """What the answer to a program's submission was, as far as a handle needs it."""
    url = program_path(status.id)
    return Accepted(id=status.id, status=status.status, outputs=status.outputs, url=url)


def cancel(program: str, retry: Retry) -> Flow[ProgramStatus]:
    """Stop a program."""
    return (yield from ask(Request("DELETE", program_path(program)), retry, ProgramStatus))


def put(program: str, variable: str, value: PutValue, retry: Retry) -> Flow[VariableStatus]:
    """Give a variable its value, or report why it gets none."""
    path = f"{program_path(program)}/variables/{quote(variable, safe='')}"
    request = Request("PUT", path, msgspec.json.encode(value))
    return (yield from ask(request, retry, VariableStatus))


def answer(
    program: str,
    variable: str,
    value: PutValue,
    retry: Retry,
    *,
    refused: Callable[[ConureError], PutValue],
) -> Flow[VariableStatus]:
    """Answer a client step; for a value that the server does not take, what `refused` makes."""
    try:
        return (yield from put(program, variable, value, retry))
    except (ConflictError, NotFoundError, UnavailableError):
        raise  # answered before, or the program is gone, or the server
    except ConureError as problem:
        failure = refused(problem)
    return (yield from put(program, variable, failure, retry))


def append(program: str, more: Append | Mapping[str, Json], retry: Retry) -> Flow[ProgramStatus]:
    """Add nodes to an open program, or close it."""
    path = f"{program_path(program)}/nodes"
    request = Request("POST", path, msgspec.json.encode(more), repeatable=False)
    return (yield from ask(request, retry, ProgramStatus))


def get_json(path: str, retry: Retry) -> Flow[Json]:
    """Read any page of the server as JSON."""
    reply = yield from repeat(Request("GET", path), retry)
    if reply.status >= 400:
        raise error_of(reply)
    return msgspec.json.decode(reply.body)


def program_path(program: str) -> str:
    """Where a program lives on the server."""
    return f"/v1/programs/{quote(program, safe='')}"


def absence(variable: str, found: VariableStatus) -> ConureError:
    """Why a variable that has ended has no value."""
    if found.error is not msgspec.UNSET:
        return failure_of(found.error)
    return RunError(f"run.{found.status}", f"{variable!r} is {found.status} and has no value")


def failure_of(problem: Problem) -> ConureError:
    """The error of a step, rebuilt from what an event or a status says of it."""
    return _classed(RunError.status, problem.code)(problem.code, problem.message or problem.code)


def error_of(reply: Reply) -> ConureError:
    """The error that an answer with status 400 or more stands for."""
    try:
        problem = msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        problem = None
    if not isinstance(problem, dict):
        problem = {}
    code = str(problem.get("code") or f"http.{reply.status}")
    text = problem.get("detail") or problem.get("title") or _excerpt(reply.body)
    path = problem.get("path")
    return _classed(reply.status, code)(
        code,
        str(text or f"the server answered {reply.status}"),
        path=path if isinstance(path, str) else None,
        retry_after_s=retry_after_s(reply.headers),
        status=reply.status,
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait, if it says so in seconds."""
    text = headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        return None


def _classed(status: int, code: str) -> type[ConureError]:
    if code.startswith("prompt."):
        return PromptError
    if code.startswith("expr."):
        return ExpressionError
    classes: dict[int, type[ConureError]] = {
        400: ProgramError,
        404: NotFoundError,
        409: ConflictError,
        422: ExpressionError,
        424: RunError,
        429: UnavailableError,
        503: UnavailableError,
    }
    return classes.get(status, ConureError)


def _is_verdict(reply: Reply) -> bool:
    # A variable that failed for good may carry 503 as its reason; asking again changes nothing.
    return b'"variable_status"' in reply.body


def _excerpt(body: bytes) -> str:
    return body[:300].decode(errors="replace").strip()
