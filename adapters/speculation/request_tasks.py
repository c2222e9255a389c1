"""The requests of one run that have no answer yet, and the end of those that get none.

Used in the I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from .outbox import OpenProgram, OutboxRequest

PROMPT_ANSWER_S: Final = 1.0
"""How long a server that is neither busy nor lost takes at most to answer a submission."""


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
        """Record that the current task carries out a request in the block."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request] = _RequestTask(task, asyncio.get_running_loop().time())
        try:
            yield
        finally:
            del self._tasks[request]

    async def give_up(self, program: OpenProgram) -> bool:
        """Cancel the requests of a program whose submission gets no prompt answer.

        Otherwise the client would repeat the submission to a busy server for minutes, although the
        application waits for none of its calls.

        Returns:
            Whether the submission was cancelled. Else it has an answer now.
        """
        sent = [
            (request, each)
            for request, each in self._tasks.items()
            if request.program is program and request.action in ("submit", "append")
        ]
        for request, each in sent:
            if request.action == "submit":
                age_s = asyncio.get_running_loop().time() - each.started_at_s
                await asyncio.wait([each.task], timeout=max(0.0, PROMPT_ANSWER_S - age_s))
        if program.run is not None or program.is_rejected:
            return False
        for _, each in sent:
            each.task.cancel()
        return True
