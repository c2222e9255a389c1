"""Conversion of the server's errors to errors that an application can understand.

A server's error names a node of a program. An application contains no nodes, so the name is
removed: a call fails with the same message alone and in an accelerated application.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from conure.server.program.errors import ConureError

from .client import NotReadyError

_NODE: Final = re.compile(r"^(?:node [\w.]+: )+")
_TIMEOUTS: Final = frozenset(
    {"client.not_ready", "program.deadline_exceeded", "run.deadline_exceeded"}
)
"""The client and the server measure the time of a call; either may report its end first."""


@contextlib.contextmanager
def application_errors(timeout_s: float | None) -> Iterator[None]:
    """Raise the errors of a call without the names of nodes in their messages.

    A timeout becomes a `NotReadyError`.

    Args:
        timeout_s: time limit of the call.
    """
    try:
        yield
    except ConureError as problem:
        if problem.code in _TIMEOUTS and timeout_s is not None:
            raise NotReadyError.after(timeout_s) from problem
        message = _NODE.sub("", problem.message)
        if message != problem.message:
            problem.message, problem.args = message, (message,)
        raise
