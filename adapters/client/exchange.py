"""Requests, replies and retries of the client, without I/O.

Every operation is a *flow*: a generator that yields requests and sleeps and receives replies, so
that `Client` and `AsyncClient` run the same code.

Responsibility: paths, bodies, problem+json, retries.
Out of scope: sockets, event streams.
Invariants: a request is repeated only if the server cannot do its work twice: reads, writes of one
value, submissions under an idempotency key, and requests that were refused before any work (429,
503) or never reached the server.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar
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
from conure.server.program.explanation.records import ProgramExplanation
from conure.server.program.ir import (
    Append,
    Json,
    Options,
    Program,
    SourceSubmission,
    Submission,
)
from conure.server.program.procedures import RunProcedure, StoredProcedure
from conure.server.program.status import (
    ENDED,
    Accepted,
    Problem,
    ProgramPage,
    ProgramStatus,
    PutValue,
    VariableStatus,
)

from .json_encoding import encode_json

T = TypeVar("T")

POLL_S = 20.0
"""Duration of one long poll; a longer wait is split into several."""

EMBEDDING_BATCH: Final = 64
"""Texts of one request."""
EVENT_STREAM: Final = "text/event-stream"
EVENT_HEADERS: Final = {"accept": EVENT_STREAM, "accept-encoding": "identity"}


class ServerUnreachableError(UnavailableError):
    """The server did not answer (code `client.unreachable`).

    Attributes:
        was_sent: the request may have reached the server.
        is_known: the server has answered this client before.
    """

    def __init__(self, message: str, *, was_sent: bool = False, is_known: bool = True) -> None:
        super().__init__("client.unreachable", message)
        self.was_sent = was_sent
        self.is_known = is_known


class NotReadyError(ConureError, TimeoutError):
    """The variable got no value within the given time; it may still get one."""

    status = 408

    @classmethod
    def after(cls, timeout_s: float | None) -> Self:
        """Return the error of a model call."""
        return cls("client.not_ready", f"the call has no answer after {timeout_s:g} s")


class Request(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    body: bytes | None = None
    query: dict[str, str] = {}  # noqa: RUF012 - never written to
    headers: dict[str, str] = {}  # noqa: RUF012
    wait_s: float = 0.0
    """How long the server may hold the request, on top of the client's timeout."""
    repeatable: bool = True
    accepts_stream: bool = False
    """The reply may be an event stream, which then stays open."""


class Reply(NamedTuple):
    """One HTTP reply, read completely unless it is an event stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: Any = None
    """The open response, if it is an event stream."""
    url: str = ""
    """The address that the reply came from, without the query."""


class Sleep(NamedTuple):
    """A pause of the flow."""

    delay_s: float


Submittable: TypeAlias = Program | Submission | SourceSubmission | Mapping[str, Json] | str
"""A program or a complete submission, as a record or as JSON, or a text in the decoder language."""

Flow: TypeAlias = Generator[Request | Sleep, Reply | None, T]


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, how soon and for how long a request is repeated.

    A refused request (429, 502, 503, 504) is repeated up to `max_retries` times. A program that a
    busy server refuses (`queue.full`) is submitted again when the server asks for it, until
    `busy_timeout_s` have passed. A request without an answer is repeated until the server was
    unreachable for `unreachable_timeout_s`, long enough for a restart. A server that never answered
    this client gets `first_patience_s` only, as it is most likely not running.
    """

    max_retries: int = 4
    """0: never repeat."""
    base_delay_s: float = 0.1
    """Before the first retry; doubles with each further one."""
    max_delay_s: float = 2.0
    most_asked_s: float = 60.0
    """Longest Retry-After to wait for; beyond it the refusal is raised at once."""
    busy_timeout_s: float = 600.0
    unreachable_timeout_s: float = 15.0
    first_patience_s: float = 2.0
    noise: random.Random = field(default_factory=random.Random)
    """Source of the jitter."""
    clock: Callable[[], float] = time.monotonic

    def within(self, wait_s: float) -> Retry:
        """Return this policy for a caller that waits at most `wait_s`.

        `first_patience_s` stays the minimum, to survive a short interruption.
        """
        timeout_s = min(self.unreachable_timeout_s, max(wait_s, self.first_patience_s))
        return replace(self, unreachable_timeout_s=timeout_s)

    def delay_s(self, attempt: int, retry_after_s: float | None = None) -> float:
        """Return the jittered delay before retry `attempt` (from 0), at least `retry_after_s`."""
        max_s = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(attempt, 60))
        if retry_after_s is None:
            # At least half, so that no run of short draws spends all retries at once.
            return self.noise.uniform(max_s / 2, max_s)
        return retry_after_s + self.noise.uniform(0, max_s) / 4


