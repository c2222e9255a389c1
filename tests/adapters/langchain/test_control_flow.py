"""Branches, routers, fallbacks, retries and maps: programs match chains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.runnables.retry import RunnableRetry

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, to_program
from conure.server.program.errors import ConureError, ProgramError

from .shapes import TEXT, ask, shapes
from .test_accelerate import comparable

NAMES = list(shapes(ChatConure()))


class Topic(StrEnum):
    TEA = "tea"
    SEA = "sea"


def numbered(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "n": 1}


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=200)


@pytest.mark.parametrize("name", NAMES)
def test_program_matches_chain(client: Client, llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    if shape.refused:
        with pytest.raises(ConureError, match=shape.refused):
            to_program(shape.chain).run(client, shape.given)
        return
    made = to_program(shape.chain).run(client, shape.given)
    assert comparable(made) == comparable(shape.chain.invoke(shape.given))


def is_long(text: str) -> bool:
    return len(text) > 3


def broken(value: Any) -> Any:
    raise KeyError("oh")


def pieces(text: str) -> list[str]:
    return [text[:2], text[2:4], text[4:]]


def chains(llm: ChatConure) -> dict[str, tuple[Runnable[Any, Any], list[Any]]]:
    """Return chains with inputs that take every path."""
    call: Any = ask("{x}") | llm
    say = call | TEXT
    brief = ask("brief {x}") | llm | TEXT
    chat = ChatPromptTemplate.from_messages([("system", "s"), ("human", "long {x}")])
    choice = llm.bind(constraint={"choices": ["tea"]})
    long_or_brief = RunnableBranch((is_long, say), brief)
    return {
        "branch on the input": (long_or_brief, ["tea", "coffee"]),
        "branch of many arms": (
            RunnableBranch(
                (lambda x: x == "a", say),
                (lambda x: x == "b", lambda x: f"{x}!"),
                (is_long, call),
                brief,
            ),
            ["a", "b", "coffee", "tea"],
        ),
        "branch on a key": (
            RunnableBranch((itemgetter("x"), say), ask("none {y}") | llm | TEXT),
            [{"x": "", "y": 1}, {"x": "tea", "y": 2}],
        ),
        "branch on what the model said": (
            RunnablePassthrough.assign(kind=ask("{x}") | choice | TEXT)
            | RunnableBranch((lambda d: d["kind"] == "tea", ask("{kind}: {x}") | llm), call),
            [{"x": "y"}],
        ),
        "branch on an empty answer": (
            RunnableParallel(a=ask("{x}") | llm.bind(constraint={"choices": [""]}) | TEXT, b=say)
            | RunnableBranch((itemgetter("a"), itemgetter("a")), itemgetter("b"))
            | say,
            ["tea"],
        ),
        "branch between prompts": (
            RunnableBranch((is_long, chat), ask("brief {x}")) | llm | TEXT,
            ["tea", "coffee"],
        ),
        "branch between a text and a message": (
            RunnableBranch((is_long, call), say),
            ["a", "long"],
        ),
        "branch between dicts": (
            RunnableBranch(
                (is_long, RunnableParallel(a=say, b=brief)), RunnableParallel(a=brief, b=len)
            )
            | RunnableParallel(p=ask("{a} and {b}") | llm | TEXT, q=itemgetter("b")),
            ["tea", "coffee"],
        ),
        "branch that passes on": (
            RunnableBranch((is_long, RunnablePassthrough()), brief) | say,
            ["tea", "coffee"],
        ),
        "function behind a branch": (
            RunnableBranch((is_long, call), say) | (lambda made: isinstance(made, AIMessage)),
            ["tea", "coffee"],
        ),
        "branch in a branch": (
            RunnableBranch((is_long, RunnableBranch((lambda x: "c" in x, say), brief)), brief)
            | say,
            ["tea", "coffee", "lemonade"],
        ),
        "router on an answer": (
            {"key": ask("{x}") | choice | TEXT, "input": RunnablePassthrough()}
            | RouterRunnable({"sea": brief, "tea": say}),
            [{"x": "y"}],
        ),
        "router on an Enum": (
            {"key": RunnableLambda(lambda x: Topic(x)), "input": RunnablePassthrough()}
            | RouterRunnable({"tea": say, "sea": brief}),
            ["tea", "sea"],
        ),
        "arguments around a retry": (
            ask("{x}") | llm.with_retry().bind(max_tokens=3) | TEXT | say,
            ["tea"],
        ),
        "arguments of a retry": (
            ask("{x}") | RunnableRetry(bound=llm, kwargs={"max_tokens": 3}) | TEXT | say,
            ["tea"],
        ),
        "arguments around fallbacks": (
            ask("{x}") | llm.with_fallbacks([llm]).bind(max_tokens=3) | TEXT | say,
            ["tea"],
        ),
        "arguments around a branch": (
            RunnableBranch((is_long, llm), llm).bind(max_tokens=3) | TEXT | say,
            ["tea", "coffee"],
        ),
        "arguments around a sequence": ((llm | TEXT).bind(max_tokens=3) | say, ["tea"]),
        "fallback of a call that is too long": (
            (ask("{x}" * 1000) | llm).with_fallbacks([call]) | TEXT,
            ["tea", "x" * 100],
        ),
        "fallback to another provider": (
            ask("{x}" * 1000) | llm.with_fallbacks([FakeListChatModel(responses=["x"])]) | TEXT,
            ["tea" * 30],
        ),
        "model with retries": (chat | llm.with_retry() | TEXT | say, ["tea"]),
        "fallbacks of a fallback": (
            (say | broken).with_fallbacks([brief | broken, RunnableLambda(lambda x: f"no {x}")])
            | say,
            ["tea"],
        ),
        "fallback to what was there": (
            RunnablePassthrough.assign(y=say)
            | RunnableParallel(
                z=(itemgetter("y") | RunnableLambda(broken)).with_fallbacks(
                    [RunnableLambda(itemgetter("y"))]
                ),
                m=call,
            ),
            [{"x": "tea"}],
        ),
        "map of nothing": (RunnableLambda(lambda x: []) | say.map(), ["tea"]),
        "map over the input": (say.map(), [["tea", "milk"], []]),
        "map over dicts": (
            RunnablePassthrough.assign(said=say, size=itemgetter("x") | RunnableLambda(len)).map(),
            [[{"x": "a", "n": 1}, {"x": "b", "n": [2]}]],
        ),
        "map of a map": (RunnableLambda(pieces).map() | say.map().map(), [["coffee", "lemonade"]]),
        "map over a map": (
            RunnableLambda(pieces) | call.map() | TEXT.map() | say.map(),
            ["lemonade"],
        ),
        "map in a prompt": (RunnableLambda(pieces) | say.map() | ask("{y}") | llm, ["lemonade"]),
        "map of branches": (
            RunnableLambda(pieces) | long_or_brief.map() | ", ".join,
            ["lemonades"],
        ),
        "map in a branch": (
            RunnableBranch((is_long, RunnableLambda(pieces) | say.map() | "".join), brief) | say,
            ["tea", "coffee"],
        ),
        "text made on the server": (say | str.strip | str.lower | say, ["Tea"]),
        "retry of a map": ((RunnableLambda(pieces) | say.map()).with_retry(), ["coffee"]),
        "another model": (
            chat | FakeListChatModel(responses=["  Fake "]) | TEXT | say,
            [{"x": "tea"}],
        ),
        "functions alone": (
            RunnableLambda(pieces).map().with_retry() | (lambda found: str(found)) | say,
            [["coffee"]],
        ),
        "history": (
            RunnableBranch(
                (
                    lambda d: d["h"],
                    ChatPromptTemplate.from_messages([("placeholder", "{h}"), ("human", "{x}")]),
                ),
                ask("{x}"),
            )
            | llm,
            [{"x": "tea", "h": []}, {"x": "tea", "h": [HumanMessage("hi"), AIMessage("ho")]}],
        ),
    }


CHAINS = list(chains(ChatConure()))


@pytest.mark.parametrize("name", CHAINS)
async def test_program_decides_as_chain(client: Client, llm: ChatConure, name: str) -> None:
    chain, inputs = chains(llm)[name]
    compiled = to_program(chain)
    for given in inputs:
        expected = comparable(await asyncio.to_thread(chain.invoke, given))
        assert comparable(await asyncio.to_thread(compiled.run, client, given)) == expected
        async with client.asynchronous() as other:
            assert comparable(await compiled.arun(other, given)) == expected


def test_unchosen_parts_never_run(client: Client, llm: ChatConure) -> None:
    requested: list[str] = []

    def note(name: str, *, gives: Any) -> Callable[[Any], Any]:
        def call(given: Any) -> Any:
            requested.append(name)
            return gives

        return call

    chain: Any = RunnableBranch(
        (note("first", gives=0), broken),
        (note("second", gives="yes"), note("arm", gives="x") | ask("{x}") | llm),
        (note("third", gives=1), broken),
        broken,
    )
    to_program(chain).run(client, "tea")
    assert requested == ["first", "second", "arm"]


WITHOUT_CONTEXT: dict[str, Any] = {"q": "tea", "z": 1}


def readers(llm: ChatConure) -> dict[str, tuple[Runnable[Any, Any], Any]]:
    """Return chains whose unchosen parts read missing inputs."""

    def say(template: str) -> Any:
        return ask(template) | llm | TEXT

    def branch(arm: Any) -> Any:
        return RunnableBranch((lambda d: "ctx" in d, arm), say("{q} {z}"))

    mapped = itemgetter("ctx") | say("{x}").map()
    routes = {"a": say("{x}"), "b": say("{y}")}
    return {
        "a prompt": (branch(say("{ctx}: {q}")), WITHOUT_CONTEXT),
        "a message": (branch(ask("{ctx}: {q}") | llm), WITHOUT_CONTEXT),
        "an itemgetter": (branch(itemgetter("ctx") | say("{x}")), WITHOUT_CONTEXT),
        "a placeholder": (
            branch(
                ChatPromptTemplate.from_messages([("placeholder", "{ctx}"), ("human", "{q}")]) | llm
            ),
            WITHOUT_CONTEXT,
        ),
        "a map": (branch(mapped), WITHOUT_CONTEXT),
        "a branch in a branch": (branch(branch(say("{ctx}"))), WITHOUT_CONTEXT),
        "a map of branches": (branch(say("{ctx}")).map(), [WITHOUT_CONTEXT, {"ctx": 1, "q": 2}]),
        "behind a function": (
            RunnableLambda(numbered) | branch(say("{ctx}: {n}")),
            WITHOUT_CONTEXT,
        ),
        "an arm that gives it on": (
            branch(itemgetter("ctx")) | (lambda made: f"<{made}>"),
            WITHOUT_CONTEXT,
        ),
        "a text where a dict is read": (
            RunnableBranch((lambda x: isinstance(x, str), say("{x}")), itemgetter("x")),
            "tea",
        ),
        "routes of other inputs": (RouterRunnable(routes), {"key": "b", "input": {"y": "tea"}}),
        "a fallback that is not needed": (
            say("{q}").with_fallbacks([say("{ctx} {z}")]),
            WITHOUT_CONTEXT,
        ),
        "what has a fallback": (say("{ctx}").with_fallbacks([say("{q}")]), WITHOUT_CONTEXT),
        "what is no JSON": (
            RunnableBranch(
                (itemgetter("q"), say("{q}")), itemgetter("o") | RunnableLambda(str) | say("{x}")
            ),
            {"q": "tea", "o": {1, 2}},
        ),
        "what looks like an error": (
            branch(itemgetter("q") | RunnableLambda(str)),
            {"q": {"error": "x: y"}, "ctx": 1},
        ),
    }


@pytest.mark.parametrize("name", readers(ChatConure()))
async def test_unchosen_part_may_read_missing_input(
    client: Client, llm: ChatConure, name: str
) -> None:
    chain, given = readers(llm)[name]
    expected = comparable(await asyncio.to_thread(chain.invoke, given))
    compiled = to_program(chain)
    assert comparable(await asyncio.to_thread(compiled.run, client, given)) == expected
    async with client.asynchronous() as other:
        assert comparable(await compiled.arun(other, given)) == expected


@pytest.mark.parametrize("is_behind_function", [False, True])
async def test_missing_input_of_chosen_part_fails_as_in_chain(
    client: Client, llm: ChatConure, is_behind_function: bool
) -> None:
    arm = ask("{ctx}: {q}") | llm | TEXT
    chain: Any = RunnableBranch((lambda d: d["z"], arm), ask("{q}") | llm)
    if is_behind_function:
        chain = RunnableLambda(lambda d: d) | chain
    with pytest.raises(KeyError, match="ctx") as caught:
        await asyncio.to_thread(chain.invoke, WITHOUT_CONTEXT)
    compiled = to_program(chain)
    with pytest.raises(KeyError) as found:
        await asyncio.to_thread(compiled.run, client, WITHOUT_CONTEXT)
    assert str(found.value) == str(caught.value)
    async with client.asynchronous() as other:
        with pytest.raises(KeyError) as found:
            await compiled.arun(other, WITHOUT_CONTEXT)
    assert str(found.value) == str(caught.value)


@pytest.mark.parametrize("is_first", [False, True])
def test_empty_branch_text_is_false_condition(
    client: Client, llm: ChatConure, is_first: bool
) -> None:
    empty = ask("{q}") | llm.bind(constraint={"choices": [""]}) | TEXT
    parts: list[Runnable[Any, Any]] = [empty, RunnableLambda(lambda d: "")]
    for nothing in parts:
        found = RunnableBranch((itemgetter("is_first"), nothing), ask("{q}") | llm)
        chain = RunnableBranch((found, ask("yes {q}") | llm | TEXT), ask("no {q}") | llm | TEXT)
        given = {"q": "tea", "is_first": is_first}
        assert to_program(chain).run(client, given) == chain.invoke(given)


@pytest.mark.parametrize("first", ["of a function", "of a model"])
def test_failed_fallbacks_raise_first_failure(client: Client, llm: ChatConure, first: str) -> None:
    def unlike(value: Any) -> Any:
        raise TypeError("second")

    say = ask("{x}") | llm | TEXT
    long = ask("{x}") | llm.bind(max_tokens=10**6) | TEXT
    part = say | broken if first == "of a function" else long
    chain = part.with_fallbacks([say | unlike])
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever LangChain raises
        chain.invoke({"x": "tea"})
    with pytest.raises(ConureError) as caught:
        to_program(chain).run(client, {"x": "tea"})
    if first == "of a function":
        assert repr(caught.value.__cause__) == repr(expected.value)
    else:
        assert caught.value.__cause__ is None
        assert isinstance(expected.value, ConureError)
        assert caught.value.code == expected.value.code


def test_handled_failure_is_not_reported_later(client: Client, llm: ChatConure) -> None:
    def unlike(value: Any) -> Any:
        raise TypeError("second")

    say = ask("{x}") | llm | TEXT
    missing = ask("{y}{x}") | llm | TEXT
    for part in (say | broken, missing):
        chain = part.with_fallbacks([say]) | say | unlike
        with pytest.raises(ConureError, match="TypeError: second") as caught:
            to_program(chain).run(client, {"x": "tea"})
        assert isinstance(caught.value.__cause__, TypeError)


def test_later_failure_in_body_matches_chain(client: Client, llm: ChatConure) -> None:
    def unlike(value: Any) -> Any:
        raise TypeError("later")

    def worse(value: Any) -> Any:
        raise ValueError("in its fallback")

    say = ask("{x}") | llm | TEXT
    handled = (say | broken).with_fallbacks([say])
    fails: Runnable[Any, Any] = RunnableLambda(unlike)
    parts: tuple[Runnable[Any, Any], ...] = (
        RunnableLambda(lambda text: [text]) | (say | fails).map(),
        (say | fails).with_fallbacks([say | worse]),
        (say | fails).with_retry(stop_after_attempt=2, wait_exponential_jitter=False),
        RunnableBranch((lambda text: bool(text), say | fails), say),
        (say | handled | fails).with_fallbacks([handled | worse]),
    )
    for later in parts:
        chain = handled | later
        with pytest.raises(TypeError, match="later"):
            chain.invoke({"x": "tea"})
        with pytest.raises(ConureError, match="TypeError: later") as caught:
            to_program(chain).run(client, {"x": "tea"})
        assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("num_failures", [0, 1, 2, 3])
def test_retry_makes_as_many_attempts_as_chain(
    client: Client, llm: ChatConure, num_failures: int
) -> None:
    seen: list[str] = []

    def frail(text: str) -> str:
        seen.append(text)
        if len(seen) <= num_failures:
            raise ValueError(text)
        return text

    say = ask("{x}") | llm | TEXT
    chain = (say | frail).with_retry(stop_after_attempt=3, wait_exponential_jitter=False) | say
    if num_failures < 3:
        assert to_program(chain).run(client, "tea") == (say | say).invoke("tea")
    else:
        with pytest.raises(ConureError, match="frail: ValueError"):
            to_program(chain).run(client, "tea")
    assert len(seen) == min(3, num_failures + 1)


@pytest.mark.parametrize("key", ["by input", "by answer"])
def test_unknown_route_key_fails_as_in_chain(client: Client, llm: ChatConure, key: str) -> None:
    say = ask("{x}") | llm | TEXT
    router = RouterRunnable({"tea": say, "sea": say})
    said = ask("{x}") | llm.bind(constraint={"choices": ["milk"]}) | TEXT
    found: Any = said if key == "by answer" else itemgetter("x")
    chain: Any = {"key": found, "input": RunnablePassthrough()} | router
    for run in (chain.invoke, lambda given: to_program(chain).run(client, given)):
        with pytest.raises(Exception, match="No runnable associated with key 'milk'"):
            run({"x": "milk"})


LLM = ChatConure()
SAY: Any = ask("{x}") | LLM | TEXT
REFUSED: dict[str, tuple[Any, str, str]] = {
    "some exceptions": (
        {"y": SAY.with_fallbacks([SAY], exceptions_to_handle=(ValueError,))},
        "chain['y']",
        "handles only ValueError",
    ),
    "the exception": (
        SAY.with_fallbacks([SAY], exception_key="error"),
        "chain",
        "passes an exception on",
    ),
    "retries on some": (
        SAY | SAY.with_retry(retry_if_exception_type=(ValueError,)),
        "chain.steps[3]",
        "only on some exceptions",
    ),
    "many retries": (
        SAY.with_retry(stop_after_attempt=12),
        "chain",
        "12 attempts; a program allows at most 11",
    ),
    "retries without a limit": (
        SAY.with_retry(stop_after_attempt=0),
        "chain",
        "stop_after_attempt=0, which sets no limit; a program allows at most 11 attempts",
    ),
    "map over a text": (SAY | SAY.map(), "chain.steps[3]", "requires a list, got a model's text"),
    "message as a key": (
        {"key": ask("{x}") | LLM, "input": SAY} | RouterRunnable({"a": SAY}),
        "chain.steps[1]",
        "requires a text key, got a model's message",
    ),
    "what a part cannot be": (
        RunnableBranch((is_long, SAY), SAY.with_listeners(on_end=print)),
        "chain.default",
        "listeners",
    ),
    "printed message": (
        RunnableBranch((is_long, ask("{x}") | LLM), SAY)
        | PromptTemplate.from_template("{y}")
        | LLM,
        "chain.steps[1]",
        "add `| StrOutputParser()` after the model",
    ),
    "printed prompt": (
        RunnableParallel(y=RunnableParallel(z=ask("{x}"))) | ask("{y}") | LLM,
        "chain.steps[1]",
        "add a model and `| StrOutputParser()` after the prompt",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_control_flow_is_rejected_with_position(name: str) -> None:
    chain, path, message = REFUSED[name]
    with pytest.raises(ProgramError) as caught:
        to_program(chain)
    assert (caught.value.code, caught.value.path) == ("to_program.unsupported", path)
    assert message in caught.value.message
