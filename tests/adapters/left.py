"""Checks that no program is left running, and a server that shuts down under its clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from conure.adapters.client import AsyncClient, Client, Retry
from conure.server.program.status import ENDED

from ..served import served


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the programs that the server accepted."""
    ids: list[str] = []
    submit, asubmit = Client.submit, AsyncClient.submit

    def record(self: Client, *args: Any, **kwargs: Any) -> Any:
        run = submit(self, *args, **kwargs)
        ids.append(run.id)
        return run

    async def arecord(self: AsyncClient, *args: Any, **kwargs: Any) -> Any:
        run = await asubmit(self, *args, **kwargs)
        ids.append(run.id)
        return run

    monkeypatch.setattr(Client, "submit", record)
    monkeypatch.setattr(AsyncClient, "submit", arecord)
    return ids


async def all_ended(client: Client, ids: list[str]) -> None:
    """Wait until every program has ended; programs parallel to a failure may complete first.

    The limit is below the 60 s that the calls of some tests take by themselves.
    """
    async with asyncio.timeout(40):
        for program in ids:
            run = await asyncio.to_thread(client.attach, program)
            while (await asyncio.to_thread(run.status)).status not in ENDED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def leaving_server() -> AsyncIterator[tuple[Client, Callable[[], Awaitable[None]]]]:
    """Yield a client of a server with slow calls, and a function that shuts the server down."""
    # Each waiting call needs a thread.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(40))
    stack = contextlib.ExitStack()
    server = served("--engine", "fake", "--time-per-call", "30", "--drain-s", "1")
    url = await asyncio.to_thread(stack.enter_context, server)
    retry = Retry(
        max_retries=1, base_delay_s=0.01, unreachable_timeout_s=0.3, first_contact_timeout_s=0.3
    )

    async def leave() -> None:
        await asyncio.to_thread(stack.close)

    try:
        with Client(url, retry=retry) as client:
            yield client, leave
    finally:
        stack.close()


async def all_submitted(ids: list[str], num_programs: int) -> None:
    """Wait until the server has accepted this many programs."""
    async with asyncio.timeout(60):
        while len(ids) < num_programs:  # noqa: ASYNC110 - threads submit
            await asyncio.sleep(0.01)
