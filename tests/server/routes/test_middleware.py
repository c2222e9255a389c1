"""The bound on the memory of request bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conure.server.program.errors import UnavailableError
from conure.server.routes import middleware
from conure.server.routes.middleware import (
    LARGE_RESPONSE_BYTES,
    BodyMemoryMiddleware,
    ResponseMemoryMiddleware,
)

MIB = 1024 * 1024


class Application:
    """Starts its response and ends it when the test sets the events."""

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


@pytest.mark.parametrize(
    ("sizes", "may_follow"), [((30, 30), True), ((2 * MIB, 0), True), ((2 * MIB, 2 * MIB), False)]
)
async def test_a_body_that_has_arrived_counts_with_its_size(
    bound: BodyMemoryMiddleware, sizes: tuple[int, ...], may_follow: bool
) -> None:
    has_body, finish = asyncio.Event(), asyncio.Event()
    parts = iter(sizes)
    num_left = len(sizes)

    async def receive() -> Any:
        nonlocal num_left
        num_left -= 1
        return {"type": "http.request", "body": b"x" * next(parts), "more_body": num_left > 0}

    async def read_and_wait(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        has_body.set()
        await finish.wait()

    scope: Any = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    handled: Any = bound.handle(scope, receive, None, read_and_wait)  # type: ignore[arg-type]
    waiting = asyncio.create_task(handled)
    await has_body.wait()
    app = Application()
    app.respond.set()
    app.finish.set()
    following = request(bound, app, content_length=str(8 * MIB))
    if may_follow:
        await following
    else:
        with pytest.raises(UnavailableError):
            await following
    finish.set()
    await waiting
    await request(bound, app, content_length=str(8 * MIB))


class Reader:
    """Receives a response; blocks after its head until it may read."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.has_head = asyncio.Event()
        self.sizes: list[int] = []

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_head.set()
            return
        await self.may_read.wait()
        self.sizes.append(len(message["body"]))
        assert message["more_body"] is (sum(self.sizes) < 8 * MIB)


async def respond(bound: ResponseMemoryMiddleware, reader: Reader, size: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size), "more_body": False})

    scope: Any = {"type": "http", "headers": []}
    await bound.handle(scope, None, reader.send, app)  # type: ignore[arg-type]  # never receives


async def test_large_responses_that_are_not_read_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "MAX_RESPONSE_BYTES_TOTAL", 10 * MIB)
    bound, slow, other = ResponseMemoryMiddleware(), Reader(), Reader()
    first = asyncio.create_task(respond(bound, slow, 8 * MIB))
    await slow.has_head.wait()
    with pytest.raises(UnavailableError) as caught:
        await respond(bound, other, 4 * MIB)
    assert (caught.value.code, caught.value.status) == ("server.responses", 503)
    assert not other.has_head.is_set()
    slow.may_read.set()
    await first
    assert slow.sizes == [LARGE_RESPONSE_BYTES] * (8 * MIB // LARGE_RESPONSE_BYTES)
    other.may_read.set()
    await respond(bound, other, 8 * MIB)


async def test_single_response_may_be_larger_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "MAX_RESPONSE_BYTES_TOTAL", MIB)
    bound, reader = ResponseMemoryMiddleware(), Reader()
    reader.may_read.set()
    await respond(bound, reader, 8 * MIB)
    assert sum(reader.sizes) == 8 * MIB
