"""Context managers that cancel a program if the block that submits or uses it does not complete.

Invariants: the exception of the block is raised unchanged. An error of the cancellation itself is
ignored, for example if the client was closed meanwhile; a server that does not answer delays the
exception by a few seconds. If the block could not reach the server, the program is not cancelled:
the caller has already waited as long as `Retry` allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from conure.server.program.errors import ConureError
from conure.server.program.status import Accepted

from .async_client import AsyncClient, AsyncRun
from .exchange.problems import ServerUnreachableError
from .exchange.retry import CANCEL_TIMEOUT_S
from .sync_client import Client, Run


def cancel_unless_submitted(
    client: Client, program: str
) -> contextlib.AbstractContextManager[None]:
    """Cancel a program if the block that submits it is interrupted.

    The server may have accepted the submission, and only this caller knows the id. An error of the
    client does not cancel: the server has rejected the submission, or cannot be reached.

    Args:
        client: client that submits the program.
        program: id that the caller has chosen.
    """
    return _cancelling(Run(client, presumed_accepted(program)), unless=ConureError)


def acancel_unless_submitted(client: AsyncClient, program: str) -> contextlib.AsyncExitStack:
    """Do what `cancel_unless_submitted` does, for an asynchronous client."""
    return _acancelling(AsyncRun(client, presumed_accepted(program)), unless=ConureError)


def cancel_unless_completed(run: Run) -> contextlib.AbstractContextManager[None]:
    """Cancel the program if the block raises, unless the server cannot be reached."""
    return _cancelling(run, unless=ServerUnreachableError)


def acancel_unless_completed(run: AsyncRun) -> contextlib.AsyncExitStack:
    """Do what `cancel_unless_completed` does, for an asynchronous run."""
    return _acancelling(run, unless=ServerUnreachableError)


def presumed_accepted(program: str) -> Accepted:
    """Return the answer to a submission that the server may have accepted."""
    return Accepted(id=program, status="accepted", outputs=[], url="")


@contextlib.contextmanager
def _cancelling(run: Run, *, unless: type[ConureError]) -> Iterator[None]:
    """Cancel a program if the block raises anything but an error of the given class."""
    try:
        yield
    except unless:
        raise
    except BaseException:
        with contextlib.suppress(ConureError, RuntimeError):
            run.cancel(timeout_s=CANCEL_TIMEOUT_S)
        raise


def _acancelling(run: AsyncRun, *, unless: type[ConureError]) -> contextlib.AsyncExitStack:
    """Do what `_cancelling` does, for an asynchronous run.

    This function is not an async generator, because streams use it; `owned_generator` gives the
    reason.
    """

    async def cancel_if_failed(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, unless):
            with contextlib.suppress(ConureError, RuntimeError):
                await run.cancel(timeout_s=CANCEL_TIMEOUT_S)

    stack = contextlib.AsyncExitStack()
    stack.push_async_exit(cancel_if_failed)
    return stack