class OutageTimer:
    """Measures how long a server has been unreachable for one request or stream."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self.num_tries = 0
        """Tries since the server was lost."""
        self._start_s = 0.0

    def reset(self) -> None:
        """Record that the server has answered."""
        self.num_tries = 0

    def next_delay_s(self, failure: ServerUnreachableError) -> float:
        """Return the delay before the next try.

        Raises:
            ServerUnreachableError: `failure`, if the outage has lasted too long.
        """
        retry, now_s = self._retry, self._retry.clock()
        if self.num_tries == 0:
            self._start_s = now_s
        timeout_s = retry.unreachable_timeout_s if failure.is_known else retry.first_patience_s
        left_s = timeout_s - (now_s - self._start_s)
        if left_s <= 0 or retry.max_retries == 0:
            raise failure
        delay_s = min(left_s, retry.delay_s(self.num_tries))
        self.num_tries += 1
        return delay_s


class OpenAIError(msgspec.Struct, frozen=True):
    """The error of a route in OpenAI's shape."""

    message: str = ""
    code: str | None = None
    param: str | None = None


class ProblemBody(msgspec.Struct, frozen=True):
    """The fields of a problem+json body that the client reads."""

    code: str = ""
    detail: str = ""
    title: str = ""
    path: str | None = None
    variable_status: str | None = None
    """Set if the requested variable has ended without a value."""
    error: OpenAIError | None = None
    """Instead of the other fields, on the routes of OpenAI's API."""


def send(request: Request, retry: Retry) -> Flow[Reply]:
    """Send a request until it gets a final reply or the retries are used up."""
    num_refusals, num_busy, busy_until_s = 0, 0, 0.0
    outage = OutageTimer(retry)
    while True:
        try:
            reply = yield request
            assert reply is not None
        except ServerUnreachableError as failure:
            if failure.was_sent and not request.repeatable:
                raise
            yield Sleep(outage.next_delay_s(failure))
            continue
        outage.reset()
        if is_busy(reply, retry):
            now_s = retry.clock()
            busy_until_s = busy_until_s if num_busy else now_s + retry.busy_timeout_s
            delay_s = retry.delay_s(num_busy, retry_after_s(reply.headers))
            if now_s + delay_s > busy_until_s:
                return reply
            yield Sleep(delay_s)
            num_busy += 1
            continue
        if not is_retryable(reply, retry, num_refusals):
            return reply
        if reply.status in (502, 504) and not request.repeatable:
            return reply
        yield Sleep(retry.delay_s(num_refusals, retry_after_s(reply.headers)))
        num_refusals += 1


def is_busy(reply: Reply, retry: Retry) -> bool:
    """Return whether the server has too much work and says when to try again."""
    asked_s = retry_after_s(reply.headers)
    return (
        reply.status == 429
        and retry.max_retries > 0
        and asked_s is not None
        and asked_s <= retry.most_asked_s
        and problem_of(reply).code == "queue.full"
    )


def is_retryable(reply: Reply, retry: Retry, num_refusals: int) -> bool:
    """Return whether a later request may succeed, and the policy allows one."""
    if reply.status not in (429, 502, 503, 504) or num_refusals >= retry.max_retries:
        return False
    if problem_of(reply).variable_status is not None:
        return False  # the status is the reason of a failed variable, which never changes
    asked_s = retry_after_s(reply.headers)
    return asked_s is None or asked_s <= retry.most_asked_s


def fetch(request: Request, retry: Retry, record: type[T]) -> Flow[T]:
    """Send a request and decode its reply as `record`.

    Raises:
        ConureError: the class that belongs to the reply's status, with the server's code.
    """
    return _decode((yield from send(request, retry)), record)


def _decode(reply: Reply, record: type[T]) -> T:
    if reply.status >= 400:
        raise error_of(reply)
    try:
        return msgspec.json.decode(reply.body, type=record)
    except msgspec.MsgspecError as problem:
        message = _foreign(reply, f", and not with a {record.__name__.lstrip('_')} ({problem})")
        raise ConureError("client.answer", message, status=reply.status) from problem


