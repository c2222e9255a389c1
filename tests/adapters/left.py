"""What is left on a server: the programs that it took, and whether all of them have ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conure.adapters.client import AsyncClient, Client
from conure.server.program.status import ENDED


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the programs that the server took."""
    ids: list[str] = []
    submit, asubmit = Client.submit, AsyncClient.submit

    def seen(self: Client, *args: Any, **kwargs: Any) -> Any:
        run = submit(self, *args, **kwargs)
        ids.append(run.id)
        return run

    async def aseen(self: AsyncClient, *args: Any, **kwargs: Any) -> Any:
        run = await asubmit(self, *args, **kwargs)
        ids.append(run.id)
        return run

    monkeypatch.setattr(Client, "submit", seen)
    monkeypatch.setattr(AsyncClient, "submit", aseen)
    return ids


async def all_ended(client: Client, ids: list[str]) -> None:
    """Until every program has ended: what runs beside a failure may come to its own end."""
    async with asyncio.timeout(15):
        for program in ids:
            run = await asyncio.to_thread(client.attach, program)
            while (await asyncio.to_thread(run.status)).status not in ENDED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
