"""Errors of programs, shared by server and clients.

    ConureError
    |-- ProgramError                  the submission is invalid (400) or too large (413)
    |-- PromptError                   a prompt cannot be converted to tokens (400)
    |-- ExpressionError               an expression failed on its values (422)
    |-- NotFoundError                 unknown program, variable, node or session (404)
    |-- ConflictError                 the value or the state conflicts with an earlier one (409)
    |-- UnavailableError              queue full, draining, no engine, no journal (429, 503)
    `-- RunError                      a step failed, was killed, or timed out (424)

A code is stable and dotted (`program.cycle`). A message states what happened, with the value and
what to do. `path` is the position in the submission (`program.nodes[3].prompt[1].input`). A client
raises the class that belongs to the status it received.
"""

from __future__ import annotations


class ConureError(Exception):
    """An error with a stable code that the author of a program can act upon."""

    status: int = 500
    """The HTTP status; an instance may have another one than its class."""

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
        if status is not None:
            self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the message alone.
        return _unpickle, (type(self), self.args, vars(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r}, {self.message!r}, path={self.path!r})"


def _unpickle(
    error_type: type[ConureError], args: tuple[object, ...], fields: dict[str, object]
) -> ConureError:
    error = error_type.__new__(error_type)
    error.args = args
    vars(error).update(fields)
    return error


class ProgramError(ConureError):
    """The submission is not a valid program."""

    status = 400


class PromptError(ConureError):
    """A prompt cannot be converted to tokens of the requested model."""

    status = 400


class ExpressionError(ConureError):
    """An expression failed on its values."""

    status = 422


class NotFoundError(ConureError):
    """The program, variable, node or session is unknown, or belongs to another tenant."""

    status = 404


class ConflictError(ConureError):
    """The value or the state conflicts with an earlier one."""

    status = 409


class UnavailableError(ConureError):
    """The server cannot accept the request now; retry after `retry_after_s`."""

    status = 503


class RunError(ConureError):
    """A step of a running program failed, was killed, or timed out."""

    status = 424


class prefixed_path:  # noqa: N801 - used like a function
    """Prepend the path of a node to the paths of errors that are relative to the node.

    A class, because a graph enters it twice for every node, and a generator takes 4 times as long.
    """

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ProgramError):
            error.path = f"{self._prefix}.{error.path}" if error.path else self._prefix
