"""An application in this process behaves like a server: streaming, disconnects, lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from conure.adapters.client.local_app import AsyncTransport, ClosedError, LocalApp, SyncTransport

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Stream:
    """Sends one chunk, then waits for `may_end` or for a disconnect."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.saw_disconnect = threading.Event()
        self.threads: set[int] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.threads.add(threading.get_ident())
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<" + body, "more_body": True})
        self.has_begun.set()
        gone = asyncio.ensure_future(receive())
        while not self.may_end.is_set():
            await asyncio.sleep(0.001)
            if gone.done() and gone.result()["type"] == "http.disconnect":
                self.saw_disconnect.set()
                return
        gone.cancel()
        await send({"type": "http.response.body", "body": b">", "more_body": False})


@pytest.fixture
def app() -> Stream:
    return Stream()


@pytest.fixture
def local(app: Stream) -> Any:
    made = LocalApp(app)
    made.start()
    yield made
    made.close()


def test_chunks_stream_to_threads(app: Stream, local: LocalApp) -> None:
    with (
        httpx.Client(transport=SyncTransport(local), base_url="http://127.0.0.1") as client,
        client.stream("POST", "/", content=b"hi") as response,
    ):
        chunks = response.iter_raw()
        assert next(chunks) == b"<hi"
        app.may_end.set()
        assert list(chunks) == [b">"]
    assert len(app.threads) == 1
    assert threading.get_ident() not in app.threads


async def test_chunks_stream_to_other_loops(app: Stream, local: LocalApp) -> None:
    transport = AsyncTransport(local)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        client.stream("POST", "/", content=b"hi") as response,
    ):
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"<hi"
        app.may_end.set()
        assert [chunk async for chunk in chunks] == [b">"]


def test_closing_a_response_is_a_disconnect(app: Stream, local: LocalApp) -> None:
    with (
        httpx.Client(transport=SyncTransport(local), base_url="http://127.0.0.1") as client,
        client.stream("GET", "/") as response,
    ):
        next(response.iter_raw())
    assert app.saw_disconnect.wait(60)


async def test_cancelling_a_beginning_response_is_a_disconnect(
    app: Stream, local: LocalApp
) -> None:
    async with httpx.AsyncClient(transport=AsyncTransport(local), base_url="http://a") as client:
        asking = asyncio.create_task(client.send(client.build_request("GET", "/"), stream=True))
        while not app.has_begun.wait(0.01):  # noqa: ASYNC110 - this loop must not get the response yet
            await asyncio.sleep(0)
        for _ in range(20):
            local.call(partial(asyncio.sleep, 0))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(app.saw_disconnect.wait, 5)


def test_silence_is_a_read_timeout(app: Stream, local: LocalApp) -> None:
    with (
        httpx.Client(transport=SyncTransport(local), base_url="http://127.0.0.1") as client,
        pytest.raises(httpx.ReadTimeout),
    ):
        client.get("/", timeout=0.02)


