"""Every way to run a chain raises the original error with the server's reason.

Nothing keeps running on the server afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from langchain_core.runnables import Runnable, RunnableParallel

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from conure.server.program.errors import ConureError, ProgramError, PromptError, UnavailableError

from ..left import all_ended, all_submitted, leaving_server
from .shapes import TEXT, ask

WAYS = ("invoke", "ainvoke", "stream", "astream", "batch", "abatch")


async def run(way: str, chain: Runnable[Any, Any], given: Any) -> Any:
    """Run a chain by one of LangChain's methods."""
    match way:
        case "invoke":
            return await asyncio.to_thread(chain.invoke, given)
        case "ainvoke":
            return await chain.ainvoke(given)
        case "stream":
            return await asyncio.to_thread(lambda: list(chain.stream(given)))
        case "astream":
            return [piece async for piece in chain.astream(given)]
        case "batch":
            return await asyncio.to_thread(chain.batch, [given, given])
    return await chain.abatch([given, given])


class Case(NamedTuple):
    """A chain that fails."""

    chain: Callable[[ChatConure], Any]
    given: str
    error: type[Exception]
    match: str


def broken(text: str) -> str:
    raise KeyError("oh")


def say(llm: Any, template: str = "{x}") -> Any:
    return ask(template) | llm | TEXT


CASES = {
    "a constraint that is refused": Case(
        lambda llm: say(llm) | say(llm.bind(constraint={"regex": "(?=a)b"})),
        "tea",
        ProgramError,
        "invalid regex",
    ),
    "a model that is not there": Case(
        lambda llm: say(llm) | say(llm.bind(model="nobody")), "tea", ConureError, "nobody"
    ),
    "a prompt that is too long": Case(
        lambda llm: say(llm) | say(llm, "{x}" * 1000), "tea", PromptError, "tokens"
    ),
    "an input that is too long": Case(say, "x" * 100_000, PromptError, "tokens"),
    "a function that raises": Case(
        lambda llm: RunnableParallel(a=say(llm) | broken, b=say(llm)) | say(llm, "{a}{b}"),
        "tea",
        KeyError,
        "oh",
    ),
    "a template that lacks a variable": Case(
        lambda llm: {"y": say(llm)} | say(llm, "{y} {z}"),
        "tea",
        KeyError,
        r"missing variables \{'z'\}",
    ),
}


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
async def test_failure_is_raised_and_leaves_nothing_running(
    client: Client, submitted: list[str], name: str, way: str, is_fast: bool
) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    case = CASES[name]
    chain = case.chain(llm)
    with pytest.raises(case.error, match=case.match):
        await run(way, accelerate(chain) if is_fast else chain, case.given)
    await all_ended(client, submitted)
    await llm.async_connection().close()


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("way", WAYS)
async def test_unreachable_server_is_named(way: str, is_fast: bool) -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9", max_retries=0)
    chain = say(llm) | say(llm)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9.*is the server running"):
        await run(way, accelerate(chain) if is_fast else chain, "tea")
    await llm.async_connection().close()


async def test_server_shutdown_reaches_every_waiter(submitted: list[str]) -> None:
    async with leaving_server() as (client, leave):
        llm = ChatConure(client=client)
        chain = say(llm) | say(llm)
        ways = [(way, each) for way in WAYS for each in (chain, accelerate(chain))]
        waiting = [asyncio.create_task(run(way, each, "tea")) for way, each in ways]
        await all_submitted(submitted, 16)  # a batch is two programs
        await leave()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        wrong = [
            (way, type(each).__name__, result)
            for (way, each), result in zip(ways, results, strict=True)
            if not isinstance(result, ConureError)
        ]
        assert wrong == []
        await llm.async_connection().close()
