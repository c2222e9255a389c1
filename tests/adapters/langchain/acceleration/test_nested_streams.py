"""In a stream, a part of a chain that makes no planned calls gets its input as it is generated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate

from ..shapes import TEXT, ask
from ..test_accelerate import Recorder


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=20)


def chain_of(log: list[str], *, is_failing: bool) -> Runnable[Any, str]:
    """Return a chain whose last step is retried and notes when it reads the first one's letters."""

    def letters() -> Iterator[str]:
        for letter in "abc":
            log.append(f"made {letter}")
            yield letter
        if is_failing:
            raise KeyError("oh")

    def make(given: Iterator[Any]) -> Iterator[str]:
        list(given)
        yield from letters()

    async def amake(given: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for _ in given:
            pass
        for letter in letters():
            yield letter

    def read(pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            log.append(f"read {piece}")
            yield piece.upper()

    async def aread(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
        async for piece in pieces:
            log.append(f"read {piece}")
            yield piece.upper()

    last: Runnable[str, str] = RunnableGenerator(read, aread)
    return RunnableGenerator(make, amake) | last.with_retry()


async def streamed(chain: Runnable[Any, str], recorder: Recorder, *, is_awaited: bool) -> list[str]:
    """Return the chunks and the text of the error, if any."""
    found: list[str] = []
    config: RunnableConfig = {"callbacks": [recorder]}
    chunks = chain.stream("x", config)
    awaited = chain.astream("x", config)
    try:
        while True:
            found.append(await anext(awaited) if is_awaited else next(chunks))
    except (KeyError, StopIteration, StopAsyncIteration) as problem:
        found.append(str(problem))
    return found


@pytest.mark.parametrize("is_awaited", [False, True])
@pytest.mark.parametrize("is_failing", [False, True])
async def test_the_body_of_a_retry_gets_chunks_as_they_are_generated(
    llm: ChatConure, is_awaited: bool, is_failing: bool
) -> None:
    outcomes = []
    for is_fast in (False, True):
        log: list[str] = []
        chain = chain_of(log, is_failing=is_failing)
        recorder = Recorder()
        used = accelerate(chain, model=llm) if is_fast else chain
        found = await streamed(used, recorder, is_awaited=is_awaited)
        outcomes.append((found, log, recorder.tree()))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][1][:2] == ["made a", "read a"]


async def test_values_that_a_streamed_body_reads_belong_to_the_plan_around_it(
    llm: ChatConure,
) -> None:
    def exclaimed(text: str) -> str:
        return f"{text}!"

    body = RunnableLambda(str.strip) | RunnableLambda(exclaimed)
    both = RunnableParallel(b=body.with_retry(), a=RunnablePassthrough())
    chain = RunnableLambda(exclaimed) | both | ask("{a} {b}") | llm | TEXT
    fast = accelerate(chain)
    expected = await chain.ainvoke("tea")
    assert "".join([text async for text in fast.astream("tea")]) == expected
    assert "".join(fast.stream("tea")) == expected
    assert [(run.num_served, run.misses) for run in fast.explain().runs] == [(1, [])] * 2
    await llm.async_connection().close()