def test_a_failing_application_breaks_the_connection() -> None:
    async def broken(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["path"] == "/silent":
            return
        raise KeyError("oh")

    local = LocalApp(broken)
    local.start()
    with httpx.Client(transport=SyncTransport(local), base_url="http://127.0.0.1") as client:
        with pytest.raises(httpx.ReadError, match="oh"):
            client.get("/")
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/silent")
    local.close()


def test_a_failed_startup_raises_its_reason() -> None:
    async def refusing(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    local = LocalApp(refusing)
    with pytest.raises(RuntimeError, match="no model"):
        local.start()
    with pytest.raises(RuntimeError, match="was closed"):
        local.start()


def test_starting_and_closing_twice_is_safe(app: Stream) -> None:
    local = LocalApp(app)
    local.start()
    local.start()
    local.close()
    local.close()


def test_a_closed_application_rejects_requests(local: Any) -> None:
    local.close()
    request = httpx.Request("GET", "http://app/")
    with pytest.raises(ClosedError, match="was closed"):
        SyncTransport(local).handle_request(request)
    with pytest.raises(ClosedError):
        local.start()


def test_a_new_thread_with_the_identifier_of_the_ended_one_is_another_thread(app: Stream) -> None:
    local = LocalApp(app)
    local.start()
    idents: list[int] = []
    local.call(partial(_append, idents))
    local.close()
    for _ in range(100):  # the system gives the identifier to a later thread, usually the next
        with ThreadPoolExecutor(1) as pool:
            is_own, ident = pool.submit(
                lambda: (local.is_own_thread, threading.get_ident())
            ).result()
        assert not is_own
        if ident in idents:
            return
    pytest.skip("the system gave the identifier to no later thread")


async def _append(idents: list[int]) -> None:
    idents.append(threading.get_ident())


def test_a_blocking_call_from_the_application_raises(local: LocalApp) -> None:
    async def collect() -> None:
        with pytest.raises(RuntimeError, match="cannot wait"):
            local.call(partial(asyncio.sleep, 0))

    local.call(collect)
    local.call(partial(asyncio.sleep, 0))


def test_a_response_can_be_closed_by_its_application(app: Stream, local: LocalApp) -> None:
    request = httpx.Request("POST", "http://app/", content=b"x")
    response = SyncTransport(local).handle_request(request)

    async def collect() -> None:
        response.close()

    local.call(collect)
    assert app.saw_disconnect.wait(60)


def copy(chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
    """Read the input to its end when closed, as LangChain's generators do."""
    with contextlib.suppress(GeneratorExit):
        yield next(chunks)
    yield from chunks


def test_a_reader_can_be_collected_in_any_thread(app: Stream, local: LocalApp) -> None:
    response = SyncTransport(local).handle_request(httpx.Request("POST", "http://app/"))
    chunks = response.iter_raw()
    cycle: list[Any] = [copy(chunks)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()  # waits for no chunk: the thread may hold a lock that the application needs
    response.close()
    assert app.saw_disconnect.wait(60)


def test_a_call_of_the_garbage_collector_runs_and_is_not_waited_for(local: LocalApp) -> None:
    has_begun, refused = threading.Event(), list[str]()

    async def work() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    class Owner:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            try:
                local.call(work)
            except RuntimeError as error:
                refused.append(str(error))

    Owner()
    gc.collect()
    assert refused == ["the garbage collector cannot wait for the application"]
    assert has_begun.wait(60)
    assert local.may_wait


def test_a_reader_can_be_collected_in_its_application(app: Stream, local: LocalApp) -> None:
    response = SyncTransport(local).handle_request(httpx.Request("POST", "http://app/"))
    reader = copy(response.iter_raw())
    next(reader)

    async def collect() -> None:
        reader.close()

    local.call(collect)
    response.close()
    assert app.saw_disconnect.wait(60)


async def test_a_closed_application_rejects_async_requests(local: Any) -> None:
    await asyncio.to_thread(local.close)
    with pytest.raises(ClosedError, match="was closed"):
        await AsyncTransport(local).handle_async_request(httpx.Request("GET", "http://app/"))


async def test_closing_the_application_ends_waiting_readers(local: Any) -> None:
    request = httpx.Request("POST", "http://app/", content=b"x")
    waiting = await asyncio.to_thread(SyncTransport(local).handle_request, request)
    awaiting = await AsyncTransport(local).handle_async_request(request)
    chunks, pieces = waiting.iter_raw(), awaiting.aiter_raw()
    assert await asyncio.to_thread(next, chunks) == await anext(pieces) == b"<x"
    thread = asyncio.create_task(asyncio.to_thread(next, chunks, None))
    coroutine = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0)
    await asyncio.to_thread(local.close)
    for waiter in (thread, coroutine):
        with pytest.raises(ClosedError):
            await asyncio.wait_for(waiter, 60)
    await asyncio.to_thread(waiting.close)
    await awaiting.aclose()


async def test_busy_application_does_not_block_the_loop_of_a_caller(local: LocalApp) -> None:
    is_busy, may_continue = threading.Event(), threading.Event()

    async def block() -> None:
        is_busy.set()
        may_continue.wait(60)

    async def answer() -> str:
        return "made"

    blocking = asyncio.create_task(local.acall(block))
    await asyncio.to_thread(is_busy.wait, 10)
    waiting = asyncio.create_task(local.acall(answer))
    await asyncio.sleep(0)  # this loop still runs: the application's one does not
    assert not waiting.done()
    may_continue.set()
    assert await waiting == "made"
    await blocking


async def test_call_under_way_ends_when_the_application_is_closed(app: Stream) -> None:
    local = LocalApp(app)
    await asyncio.to_thread(local.start)
    has_begun = threading.Event()

    async def wait_forever() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    waiting = asyncio.create_task(local.acall(wait_forever))
    await asyncio.to_thread(has_begun.wait, 10)
    await asyncio.to_thread(local.close)
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await local.acall(wait_forever)
