"""A class that overrides a method of LangChain is run by the application only, as a whole."""

from __future__ import annotations

import pickle
from typing import Any, cast

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
)

from conure.adapters.client import AsyncClient, Client
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.adapters.langchain.compilation.traversal import is_opaque

from .shapes import TEXT, ask


class Redacting(ChatConure):
    """Sends no secrets."""

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Any:
        safe: list[BaseMessage] = [HumanMessage(messages[-1].text.replace("secret", "***"))]
        return super()._generate(safe, *args, **kwargs)

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Any:
        safe: list[BaseMessage] = [HumanMessage(messages[-1].text.replace("secret", "***"))]
        return await super()._agenerate(safe, *args, **kwargs)


class Shouting(ChatConure):
    def invoke(self, *args: Any, **kwargs: Any) -> AIMessage:
        return AIMessage(super().invoke(*args, **kwargs).text.upper())


class LoudSequence(RunnableSequence[Any, Any]):
    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return f"{super().invoke(*args, **kwargs)}!"


class LoudParallel(RunnableParallel[Any]):
    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return {key: f"{value}!" for key, value in super().invoke(*args, **kwargs).items()}


class LoudLambda(RunnableLambda[Any, Any]):
    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return f"{super().invoke(*args, **kwargs)}!"


class LoudPassthrough(RunnablePassthrough[Any]):
    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return {"x": "changed"}


class LoudBranch(RunnableBranch[Any, Any]):
    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return f"{super().invoke(*args, **kwargs)}!"


class Named(ChatConure):
    """Overrides nothing that runs."""

    nickname: str = "tea seller"

    @property
    def _llm_type(self) -> str:
        return "named"


def chains(client: Client) -> dict[str, Runnable[Any, Any]]:
    llm = ChatConure(client=client, temperature=0, max_tokens=40)
    settings: dict[str, Any] = {"client": client, "temperature": 0, "max_tokens": 40}
    say = ask("{x}") | llm | TEXT
    return {
        "model": ask("{x}") | Redacting(**settings) | TEXT,
        "bound model": ask("{x}") | Redacting(**settings).bind(stop=["."]) | TEXT,
        "model's invoke": ask("{x}") | Shouting(**settings) | TEXT | ask("{y}") | llm | TEXT,
        "sequence": cast(Any, LoudSequence)(ask("{x}"), llm, TEXT) | ask("{y}") | llm | TEXT,
        "parallel": cast(Any, LoudParallel)(a=say, b=say) | ask("{a} {b}") | llm | TEXT,
        "assign": RunnableAssign(cast(Any, LoudParallel)(a=say)) | ask("{x} {a}") | llm | TEXT,
        "function": say | LoudLambda(str.upper) | ask("{y}") | llm | TEXT,
        "passthrough": LoudPassthrough() | say,
        "branch": cast(Any, LoudBranch)((lambda x: True, say), say) | ask("{y}") | llm | TEXT,
    }


NAMES = list(chains(Client("http://127.0.0.1:9")))


@pytest.mark.parametrize("name", NAMES)
def test_chain_keeps_its_result(client: Client, name: str) -> None:
    chain = chains(client)[name]
    given = {"x": "my secret"}
    expected = chain.invoke(given)
    assert accelerate(chain).invoke(given) == expected
    assert to_program(chain).run(client, given) == expected


@pytest.mark.parametrize("name", ["model", "bound model"])
def test_text_that_an_override_keeps_back_is_not_sent(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sent: list[str] = []
    submit, asubmit = Client.submit, AsyncClient.submit

    def record(self: Client, program: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(repr(program))
        return submit(self, program, *args, **kwargs)

    async def arecord(self: AsyncClient, program: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(repr(program))
        return await asubmit(self, program, *args, **kwargs)

    monkeypatch.setattr(Client, "submit", record)
    monkeypatch.setattr(AsyncClient, "submit", arecord)
    accelerate(chains(client)[name]).invoke({"x": "my secret"})
    assert sent
    assert not any("secret" in text for text in sent)


def test_class_without_overrides_is_planned(client: Client) -> None:
    chain = ask("{x}") | Named(client=client, temperature=0, max_tokens=20) | TEXT
    assert not is_opaque(chain)
    fast = accelerate(chain)
    fast.invoke({"x": "tea"})
    assert fast.explain().runs[-1].num_served == 1


def _shout(text: str) -> str:
    return text.upper()


def test_accelerated_and_compiled_chains_can_be_pickled() -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9", temperature=0)
    chain = ask("{x}") | llm | TEXT | RunnableLambda(_shout)
    fast, compiled = accelerate(chain), to_program(chain, name="named")
    assert str(pickle.loads(pickle.dumps(fast)).explain()) == str(fast.explain())
    assert pickle.loads(pickle.dumps(compiled)).program == compiled.program
