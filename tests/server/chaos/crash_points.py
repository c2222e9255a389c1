"""Run `conure`, and kill it at a chosen point: `python -m ...crash_points POINT N serve ...`.

The process sends itself SIGKILL before, after or in the middle of the N-th call of a function at
which a crash is most likely to do harm.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from conure.cli.main import main
from conure.server.runtime.node_context import NodeContext
from conure.server.runtime.persistence.event_stream import EventStream
from conure.server.runtime.persistence.resumption import Resumption
from conure.server.runtime.program_run import ProgramRun
from conure.server.store.damage.commit_log import CommitLog
from conure.server.store.journal import Journal
from conure.server.store.writer import JournalWriter

POINTS: dict[str, tuple[type, str, bool]] = {
    "before a commit": (JournalWriter, "_try_commit", False),
    "after a commit": (CommitLog, "add", False),
    "after the commit log": (CommitLog, "add", True),
    "before a checkpoint": (JournalWriter, "checkpoint", False),
    "between checkpoint and commit log": (CommitLog, "clear", False),
    "before an acknowledgement": (Journal, "_resolve", False),
    "after an acknowledgement": (Journal, "_resolve", True),
    "before events are published": (EventStream, "publish", False),
    "after events are published": (EventStream, "publish", True),
    "before a slot is dispatched": (NodeContext, "_dispatch", False),
    "after a slot was dispatched": (NodeContext, "_dispatch", True),
    "before a program is resumed": (Resumption, "_resume", False),
    "after a program was resumed": (Resumption, "_resume", True),
    "before a program ends": (ProgramRun, "_finish", False),
    "after a program ended": (ProgramRun, "_finish", True),
}
"""Class, method, and whether the process is killed after the method; else before it."""


def aim(point: str, number: int) -> None:
    """Kill this process at the `number`-th call of a point."""
    owner, name, is_after = POINTS[point]
    function: Callable[..., Any] = getattr(owner, name)
    num_left = number

    def crash(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0 and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if num_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, crash)


if __name__ == "__main__":
    aim(sys.argv[1], int(sys.argv[2]))
    # Checkpoints are rare otherwise.
    sys.modules["conure.server.store.writer"].MAX_LOG_BYTES = 200_000  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[3:]))
