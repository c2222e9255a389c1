"""A chain with one call sends it as without acceleration, unless the call can start earlier."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)

from conure.adapters.client import Client, Retry, ServerUnreachableError
from conure.adapters.langchain import ChatConure, accelerate
from conure.adapters.langchain.acceleration.planner import identity_of, plan_of

from ..shapes import TEXT, ask


def search(given: Any) -> list[str]:
    return ["first", "second"]


def joined(texts: Any) -> str:
    return " ".join(texts)


def chains(llm: ChatConure) -> dict[str, tuple[Runnable[Any, Any], bool]]:
    """Return chains with one call, and whether it cannot start before the chain reaches it."""
    found = RunnableLambda(search) | RunnableLambda(joined)
    context = {"context": found, "x": RunnablePassthrough()}
    branch = RunnableBranch((bool, ask("{x}") | llm), ask("Say {x}") | llm)
    return {
        "prompt": (ask("Say {x}") | llm | TEXT, True),
        "function after": (ask("Say {x}") | llm | TEXT | RunnableLambda(str.upper), True),
        "context": (context | ask("{x}: {context}") | llm, True),
        "assigned context": (
            RunnablePassthrough.assign(context=found) | ask("{x}: {context}") | llm,
            True,
        ),
        "unread context": (RunnablePassthrough.assign(context=found) | ask("Say {x}") | llm, False),
        "sibling": (RunnableParallel(a=ask("Say {x}") | llm, b=RunnableLambda(search)), False),
        "branch": (branch, False),
        "two": (ask("Say {x}") | llm | TEXT | ask("Say {y}") | llm, False),
    }


@pytest.mark.parametrize("name", chains(ChatConure()))
def test_only_a_call_that_cannot_start_earlier_is_direct(name: str) -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9")
    chain, expected = chains(llm)[name]
    plan = plan_of(chain, identity=identity_of(llm), prefix="", config=None)
    assert plan.is_direct == expected


async def answers(chain: Runnable[Any, Any], given: Any, mode: str) -> AIMessage:
    if mode == "invoke":
        made = chain.invoke(given)
    elif mode == "ainvoke":
        made = await chain.ainvoke(given)
    else:
        pieces = list(chain.stream(given)) if mode == "stream" else []
        pieces = pieces or [piece async for piece in chain.astream(given)]
        made = pieces[0]
        for piece in pieces[1:]:
            made += piece
    assert isinstance(made, AIMessage)
    return made


@pytest.mark.parametrize("mode", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_direct_call_is_counted_as_planned(client: Client, mode: str) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    chain = chains(llm)["assigned context"][0]
    fast = accelerate(chain)
    made = await answers(fast, {"x": "tea"}, mode)
    assert made.content == (await answers(chain, {"x": "tea"}, mode)).content
    (run,) = fast.explain().runs
    assert (run.num_planned, run.num_served, run.num_in_first_program) == (1, 1, 1)
    assert run.program == made.response_metadata["program"]
    assert (run.misses, run.wasted, run.refusals) == ([], [], [])
    await llm.async_connection().close()


def test_another_call_than_the_planned_one_is_a_miss(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    made = ChatConure(client=client, temperature=0, max_tokens=21)
    function: RunnableLambda[Any, str] = RunnableLambda(lambda given: made.invoke(given["x"]).text)
    chain = RunnablePassthrough.assign(x=function) | ask("Say {x}") | llm | TEXT
    fast = accelerate(chain)
    assert fast.invoke({"x": "tea"}) == chain.invoke({"x": "tea"})
    (run,) = fast.explain().runs
    assert (run.num_planned, run.num_served, len(run.misses)) == (1, 1, 1)


def test_a_direct_call_runs_again_if_the_chain_repeats_it(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    say = ask("Say {x}") | llm | TEXT
    chain = (
        {"x": itemgetter("x")} | say | RunnableLambda(lambda text: (text, say.invoke({"x": "tea"})))
    )
    fast = accelerate(chain)
    first, second = fast.invoke({"x": "tea"})
    assert first == second
    (run,) = fast.explain().runs
    assert (run.num_served, len(run.misses), run.num_in_first_program) == (1, 1, 1)


def test_a_direct_call_that_the_server_did_not_take_has_no_program() -> None:
    retry = Retry(max_retries=0)
    with Client("http://127.0.0.1:9", retry=retry) as nowhere:
        fast = accelerate(ask("Say {x}") | ChatConure(client=nowhere))
        with pytest.raises(ServerUnreachableError):
            fast.invoke({"x": "tea"})
    (run,) = fast.explain().runs
    assert (run.program, run.num_in_first_program) == ("", 0)


def test_a_plan_follows_the_settings_of_its_models(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    fast = accelerate(RunnableLambda(search) | (ask("Say {x}") | llm).map())
    fast.invoke("tea")
    llm.max_tokens = 10
    fast.invoke("tea")
    set_llm_cache(InMemoryCache())
    try:
        fast.invoke("tea")
    finally:
        set_llm_cache(None)
    served = [(run.num_planned, run.num_served) for run in fast.explain().runs]
    assert served == [(2, 2), (2, 2), (0, 0)]
