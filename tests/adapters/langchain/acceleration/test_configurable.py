"""A plan has the configurable fields of its run, also those of the run around it."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import ensure_config

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from conure.adapters.langchain.acceleration.instrument import ChainInstrumenter
from conure.adapters.langchain.acceleration.planner import identity_of

from ..shapes import TEXT, ask


def chain_of(llm: ChatConure) -> Any:
    """Return a chain of two calls whose length the field `n` sets."""
    open_llm = llm.configurable_fields(max_tokens=ConfigurableField(id="n"))
    return ask("{x}") | open_llm | TEXT | ask("{y}") | open_llm | TEXT


def configured(**fields: Any) -> RunnableConfig:
    return {"configurable": fields}


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_plan_has_the_fields_of_the_run_around_it(client: Client, is_mapped: bool) -> None:
    chain = chain_of(ChatConure(client=client, temperature=0, max_tokens=20))
    if is_mapped:
        chain = RunnableLambda(lambda given: [given]) | chain.map()
    fast = accelerate(chain)
    outer: RunnableLambda[Any, Any] = RunnableLambda(lambda given: fast.invoke(given))
    config = configured(n=5)
    assert outer.invoke("tea", config) == chain.invoke("tea", config)
    assert fast.invoke("tea") == chain.invoke("tea")
    for run in fast.explain().runs:
        assert (run.num_planned, run.num_served, run.misses) == (2, 2, [])


def test_only_a_field_of_the_chain_needs_a_new_plan() -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9", max_tokens=20)
    planner = ChainInstrumenter(chain_of(llm), identity_of(llm))

    def lengths(**fields: Any) -> list[int]:
        plan = planner.plan("", ensure_config(configured(**fields)))
        assert (plan is planner.default_plan) == ("n" not in fields)
        return [call.node["output"]["max_tokens"] for call in plan.calls]

    assert lengths() == lengths(thread_id="a") == [20, 20]
    assert lengths(thread_id="a", n=5) == [5, 5]


def test_a_field_with_a_prefix_changes_the_plan(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=20)
    chain: Any = (ask("{x}") | llm | TEXT).configurable_alternatives(
        ConfigurableField(id="kind"), default_key="a", prefix_keys=True, b=chain_of(llm)
    )
    fast = accelerate(chain)
    config = configured(**{"kind": "b", "kind==b/n": 5})
    assert fast.invoke("tea", config) == chain.invoke("tea", config)
    (run,) = fast.explain().runs
    assert (run.num_planned, run.num_served, run.misses) == (2, 2, [])