def _foreign(reply: Reply, difference: str) -> str:
    """Return the message on a reply that is not in the format of a Conure server."""
    kind = reply.headers.get("content-type", "").partition(";")[0] or "no content type"
    software = f" ({reply.headers['server']})" if "server" in reply.headers else ""
    return (
        f"{reply.url or 'the server'}{software} answered with status {reply.status}, {kind}"
        f"{difference}; is this a Conure server? `conure serve` prints its address"
    )


def submission_body(
    program: Submittable,
    *,
    inputs: Mapping[str, Json] | None = None,
    objectives: Mapping[str, Json] | None = None,
    options: Options | Mapping[str, Json] | None = None,
    is_open: bool = False,
) -> dict[str, Any]:
    """Return the JSON of a submission: `program`, or a submission completed by the others."""
    if isinstance(program, Submission | SourceSubmission):
        body: dict[str, Any] = dict(msgspec.to_builtins(program))
    elif isinstance(program, str):
        body = {"source": program}
    elif isinstance(program, Mapping) and ("program" in program or "source" in program):
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
    """Submit a program. Without a key a random one is used, which makes retries safe."""
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    request = Request("POST", "/v1/programs", encode_json(body), headers=headers)
    return (yield from fetch(request, retry, Accepted))


def explain(body: Mapping[str, Any], retry: Retry) -> Flow[ProgramExplanation]:
    """Explain a program without running it."""
    request = Request("POST", "/v1/programs/explain", encode_json(body))
    return (yield from fetch(request, retry, ProgramExplanation))


def explain_run(program: str, retry: Retry) -> Flow[ProgramExplanation]:
    """Explain a submitted program with its figures."""
    request = Request("GET", f"{program_path(program)}/explain")
    return (yield from fetch(request, retry, ProgramExplanation))


def trace(program: str, retry: Retry, *, token_ids: bool) -> Flow[list[dict[str, Json]]]:
    """Read the spans of a program's trace.

    Raises:
        ConureError: also if the trace ends with an error.
    """
    query = {"token_ids": "true"} if token_ids else {}
    reply = yield from send(Request("GET", f"{program_path(program)}/trace", query=query), retry)
    if reply.status >= 400:
        raise error_of(reply)
    spans = [msgspec.json.decode(line, type=dict[str, Any]) for line in reply.body.splitlines()]
    if spans and "error" in spans[-1]:
        raise failure_of(msgspec.convert(spans[-1]["error"], Problem))
    return spans


def put_procedure(
    name: str,
    program: Submittable,
    retry: Retry,
    *,
    alias: str | None,
    pin_s: float | None = None,
) -> Flow[StoredProcedure]:
    """Store a version of a procedure."""
    given = submission_body(program)
    extra = [key for key in ("inputs", "objectives", "options", "open") if given.get(key)]
    if extra:
        message = f"a procedure is stored without `{extra[0]}`: pass it to `run_procedure`"
        raise ProgramError("procedure.argument", message, path=extra[0])
    body: dict[str, Any] = {
        key: given[key] for key in ("program", "source", "language") if key in given
    }
    fields: dict[str, Any] = {**body, "alias": alias}
    if pin_s is not None:
        fields["pin_s"] = pin_s
    request = Request("PUT", _procedure_path(name), msgspec.json.encode(fields))
    return (yield from fetch(request, retry, StoredProcedure))


def put_alias(name: str, alias: str, version: str, retry: Retry) -> Flow[StoredProcedure]:
    """Let an alias name another version."""
    request = Request("PUT", _alias_path(name, alias), msgspec.json.encode({"version": version}))
    return (yield from fetch(request, retry, StoredProcedure))


def delete_procedure(reference: str, retry: Retry) -> Flow[None]:
    """Remove one version of a procedure."""
    yield from _delete(_procedure_path(reference), retry)


def delete_alias(name: str, alias: str, retry: Retry) -> Flow[None]:
    """Remove an alias of a procedure."""
    yield from _delete(_alias_path(name, alias), retry)


def _delete(path: str, retry: Retry) -> Flow[None]:
    # Not repeatable: if only the answer was lost, a second request would report `not found`.
    reply = yield from send(Request("DELETE", path, repeatable=False), retry)
    if reply.status >= 400:
        raise error_of(reply)


