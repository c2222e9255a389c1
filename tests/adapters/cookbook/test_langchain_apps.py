"""Apps in the patterns of public cookbooks: plain, accelerated and compiled give the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.server.program.errors import ProgramError

from ...benchmarks.package_loader import load_package

cookbook: Callable[[ChatConure], dict[str, Any]] = load_package("cookbook/langchain_apps").cookbook

NAMES = list(cookbook(ChatConure()))
SEVERAL_PROGRAMS = {"router_function"}
"""The plan is complete before a function returns a chain."""


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=400)


def total(chunks: list[Any]) -> Any:
    return reduce(add, chunks)


def test_there_are_thirty() -> None:
    assert len(NAMES) == 30


@pytest.mark.parametrize("name", NAMES)
def test_threads_have_the_same_result(llm: ChatConure, name: str) -> None:
    chain, given = cookbook(llm)[name]
    expected = chain.invoke(given)
    fast = accelerate(chain, model=llm)
    assert fast.invoke(given) == expected
    assert total(list(fast.stream(given))) == total(list(chain.stream(given))) == expected
    assert fast.batch([given] * 2) == [expected] * 2
    assert is_in_one_program(fast) or name in SEVERAL_PROGRAMS


@pytest.mark.parametrize("name", NAMES)
async def test_coroutines_have_the_same_result(llm: ChatConure, name: str) -> None:
    chain, given = cookbook(llm)[name]
    expected = await chain.ainvoke(given)
    fast = accelerate(chain, model=llm)
    assert await fast.ainvoke(given) == expected
    assert total([chunk async for chunk in fast.astream(given)]) == expected
    assert await fast.abatch([given] * 2) == [expected] * 2
    assert is_in_one_program(fast) or name in SEVERAL_PROGRAMS
    await llm.async_connection().close()


def is_in_one_program(fast: Any) -> bool:
    """Return whether every run answered all of its calls in its first program."""
    runs = fast.explain().runs
    return all(r.num_in_first_program == r.num_served + len(r.misses) for r in runs)


@pytest.mark.parametrize("name", NAMES)
def test_program_runs_or_is_refused_when_it_is_compiled(llm: ChatConure, name: str) -> None:
    chain, given = cookbook(llm)[name]
    try:
        compiled = to_program(chain)
    except ProgramError as problem:
        assert problem.code == "to_program.unsupported"
        return
    assert llm.client is not None
    assert compiled.run(llm.client, given) == chain.invoke(given)


def test_most_apps_become_programs(llm: ChatConure) -> None:
    refused = []
    for name, app in cookbook(llm).items():
        try:
            to_program(app.chain)
        except ProgramError:
            refused.append(name)
    assert refused == []


async def test_runs_of_many_apps_do_not_mix(llm: ChatConure) -> None:
    apps = cookbook(llm)
    expected = [await app.chain.ainvoke(app.given) for app in apps.values()]
    fast = [accelerate(app.chain, model=llm).ainvoke(app.given) for app in apps.values()]
    assert await asyncio.gather(*fast) == expected
    await llm.async_connection().close()
