"""The bound on the memory of request bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.routes import middleware
from conure.server.routes.middleware import BodyMemoryMiddleware

MIB = 1024 * 1024


class Application:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.respond = asyncio.Event()
        self.finish = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.respond.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.finish.wait()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> BodyMemoryMiddleware:
    monkeypatch.setattr(middleware, "MAX_WAITING_BYTES", 10 * MIB)
    return BodyMemoryMiddleware(8 * MIB)


def request(bound: BodyMemoryMiddleware, app: Application, **headers: str) -> asyncio.Task[None]:
    encoded = [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()]

    async def send(message: Any) -> None:
        pass

    scope: Any = {"type": "http", "headers": encoded}
    handled: Any = bound.handle(scope, None, send, app)  # type: ignore[arg-type]  # never receives
    return asyncio.create_task(handled)


async def test_large_bodies_without_a_response_are_bounded(bound: BodyMemoryMiddleware) -> None:
    app = Application()
    first = request(bound, app, content_length=str(8 * MIB))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError) as caught:
        await request(bound, app, content_length=str(4 * MIB))
    assert (caught.value.code, caught.value.status) == ("server.busy", 503)
    small = request(bound, app, content_length="100")
    app.respond.set()
    app.finish.set()
    await asyncio.gather(first, small)
    await request(bound, app, content_length=str(8 * MIB))


async def test_a_response_that_has_begun_frees_the_memory(bound: BodyMemoryMiddleware) -> None:
    app = Application()
    app.respond.set()
    stream = request(bound, app, content_length=str(8 * MIB))
    await asyncio.sleep(0)
    other = Application()
    other.respond.set()
    other.finish.set()
    await request(bound, other, content_length=str(8 * MIB))
    app.finish.set()
    await stream


async def test_a_body_of_unknown_length_counts_as_the_largest(bound: BodyMemoryMiddleware) -> None:
    app = Application()
    first = request(bound, app, transfer_encoding="chunked")
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await request(bound, app, transfer_encoding="chunked")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    app.respond.set()
    app.finish.set()
    await request(bound, app, transfer_encoding="chunked")