def procedure(reference: str, retry: Retry) -> Flow[StoredProcedure]:
    """Read one version of a procedure."""
    return (yield from fetch(Request("GET", _procedure_path(reference)), retry, StoredProcedure))


class _ProcedurePage(msgspec.Struct, frozen=True):
    procedures: list[StoredProcedure]


def list_procedures(retry: Retry) -> Flow[list[StoredProcedure]]:
    """Read the list of all versions of all procedures."""
    return (yield from fetch(Request("GET", "/v1/procedures"), retry, _ProcedurePage)).procedures


def run_procedure(
    reference: str, body: RunProcedure, retry: Retry, *, key: str | None
) -> Flow[Accepted]:
    """Submit a procedure as a program."""
    request = Request(
        "POST",
        f"{_procedure_path(reference)}/run",
        msgspec.json.encode(body),
        headers={"Idempotency-Key": key or uuid.uuid4().hex},
    )
    return (yield from fetch(request, retry, Accepted))


def submit_attached(
    body: Mapping[str, Any], retry: Retry, *, key: str | None, query: Mapping[str, Any]
) -> Flow[tuple[Accepted, Any]]:
    """Submit a program, and request its events as the reply.

    Returns:
        The program, and the open response with its events; None if the server only accepted it.
    """
    headers = {"Idempotency-Key": key or uuid.uuid4().hex, **EVENT_HEADERS}
    request = Request(
        "POST",
        "/v1/programs",
        encode_json(body),
        query=dict(query),
        headers=headers,
        accepts_stream=True,
    )
    reply = yield from send(request, retry)
    if reply.stream is None:
        return _decode(reply, Accepted), None
    url = reply.headers["location"]
    outputs = msgspec.to_builtins(body["program"]).get("outputs", [])
    id_ = unquote(url.rpartition("/")[2])
    return Accepted(id=id_, status="accepted", outputs=outputs, url=url), reply.stream


def get(
    program: str, variable: str, retry: Retry, *, wait_s: float | None, clock: Callable[[], float]
) -> Flow[Json]:
    """Wait for the value of a variable, without limit if `wait_s` is None."""
    path = _variable_path(program, variable)
    end_s = None if wait_s is None else clock() + wait_s
    while True:
        poll_s = POLL_S if end_s is None else max(0.0, min(POLL_S, end_s - clock()))
        request = Request("GET", path, query={"wait_s": f"{poll_s:.3f}"}, wait_s=poll_s)
        poll_retry = retry if end_s is None else retry.within(end_s - clock())
        status = yield from fetch(request, poll_retry, VariableStatus)
        if status.value is not msgspec.UNSET:
            return status.value
        if status.status in ENDED:
            raise missing_value_error(variable, status)
        if end_s is not None and clock() >= end_s:
            raise NotReadyError(
                "client.not_ready",
                f"variable {variable!r} is {status.status} after {wait_s:g} s and may still get "
                "a value; call get() again, or with a longer wait_s",
            )


def status(program: str, retry: Retry) -> Flow[ProgramStatus]:
    """Return the status of a program."""
    return (yield from fetch(Request("GET", program_path(program)), retry, ProgramStatus))


def accepted_of(status: ProgramStatus) -> Accepted:
    """Rebuild the reply to a program's submission from its status."""
    url = program_path(status.id)
    return Accepted(id=status.id, status=status.status, outputs=status.outputs, url=url)


def list_programs(
    retry: Retry, *, status: str | None, cursor: str | None, limit: int
) -> Flow[ProgramPage]:
    """Read a page of the list of programs."""
    query = {"status": status, "cursor": cursor, "limit": str(limit)}
    given = {key: value for key, value in query.items() if value is not None}
    return (yield from fetch(Request("GET", "/v1/programs", query=given), retry, ProgramPage))


def cancel(program: str, retry: Retry) -> Flow[ProgramStatus]:
    """Cancel a program."""
    return (yield from fetch(Request("DELETE", program_path(program)), retry, ProgramStatus))


def put(program: str, variable: str, value: PutValue, retry: Retry) -> Flow[VariableStatus]:
    """Write a variable's value, or the reason why it gets none."""
    request = Request("PUT", _variable_path(program, variable), encode_json(value))
    return (yield from fetch(request, retry, VariableStatus))


