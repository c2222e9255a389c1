"""Plans and compiled programs add no runs to LangChain's traces."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import RunnablePassthrough, RunnablePick
from langchain_core.tracers.context import collect_runs

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate, to_program

from ..shapes import TEXT, Shape, ask, shapes

NAMES = ("few-shot", "mustache", "history", "map", "router", "another model between", "listener")
"""Shapes with other kinds of values, or with other runs."""


def chosen_shapes(llm: ChatConure) -> dict[str, Shape]:
    """Return some shapes, and chains with values that the client computes."""
    other = FakeListChatModel(responses=["fake"])
    say: Any = ask("{x}") | llm | TEXT
    given = {"x": "tea", "y": 1}
    found = shapes(llm)
    return {
        **{name: found[name] for name in NAMES},
        "text of another model": Shape(ask("{x}") | other | TEXT | say, given, 1),
        "picked input": Shape(RunnablePassthrough() | RunnablePick("x") | say, given, 1),
        "picked inputs": Shape(RunnablePassthrough() | RunnablePick(["x"]) | say, given, 1),
    }


def traced(chain: Any, given: Any) -> list[str]:
    """Return the names of the traced runs that have no parent."""
    with collect_runs() as runs:
        chain.invoke(given)
    return sorted(run.name for run in runs.traced_runs)


@pytest.mark.parametrize("name", chosen_shapes(ChatConure()))
def test_an_accelerated_chain_has_the_traced_runs_of_the_chain(client: Client, name: str) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=200)
    shape = chosen_shapes(llm)[name]
    assert traced(accelerate(shape.chain), shape.given) == traced(shape.chain, shape.given)


@pytest.mark.parametrize("name", ["mustache", "few-shot", "picked input", "picked inputs"])
def test_a_compiled_chain_without_functions_has_no_traced_runs(client: Client, name: str) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=200)
    shape = chosen_shapes(llm)[name]
    compiled = to_program(shape.chain)
    with collect_runs() as runs:
        compiled.run(client, shape.given)
    assert runs.traced_runs == []
