"""Errors of calls in terms of the application.

A server's error names the node of a program. An application has no nodes: the name is left out, so
that a call fails with the same text alone and in an accelerated chain.
"""

from __future__ import annotations

import re
from typing import Final

from conure.server.program.errors import ConureError

from ...client import NotReadyError

_NODE: Final = re.compile(r"^(?:node [\w.]+: )+")
_TIMEOUTS: Final = frozenset({"program.deadline_exceeded", "run.deadline_exceeded"})


def application_error(problem: BaseException, timeout_s: float | None) -> BaseException:
    """Return the error to raise for a call: `problem`, whose message loses the names of nodes.

    A timeout becomes a `NotReadyError`.

    Args:
        problem: raised by a client or a run.
        timeout_s: of the call.
    """
    if not isinstance(problem, ConureError):
        return problem
    if problem.code in _TIMEOUTS and timeout_s is not None:
        return NotReadyError.after(timeout_s)
    message = _NODE.sub("", problem.message)
    if message != problem.message:
        problem.message, problem.args = message, (message,)
    return problem