def answer(
    program: str,
    variable: str,
    value: PutValue,
    retry: Retry,
    *,
    refused: Callable[[ConureError], PutValue],
) -> Flow[VariableStatus]:
    """Answer a client step. If the server rejects the value, send what `refused` returns."""
    try:
        return (yield from put(program, variable, value, retry))
    except (ConflictError, NotFoundError, UnavailableError):
        raise  # the step was answered before, the program has ended, or the server is down
    except ConureError as problem:
        failure = refused(problem)
    return (yield from put(program, variable, failure, retry))


def append(
    program: str, more: Append | Mapping[str, Json], retry: Retry, *, wait_s: float = 0.0
) -> Flow[ProgramStatus]:
    """Add nodes to an open program, or close it."""
    path = f"{program_path(program)}/nodes"
    query = {"wait_s": f"{wait_s:g}"} if wait_s else {}
    body = encode_json(more)
    request = Request("POST", path, body, query=query, wait_s=wait_s, repeatable=False)
    return (yield from fetch(request, retry, ProgramStatus))


class _ModelPage(msgspec.Struct, frozen=True):
    data: list[dict[str, Json]]


def list_models(retry: Retry) -> Flow[list[dict[str, Json]]]:
    """Read the list of models."""
    return (yield from fetch(Request("GET", "/v1/models"), retry, _ModelPage)).data


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


def tokenize(body: Json, retry: Retry) -> Flow[list[int]]:
    """Return the token ids of a prompt."""
    request = Request("POST", "/v1/tokenize", encode_json(body))
    return (yield from fetch(request, retry, _Tokens)).tokens


class _Embedding(msgspec.Struct, frozen=True):
    embedding: list[float]


class _EmbeddingPage(msgspec.Struct, frozen=True):
    data: list[_Embedding]


def embed(
    texts: Sequence[str], retry: Retry, *, model: str, dimensions: int | None
) -> Flow[list[list[float]]]:
    """Return the embeddings of texts, in requests of bounded size."""
    vectors: list[list[float]] = []
    for begin in range(0, len(texts), EMBEDDING_BATCH):
        body: dict[str, Json] = {
            "model": model,
            "input": list(texts[begin : begin + EMBEDDING_BATCH]),
        }
        if dimensions is not None:
            body["dimensions"] = dimensions
        request = Request("POST", "/v1/embeddings", encode_json(body))
        page = yield from fetch(request, retry, _EmbeddingPage)
        vectors += [each.embedding for each in page.data]
    return vectors


def _procedure_path(reference: str) -> str:
    return f"/v1/procedures/{quote(reference, safe='')}"


def _alias_path(name: str, alias: str) -> str:
    return f"{_procedure_path(name)}/aliases/{quote(alias, safe='')}"


def program_path(program: str) -> str:
    """Return the URL path of a program."""
    return f"/v1/programs/{quote(program, safe='')}"


def _variable_path(program: str, variable: str) -> str:
    return f"{program_path(program)}/variables/{quote(variable, safe='')}"


def missing_value_error(variable: str, status: VariableStatus) -> ConureError:
    """Return the error of a variable that has ended without a value."""
    if status.error is not msgspec.UNSET:
        return failure_of(status.error)
    return RunError(
        f"run.{status.status}", f"variable {variable!r} is {status.status} and has no value"
    )


def failure_of(problem: Problem) -> ConureError:
    """Return the error that a problem in an event or a status describes."""
    return _error_class(RunError.status, problem.code)(
        problem.code, problem.message or problem.code
    )


def error_of(reply: Reply) -> ConureError:
    """Return the error that a reply with status 400 or higher describes."""
    problem = problem_of(reply)
    code, message = problem.code, problem.detail or problem.title
    if not code:  # every error of a Conure server has a code
        code = f"http.{reply.status}"
        message = _foreign(reply, f" and the message {message!r}" if message else "")
    return _error_class(reply.status, code)(
        code,
        message or f"the server answered {reply.status}",
        path=problem.path,
        retry_after_s=retry_after_s(reply.headers),
        status=reply.status,
    )


def problem_of(reply: Reply) -> ProblemBody:
    """Return the problem+json body of a reply; an empty one if the body is something else."""
    try:
        body = msgspec.json.decode(reply.body, type=ProblemBody)
    except msgspec.DecodeError:
        return ProblemBody()
    if body.error is None or body.code:
        return body
    error = body.error
    return ProblemBody(code=error.code or "", detail=error.message, path=error.param)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the Retry-After header if it is given in seconds."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None


def _error_class(status: int, code: str) -> type[ConureError]:
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
