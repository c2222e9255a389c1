"""Connections of clients: one pool per event loop and process, and the I/O thread."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from conure.adapters.client import AsyncClient, Client
from conure.adapters.client.client_cache import ModelClients, SharedClient
from conure.adapters.client.io_thread import IOThread

from ..garbage import blocks_when_collected


def test_loops_that_end_leave_no_connection(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())

    async def submit(client: AsyncClient) -> Any:
        await client.submit(kit.program)
        return client._per_loop[asyncio.get_running_loop()].http

    with Client(app=double) as owner:
        client = owner.asynchronous()
        used = [asyncio.run(submit(client)) for _ in range(3)]
    assert all(http.is_closed for http in used)
    assert client._per_loop == {}


def test_loops_closed_without_their_generators_are_dropped(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    with Client(app=double) as owner:
        client = owner.asynchronous()
        for _ in range(3):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(client.submit(kit.program))
            loop.close()
        assert len(client._per_loop) == 1


def test_closed_client_is_replaced_for_the_models_that_share_it() -> None:
    settings = ("http://127.0.0.1:9", 0)
    first = ModelClients().client(*settings)
    assert ModelClients().client(*settings) is first
    first.close()
    second = ModelClients().client(*settings)
    assert (first.is_closed, second.is_closed) == (True, False)
    second.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_opens_new_connections() -> None:
    client = Client("http://127.0.0.1:9")
    parent = client._http()

    def check() -> bool:
        return client._http() is not parent

    assert client._http() is parent
    assert _is_true_in_child(check)
    client.close()


@pytest.mark.parametrize(
    ("timeout_s", "text"),
    [(0.25, "0.25 s"), (99.5, "99.5 s"), (1800, "1800 s"), (3600.4, "3600 s")],
)
def test_the_error_of_a_late_answer_states_the_time_limit(timeout_s: float, text: str) -> None:
    with Client("http://127.0.0.1:9", timeout_s=timeout_s) as client:
        problem = client._settings.unreachable(httpx.ReadTimeout("late"))
    assert f"the client waits {text} (timeout_s) for an answer" in str(problem)


async def test_a_closed_client_refuses_asynchronous_requests(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    client = await asyncio.to_thread(lambda: Client(app=double))
    await client.twin.submit(kit.program)
    await asyncio.to_thread(client.close)
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.twin.submit(kit.program)


async def test_other_loops_may_open_and_end_while_a_loop_connects(
    double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherLoop:
        """Closed by its own thread, which also opens others."""

        def is_closed(self) -> bool:
            client._per_loop.pop(self, None)  # type: ignore[call-overload]  # a double of a loop
            client._per_loop[OtherLoop()] = connections  # type: ignore[index]
            return True

    async with AsyncClient(app=double) as client:
        await client._http()
        connections = client._per_loop.pop(asyncio.get_running_loop())
        client._per_loop[OtherLoop()] = connections  # type: ignore[index]
        assert not (await client._http()).is_closed
        await connections.lifetime.aclose()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_starts_a_new_io_thread() -> None:
    thread = IOThread()
    _ran_in(thread)

    def check() -> bool:
        return _ran_in(thread).is_alive()

    assert _is_true_in_child(check)
    thread.close(_nothing)


def test_io_thread_finishes_its_tasks_before_it_ends() -> None:
    thread, done = IOThread(), list[str]()

    async def work() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        done.append("work")

    async def cleanup() -> None:
        done.append("cleanup")

    thread.start_task(work)
    thread.close(cleanup)
    assert done == ["work", "cleanup"]
    with pytest.raises(RuntimeError, match="closed"):
        thread.start_task(work)


def test_io_thread_does_not_keep_the_process_alive() -> None:
    thread = IOThread()
    assert _ran_in(thread).daemon
    thread.close(_nothing)


def test_io_thread_may_be_used_by_the_garbage_collector_while_it_starts_a_task() -> None:
    thread = IOThread()
    start = partial(thread.start_task, _nothing)
    assert not blocks_when_collected(start, start)
    thread.close(_nothing)


def test_client_has_one_io_thread_if_two_tasks_are_the_first() -> None:
    thread, found = IOThread(), list[threading.Thread]()
    barrier = threading.Barrier(2)

    def start() -> None:
        barrier.wait(60)
        found.append(_ran_in(thread))

    starting = [threading.Thread(target=start) for _ in range(2)]
    for each in starting:
        each.start()
    for each in starting:
        each.join(60)
    assert len(found) == 2
    assert len(set(found)) == 1
    thread.close(_nothing)


def test_closed_client_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, started = IOThread(), list[threading.Thread]()
    start = threading.Thread.start

    def close_before(each: threading.Thread) -> None:
        thread.close(_nothing)
        start(each)
        started.append(each)

    monkeypatch.setattr(threading.Thread, "start", close_before)
    with pytest.raises(RuntimeError, match="closed"):
        thread.start_task(_nothing)
    (io_thread,) = started
    io_thread.join(60)
    assert not io_thread.is_alive()


async def _nothing() -> None:
    pass


def _ran_in(io_thread: IOThread) -> threading.Thread:
    """Return the thread that runs tasks."""
    found: list[threading.Thread] = []
    has_run = threading.Event()

    async def note() -> None:
        found.append(threading.current_thread())
        has_run.set()

    io_thread.start_task(note)
    assert has_run.wait(60)
    return found[0]


def _is_true_in_child(check: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_connections_are_closed_with_the_last_use_of_their_client() -> None:
    shared = SharedClient("http://127.0.0.1:1", 0, None, ())
    connections = shared.client()._connections
    assert not connections.is_closed
    del shared
    gc.collect()
    assert connections.is_closed
