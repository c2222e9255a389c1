"""Conversion of the server's errors to errors that an application can understand.

A server's error names a node of a program. An application contains no nodes, so the name is
removed: a call fails with the same message alone and in an accelerated chain.
"""

from __future__ import annotations

import re
from typing import Final

from conure.server.program.errors import ConureError

from ...client import NotReadyError

_NODE: Final = re.compile(r"^(?:node [\w.]+: )+")
_TIMEOUTS: Final = frozenset({"program.deadline_exceeded", "run.deadline_exceeded"})


def application_error(problem: BaseException, timeout_s: float | None) -> BaseException:
    """Return the error to raise for a call: `problem` without the names of nodes in its message.

    A timeout becomes a `NotReadyError`.

    Args:
        problem: raised by a client or a run.
        timeout_s: time limit of the call.
    """
    if not isinstance(problem, ConureError):
        return problem
    if problem.code in _TIMEOUTS and timeout_s is not None:
        return NotReadyError.after(timeout_s)
    message = _NODE.sub("", problem.message)
    if message != problem.message:
        problem.message, problem.args = message, (message,)
    return problem
