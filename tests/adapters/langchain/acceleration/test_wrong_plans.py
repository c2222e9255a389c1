"""Where a plan cannot be made, the accelerated chain does what the chain does."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField, Runnable, RunnableConfig, RunnableLambda

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.server.program.errors import ProgramError

from ..shapes import TEXT, ask


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=20)


def kinds(llm: ChatConure, other: Any) -> Runnable[Any, Any]:
    say: Any = ask("Say {x}") | llm | TEXT
    found: Runnable[Any, Any] = say.configurable_alternatives(
        ConfigurableField(id="kind"), default_key="a", b=other
    )
    return found


def kind(name: str) -> RunnableConfig:
    return {"configurable": {"kind": name}}


@pytest.mark.parametrize("is_accelerated", [False, True])
def test_an_unknown_alternative_fails_where_the_chain_reaches_it(
    llm: ChatConure, is_accelerated: bool
) -> None:
    ran: list[str] = []

    def first(text: str) -> dict[str, str]:
        ran.append(text)
        return {"x": text}

    chain: Runnable[Any, Any] = RunnableLambda(first) | kinds(llm, ask("{x}") | llm)
    chain = accelerate(chain) if is_accelerated else chain
    with pytest.raises(ValueError, match="Unknown alternative: nope"):
        chain.invoke("tea", kind("nope"))
    assert ran == ["tea"]


def test_a_wrong_argument_of_a_model_is_handled_by_its_fallback(llm: ChatConure) -> None:
    wrong = ask("Say {x}") | llm.bind(response_format={"type": "xml"})
    fast = accelerate(wrong.with_fallbacks([ask("Say {x}") | llm]))
    assert fast.invoke({"x": "tea"}).content == (ask("Say {x}") | llm).invoke({"x": "tea"}).content
    with pytest.raises(ProgramError, match="xml") as refused:
        to_program(wrong)
    assert (refused.value.code, refused.value.path) == ("to_program.unsupported", "chain.steps[1]")


def test_a_factory_of_a_bound_model_runs_for_the_chain_only(llm: ChatConure) -> None:
    made: list[ChatConure] = []

    def make() -> ChatConure:
        made.append(llm)
        return llm

    kind_of_model = ConfigurableField(id="kind")
    model: Any = llm.configurable_alternatives(kind_of_model, default_key="a", b=make)
    fast = accelerate(ask("Say {x}") | model.bind(stop=["x"]) | TEXT)
    fast.invoke({"x": "tea"}, kind("b"))
    assert len(made) == 1
    fast.invoke({"x": "tea"}, kind("a"))
    assert [run.num_planned for run in fast.explain().runs] == [0, 1]


def test_a_factory_of_an_alternative_runs_for_the_chain_only(llm: ChatConure) -> None:
    made: list[Runnable[Any, Any]] = []

    def make() -> Runnable[Any, Any]:
        made.append(ask("Sing {x}") | llm | TEXT)
        return made[-1]

    fast = accelerate(kinds(llm, make))
    sung = fast.invoke({"x": "tea"}, kind("b"))
    (chain,) = made
    assert sung == chain.invoke({"x": "tea"})
    fast.invoke({"x": "tea"}, kind("a"))
    assert [run.num_planned for run in fast.explain().runs] == [0, 1]
