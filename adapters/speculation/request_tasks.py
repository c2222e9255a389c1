"""The requests of one run that have no answer yet, and the cancellation of a submission that is not
answered in time.

Used in the I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from .outbox import OpenProgram, OutboxRequest

SUBMISSION_TIMEOUT_S: Final = 1.0
"""Maximum time that a reachable server with capacity takes to answer a submission."""


class _RequestTask(NamedTuple):
    """A request under way."""

    task: asyncio.Task[None]
    started_at_s: float
    """Time of the event loop."""


class RequestTasks:
    """The tasks of requests under way."""

    def __init__(self) -> None:
        self._tasks: dict[OutboxRequest, _RequestTask] = {}

    @contextlib.contextmanager
    def running(self, request: OutboxRequest) -> Iterator[None]:
        """Record that the current task sends `request` while the block runs."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request] = _RequestTask(task, asyncio.get_running_loop().time())
        try:
            yield
        finally:
            del self._tasks[request]

    async def cancel_unanswered_requests(self, program: OpenProgram) -> bool:
        """Cancel the requests of a program if its submission is not answered within
        `SUBMISSION_TIMEOUT_S`.

        Otherwise the client would repeat the submission to a busy server for minutes, although the
        application waits for none of its calls.

        Returns:
            Whether the requests were cancelled. If not, the submission has been answered.
        """
        sent = [
            (request, each)
            for request, each in self._tasks.items()
            if request.program is program and request.action in ("submit", "append")
        ]
        for request, each in sent:
            if request.action == "submit":
                age_s = asyncio.get_running_loop().time() - each.started_at_s
                await asyncio.wait([each.task], timeout=max(0.0, SUBMISSION_TIMEOUT_S - age_s))
        if program.run is not None or program.is_rejected:
            return False
        for _, each in sent:
            each.task.cancel()
        return True
