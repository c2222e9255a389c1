"""The client's own errors, and the conversion of error replies and problems to exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self

import msgspec

from conure.server.program.decoding.typed_json import decode_record
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
from conure.server.program.status import Problem, VariableStatus

from .records import Reply


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
    def after(cls, timeout_s: float) -> Self:
        """Return the error of a model call that has no answer within its time limit."""
        return cls("client.not_ready", f"the call has no answer after {timeout_s:g} s")


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """The error in a reply of OpenAI's API. Other servers send numbers as codes."""

    message: str | None = None
    code: str | int | None = None
    param: str | None = None


class ProblemBody(msgspec.Struct, frozen=True):
    """The fields of a problem+json body that the client reads."""

    code: str = ""
    detail: str = ""
    title: str = ""
    path: str | None = None
    variable_status: str | None = None
    """Set if the requested variable has ended without a value."""
    error: OpenAIErrorBody | str | None = None
    """On the routes of OpenAI's API, this field replaces all others."""


_CLASSES: Final[Mapping[int, type[ConureError]]] = {
    400: ProgramError,
    404: NotFoundError,
    409: ConflictError,
    413: ProgramError,
    422: ExpressionError,
    424: RunError,
    429: UnavailableError,
    503: UnavailableError,
}
"""The class of the error for each status of a reply."""


def missing_value_error(variable: str, status: VariableStatus) -> ConureError:
    """Return the error of a variable that has ended without a value."""
    if status.error is not msgspec.UNSET:
        return failure_of(status.error)
    return RunError(
        f"run.{status.status}", f"variable {variable!r} is {status.status} and has no value"
    )


def failure_of(problem: Problem) -> ConureError:
    """Return the error that a problem in an event or a status describes."""
    # An event or a status contains no HTTP status; its problem is a failure of the run.
    error_class = _error_class(RunError.status, problem.code)
    return error_class(problem.code, problem.message or problem.code)


def error_of(reply: Reply) -> ConureError:
    """Return the error that a reply with status 400 or higher describes."""
    problem = problem_of(reply)
    code, message = problem.code, problem.detail or problem.title
    if not code:  # every error of a Conure server has a code
        code = f"http.{reply.status}"
        message = foreign_reply_message(reply, f" and the message {message!r}" if message else "")
    return _error_class(reply.status, code)(
        code,
        message or f"the server answered {reply.status}",
        path=problem.path,
        retry_after_s=retry_after_s(reply.headers),
        status=reply.status,
    )


def problem_of(reply: Reply) -> ProblemBody:
    """Return the problem+json or OpenAI error in a body; an empty problem if there is neither."""
    try:
        body = decode_record(reply.body, ProblemBody)
    except msgspec.DecodeError:
        return ProblemBody()
    if body.error is None or body.code:
        return body
    error = body.error
    if isinstance(error, str):
        return ProblemBody(detail=error)
    code = error.code if isinstance(error.code, str) else ""
    return ProblemBody(code=code, detail=error.message or "", path=error.param)


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
    return _CLASSES.get(status, ConureError)


def foreign_reply_message(reply: Reply, observed: str) -> str:
    """Return the message on a reply that is not in the format of a Conure server."""
    kind = reply.headers.get("content-type", "").partition(";")[0] or "no content type"
    software = f" ({reply.headers['server']})" if "server" in reply.headers else ""
    return (
        f"{reply.url or 'the server'}{software} answered with status {reply.status}, {kind}"
        f"{observed}; is this a Conure server? `conure serve` prints its address"
    )
