"""What a user can do wrong with a program, and what can go wrong while one runs.

    ConureError                       code, status, message, path, retryable
    |-- ProgramError                  the submission cannot be a program (400)
    |-- PromptError                   one prompt cannot become tokens (400)
    |-- ExpressionError               an expression failed on its values (422)
    |-- NotFoundError                 no such program, variable, node or session (404)
    |-- ConflictError                 the value or the state stands already (409)
    |-- UnavailableError              not now: queue full, draining, no engine, no disk (429, 503)
    `-- RunError                      a step failed, was killed, or ran out of time (424)

A code is stable and dotted (`program.cycle`); a message says what happened, the value,
and what to do. `path` is a JSON pointer-like path into what was submitted
(`program.nodes[3].prompt[1].input`). Both sides share this tree: the client raises the
class that belongs to the status it received.
"""

from __future__ import annotations

from typing import ClassVar


class ConureError(Exception):
    """A failure with a stable code that a program's author can act upon."""

    status: ClassVar[int] = 500

    def __init__(
        self,
        code: str,
        message: str,
        *,
        path: str | None = None,
        retry_after_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.retry_after_s = retry_after_s
        self.http_status = type(self).status if status is None else status

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r}, {self.message!r}, path={self.path!r})"


class ProgramError(ConureError):
    """The submission cannot be a program."""

    status = 400


class PromptError(ConureError):
    """One prompt cannot become tokens for the model that was asked for."""

    status = 400


class ExpressionError(ConureError):
    """An expression failed on the values it was given."""

    status = 422


class NotFoundError(ConureError):
    """There is no such program, variable, node or session (or it is another tenant's)."""

    status = 404


class ConflictError(ConureError):
    """What was to be written stands already, with another content."""

    status = 409


class UnavailableError(ConureError):
    """The server cannot take this now; `retry_after_s` says when to ask again."""

    status = 503


class RunError(ConureError):
    """A step of a running program failed, was killed, or ran out of time."""

    status = 424
