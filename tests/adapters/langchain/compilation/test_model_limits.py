"""Models that a program cannot call as LangChain does, and the time limits of calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, RunnableLambda

from conure.adapters.client import Client, NotReadyError
from conure.adapters.langchain import ChatConure, to_program
from conure.adapters.langchain.acceleration.planner import identity_of, plan_of
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ProgramError

from ..shapes import TEXT, ask

LLM = ChatConure(base_url="http://a:8400", temperature=0)
OTHER = ChatConure(base_url="http://b:8400")
HANDLER = BaseCallbackHandler()
FIELD = ConfigurableField(id="n")
ELSEWHERE = "a model of another server than that of chain.steps[1]"
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "another server": (
        lambda: ask("{x}") | LLM | TEXT | ask("{y}") | OTHER,
        "chain.steps[4]",
        ELSEWHERE,
    ),
    "another server as a fallback": (
        lambda: ask("{x}") | LLM | TEXT | LLM.with_fallbacks([OTHER]),
        "chain.steps[3].fallbacks[0]",
        ELSEWHERE,
    ),
    "callbacks around a model": (
        lambda: ask("{x}") | LLM.with_config(callbacks=[HANDLER]),
        "chain.steps[1]",
        "callbacks of a model are not called",
    ),
    "callbacks around a chain": (
        lambda: (ask("{x}") | LLM).with_config(callbacks=[HANDLER]),
        "chain.steps[1]",
        "callbacks of a model are not called",
    ),
    "callbacks around a configurable model": (
        lambda: ask("{x}") | LLM.configurable_fields(seed=FIELD).with_config(callbacks=[HANDLER]),
        "chain.steps[1]",
        "callbacks of a model are not called",
    ),
    "callbacks of a model": (
        lambda: ChatConure(callbacks=[HANDLER]),
        "chain",
        "callbacks of a model are not called",
    ),
    "a cache": (
        lambda: ChatConure(cache=InMemoryCache()),
        "chain",
        "does not read LangChain's cache",
    ),
    "the global cache": (
        lambda: ChatConure(cache=True),
        "chain",
        "does not read LangChain's cache",
    ),
    "a rate limiter": (
        lambda: ChatConure(rate_limiter=InMemoryRateLimiter()),
        "chain",
        "the server decides when a call runs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_a_program_cannot_call_is_refused(name: str) -> None:
    make, path, message = REFUSED[name]
    with pytest.raises(ProgramError) as refused:
        to_program(make())
    assert (refused.value.code, refused.value.path) == ("to_program.unsupported", path)
    assert message in refused.value.message


def test_models_of_one_server_are_compiled() -> None:
    same = ChatConure(base_url="http://a:8400/", model="other")
    assert to_program(ask("{x}") | LLM | TEXT | ask("{y}") | same).program["nodes"]


def test_a_chain_is_compiled_in_a_run_with_callbacks() -> None:
    open_llm = LLM.configurable_fields(max_tokens=FIELD)
    chain = ask("{x}") | open_llm.with_config(tags=["tea"])
    compiling: RunnableLambda[Any, Any] = RunnableLambda(lambda _: to_program(chain))
    compiled = compiling.invoke("", {"callbacks": [HANDLER], "configurable": {"n": 9}})
    assert compiled.program["nodes"][0]["output"]["max_tokens"] == 9


def test_a_call_that_takes_too_long_fails_as_in_the_chain(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.01)
    with Client(app=create_app(config)) as client:
        quick = ChatConure(client=client, temperature=0, max_tokens=2, ignore_eos=True)
        slow = quick.model_copy(update={"max_tokens": 500, "timeout": 0.1})
        saved = ask("{x}") | slow.with_fallbacks([quick]) | TEXT
        assert to_program(saved).run(client, "tea") == saved.invoke("tea")
        retried = slow.with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
        for model in (slow, retried):
            chain = ask("{x}") | model | TEXT
            compiled = to_program(chain)
            for run in (chain.invoke, lambda given, its=compiled: its.run(client, given)):
                with pytest.raises(NotReadyError) as raised:
                    run("tea")
                assert raised.value.code == "client.not_ready"


def test_the_time_of_a_planned_call_begins_in_the_chain() -> None:
    chain = ask("{x}") | LLM.model_copy(update={"timeout": 2.0})
    plan = plan_of(chain, identity=identity_of(LLM), prefix="", config=None)
    assert "timeout_s" not in plan.calls[0].node
    assert to_program(chain).program["nodes"][0]["timeout_s"] == 2.0
