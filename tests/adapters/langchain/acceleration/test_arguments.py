"""Arguments that are bound around a part of a chain reach its model, and the call is sent once."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.runnables import Runnable, RunnableBranch
from langchain_core.runnables.retry import RunnableRetry

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate

from ..shapes import TEXT, ask
from ..test_bad_input import WAYS, run


def chains(llm: ChatConure) -> dict[str, Runnable[Any, Any]]:
    short: dict[str, Any] = {"max_tokens": 3}
    return {
        "retry": ask("{x}") | llm.with_retry().bind(**short) | TEXT,
        "arguments of a retry": ask("{x}") | RunnableRetry(bound=llm, kwargs=short) | TEXT,
        "fallbacks": ask("{x}") | llm.with_fallbacks([llm]).bind(**short) | TEXT,
        "branch": RunnableBranch((bool, llm), llm).bind(**short) | TEXT,
        "map": llm.map().bind(**short) | (lambda answers: answers[0].text),
    }


def text_of(made: Any) -> str:
    return "".join(made) if isinstance(made, list) else str(made)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", chains(ChatConure()))
async def test_a_call_with_bound_arguments_is_sent_once(
    client: Client, name: str, way: str
) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    chain = chains(llm)[name]
    fast = accelerate(chain)
    given: Any = ["tea"] if name == "map" else "tea"
    assert text_of(await run(way, fast, given)) == text_of(await run(way, chain, given))
    for each in fast.explain().runs:
        num_calls = each.num_served + len(each.misses)
        assert (num_calls, each.num_planned - each.num_served, each.wasted) == (1, 0, [])
    await llm.async_connection().close()


def test_arguments_of_a_sequence_are_planned(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    chain = (llm | TEXT).bind(max_tokens=3) | ask("{y}") | llm | TEXT
    fast = accelerate(chain)
    assert fast.invoke("tea") == chain.invoke("tea")
    (one,) = fast.explain().runs
    assert (one.num_planned, one.num_served, one.misses) == (2, 2, [])


def test_arguments_of_the_run_reach_the_arm_of_a_branch(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    chain: Runnable[Any, Any] = RunnableBranch((bool, llm), llm)
    fast = accelerate(chain)
    assert fast.invoke("tea", max_tokens=3).text == chain.invoke("tea", max_tokens=3).text
    (one,) = fast.explain().runs
    assert (one.num_planned, len(one.misses), one.wasted) == (0, 1, [])
