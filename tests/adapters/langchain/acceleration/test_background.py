"""Tasks and threads that outlive the accelerated chain that started them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.runnables.config import ContextThreadPoolExecutor

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from conure.server.app import create_app
from conure.server.config import Config

from ..shapes import TEXT


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[ChatConure]:
    app = create_app(Config(engine="fake", data=tmp_path))
    with Client(app=app) as client:
        yield ChatConure(client=client, temperature=0, max_tokens=20)


def test_threads_call_the_model_after_the_chain(llm: ChatConure) -> None:
    has_ended = Event()
    started: list[Future[str]] = []

    def memorise(text: str) -> str:
        has_ended.wait(60)
        return str(llm.invoke(f"note {text}").content)

    with ContextThreadPoolExecutor(1) as pool:

        def fork(text: str) -> str:
            started.append(pool.submit(memorise, text))
            return text

        said = accelerate(llm | TEXT | RunnableLambda(fork)).invoke("tea")
        has_ended.set()
        assert started[0].result() == llm.invoke(f"note {said}").content


async def test_tasks_keep_the_answers_that_they_wait_for(llm: ChatConure) -> None:
    tasks: list[asyncio.Task[str]] = []
    slow = llm.model_copy(update={"max_tokens": 2_000, "ignore_eos": True})

    async def memorise(text: str) -> str:
        return str((await slow.ainvoke(f"note {text}")).content)

    async def fork(text: str) -> str:
        tasks.append(asyncio.create_task(memorise(text)))
        await llm.ainvoke("something else")  # the task has sent its call
        return text

    said = await accelerate(llm | TEXT | RunnableLambda(fork)).ainvoke("tea")
    assert await tasks[0] == (await slow.ainvoke(f"note {said}")).content
    assert llm.client is not None
    await llm.async_connection().close()


# asyncio's warning about generators that begin after its end, which is not shown by default.
@pytest.mark.filterwarnings("ignore:asynchronous generator:ResourceWarning")
@pytest.mark.parametrize("is_accelerated", [False, True])
def test_a_stream_that_is_left_early_ends_silently(llm: ChatConure, is_accelerated: bool) -> None:
    reports: list[dict[str, object]] = []
    chain: Runnable[str, str] = llm | TEXT
    if is_accelerated:
        chain = accelerate(chain)

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        async for _ in chain.astream("tea"):
            break

    for _ in range(5):
        asyncio.run(leave())
    assert reports == []


@pytest.mark.filterwarnings("ignore:asynchronous generator:ResourceWarning")
@pytest.mark.parametrize("is_accelerated", [False, True])
def test_a_stream_that_the_app_keeps_ends_silently_with_its_loop(
    llm: ChatConure, is_accelerated: bool
) -> None:
    reports: list[dict[str, object]] = []
    kept: list[AsyncIterator[str]] = []
    chain: Runnable[str, str] = llm | TEXT
    if is_accelerated:
        chain = accelerate(chain)

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        kept.append(chain.astream("tea"))
        await anext(kept[-1])

    for _ in range(5):
        asyncio.run(leave())
    assert reports == []
