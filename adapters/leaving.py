"""Whoever leaves a program early cancels it: for answers that nobody waits for any more.

Knows the two kinds of runs of the client. Refuses to know who waits and for what. Kept true:
what went wrong, or who interrupted, is raised as it came; a cancellation that fails is not,
as where the client was closed by its owner meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

from conure.server.program.errors import ConureError

from .client import AsyncRun, Run


@contextlib.contextmanager
def cancelled_unless_done(run: Run) -> Iterator[None]:
    """Cancel the program where the block does not come to its end."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ConureError, RuntimeError):
            run.cancel()
        raise


@contextlib.asynccontextmanager
async def acancelled_unless_done(run: AsyncRun) -> AsyncIterator[None]:
    """`cancelled_unless_done`, with await."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ConureError, RuntimeError):
            await run.cancel()
        raise
