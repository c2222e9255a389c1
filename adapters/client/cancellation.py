"""Context managers that cancel a program if the block that uses it does not complete.

Invariants: the exception of the block is raised unchanged. An error of the cancellation itself is
ignored, for example if the client was closed meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from conure.server.program.errors import ConureError

from .async_client import AsyncRun
from .sync_client import Run


@contextlib.contextmanager
def cancel_unless_completed(run: Run) -> Iterator[None]:
    """Cancel the program if the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ConureError, RuntimeError):
            run.cancel()
        raise


class acancel_unless_completed:  # noqa: N801 - used like the function above
    """Do what `cancel_unless_completed` does, for an asynchronous run."""

    # Not an async generator: see `owned_generator`.

    def __init__(self, run: AsyncRun) -> None:
        self._run = run

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            with contextlib.suppress(ConureError, RuntimeError):
                await self._run.cancel()
