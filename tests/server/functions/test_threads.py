"""Functions in threads: results, errors, timeouts and abandoned threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from conure.server.functions.threads import FunctionThreads, FunctionTimeoutError
from conure.server.program.errors import RunError

LONG_S = 60.0


async def test_results_and_errors_are_passed_on() -> None:
    threads = FunctionThreads(1)
    assert await threads.run(lambda: 7, timeout_s=LONG_S) == 7

    def fail() -> None:
        raise KeyError("x")

    def stop() -> None:
        raise StopIteration

    with pytest.raises(KeyError):
        await threads.run(fail, timeout_s=LONG_S)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(stop, timeout_s=LONG_S)


async def test_a_function_that_hangs_fails_and_leaves_its_place() -> None:
    threads = FunctionThreads(1)
    go_on = threading.Event()
    with pytest.raises(FunctionTimeoutError):
        await threads.run(go_on.wait, timeout_s=0.01)
    assert threads.num_abandoned == 1
    assert await threads.run(lambda: "next", timeout_s=LONG_S) == "next"
    go_on.set()


async def test_an_abandoned_thread_is_dropped_when_its_function_returns() -> None:
    threads = FunctionThreads(1)
    go_on = threading.Event()
    with pytest.raises(FunctionTimeoutError):
        await threads.run(go_on.wait, timeout_s=0.01)
    before = {thread for thread in threading.enumerate() if thread.name == "function"}
    go_on.set()
    for thread in before:
        await asyncio.to_thread(thread.join, LONG_S)
    await asyncio.sleep(0)  # the event loop runs what the thread has scheduled
    assert threads.num_abandoned == 0


async def test_too_many_hanging_functions_refuse_further_calls() -> None:
    threads = FunctionThreads(4, max_abandoned=2)
    go_on = threading.Event()
    for _ in range(2):
        with pytest.raises(FunctionTimeoutError):
            await threads.run(go_on.wait, timeout_s=0.01)
    with pytest.raises(RunError) as caught:
        await threads.run(lambda: 1, timeout_s=LONG_S)
    assert caught.value.code == "call.overloaded"
    go_on.set()


async def test_at_most_the_given_number_runs_at_once() -> None:
    threads = FunctionThreads(2)
    running = 0
    most = 0
    lock = threading.Lock()
    barrier = threading.Barrier(2)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(LONG_S)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(work, timeout_s=LONG_S) for _ in range(6)))
    assert most == 2


async def test_a_cancelled_caller_abandons_its_thread() -> None:
    threads = FunctionThreads(1)
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait()

    task = asyncio.create_task(threads.run(work, timeout_s=LONG_S))
    await asyncio.to_thread(started.wait, LONG_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.num_abandoned == 1
    go_on.set()
