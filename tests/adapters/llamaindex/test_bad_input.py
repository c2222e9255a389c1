"""Every way to call an app raises the original error with the server's reason.

Nothing keeps running on the server afterwards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, ConureEmbedding, accelerate, conure_run
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import (
    ConureError,
    NotFoundError,
    ProgramError,
    PromptError,
    UnavailableError,
)

from ..left import all_ended, all_submitted, leaving_server


async def call_llm(llm: Conure, way: str, prompt: str, **kwargs: Any) -> None:
    """Call an LLM by one of LlamaIndex's eight methods, and read the answer to its end."""
    given: Any = [ChatMessage(role="user", content=prompt)] if "chat" in way else prompt
    method = getattr(llm, way)
    match way.partition("_")[0]:
        case "stream":
            await asyncio.to_thread(lambda: list(method(given, **kwargs)))
        case "astream":
            async for _ in await method(given, **kwargs):
                pass
        case "achat" | "acomplete":
            await method(given, **kwargs)
        case _:
            await asyncio.to_thread(method, given, **kwargs)


LLM_WAYS = [
    f"{prefix}{what}"
    for what in ("chat", "complete")
    for prefix in ("", "a", "stream_", "astream_")
]


class Broken(BaseRetriever):
    """A retriever that raises."""

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        raise KeyError("oh")


class Given(BaseRetriever):
    """Always finds the same nodes."""

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        text = "Fact is here. " * 60
        return [NodeWithScore(node=TextNode(text=text), score=1) for _ in range(4)]


def engine(
    llm: Conure, way: str, *, retriever: type[BaseRetriever] = Given, **settings: Any
) -> Any:
    """Return a query engine with four facts that streams if the way requires it."""
    streams = "stream" in way
    synthesizer = get_response_synthesizer(llm=llm, streaming=streams, use_async=False, **settings)
    return RetrieverQueryEngine(retriever(), synthesizer)


async def ask_engine(app: Any, way: str) -> None:
    """Query an engine, and read its answer to the end."""
    if way.startswith("a"):
        response = await app.aquery("what?")
        if way == "astream":
            async for _ in response.response_gen:
                pass
        return
    response = await asyncio.to_thread(app.query, "what?")
    if way == "stream":
        await asyncio.to_thread(lambda: list(response.response_gen))


APP_WAYS = ("query", "aquery", "stream", "astream")


class Case(NamedTuple):
    """Arguments of an LLM and of its call with which the call fails."""

    llm: dict[str, Any]
    prompt: str
    kwargs: dict[str, Any]
    error: type[Exception]
    match: str


CASES = {
    "a constraint that is refused": Case(
        {}, "tea", {"constraint": {"regex": "(?=a)b"}}, ProgramError, "invalid regex"
    ),
    "a model that is not there": Case({}, "tea", {"model": "nobody"}, ConureError, "nobody"),
    "a prompt that is too long": Case({}, "x" * 100_000, {}, PromptError, "tokens"),
    "an unknown argument": Case({}, "tea", {"beams": 4}, ValueError, "beams=4"),
    "a value out of its bounds": Case({}, "tea", {"top_p": 7}, ProgramError, "top_p"),
    "a tool without a name": Case(
        {},
        "tea",
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        ConureError,
        "invalid function name",
    ),
}


@pytest.mark.parametrize("way", LLM_WAYS)
@pytest.mark.parametrize("name", CASES)
async def test_invalid_call_raises_with_the_reason(
    client: Client, make_llm: Callable[..., Conure], submitted: list[str], name: str, way: str
) -> None:
    case = CASES[name]
    with pytest.raises(case.error, match=case.match):
        await call_llm(make_llm(**case.llm), way, case.prompt, **case.kwargs)
    await all_ended(client, submitted)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("temprature", "did you mean `temperature`"),
        ("beams", "it has "),
        ("top_k", "top_k is an option of calls"),
    ],
)
def test_unknown_argument_of_the_class_is_refused(name: str, cure: str) -> None:
    with pytest.raises(ValidationError, match=f"unknown argument {name}=0 of Conure; {cure}"):
        Conure(**cast(Any, {name: 0}))


def test_embedding_suggests_its_name_of_the_model() -> None:
    with pytest.raises(ValidationError, match="did you mean `model_name`"):
        ConureEmbedding(**cast(Any, {"model": "default"}))


@pytest.mark.parametrize("way", LLM_WAYS)
async def test_unreachable_server_is_named(way: str) -> None:
    llm = Conure(base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9.*is the server running"):
        await call_llm(llm, way, "tea")
    await llm._clients.aclose()


APPS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a retriever that raises": ({}, {"retriever": Broken}, KeyError, "oh"),
    "a model that is not there": (
        {"model": "nobody"},
        {},
        NotFoundError,
        "model 'nobody' not found",
    ),
    "a prompt that is too long": (
        {"context_window": 900_000},
        {"summary_template": PromptTemplate("{context_str}" * 300 + "{query_str}")},
        PromptError,
        "tokens",
    ),
    "a value out of its bounds": ({"top_p": 7}, {}, ProgramError, "top_p"),
}


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("way", APP_WAYS)
@pytest.mark.parametrize("name", APPS)
async def test_app_failure_leaves_nothing_running(
    client: Client,
    make_llm: Callable[..., Conure],
    submitted: list[str],
    name: str,
    way: str,
    is_fast: bool,
) -> None:
    settings, parts, error, match = APPS[name]
    llm = make_llm(**settings)
    with pytest.raises(error, match=match):
        app = engine(
            llm, way, response_mode="tree_summarize", **parts
        )  # requests the model's metadata
        await ask_engine(accelerate(app) if is_fast else app, way)
    await all_ended(client, submitted)


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("way", APP_WAYS)
async def test_app_without_server_raises(way: str, is_fast: bool) -> None:
    llm = Conure(base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9.*is the server running"):
        app = engine(llm, way, response_mode="compact")
        await ask_engine(accelerate(app) if is_fast else app, way)
    await llm._clients.aclose()


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("way", APP_WAYS)
async def test_closed_client_is_named(tmp_path: Path, way: str, is_fast: bool) -> None:
    with await asyncio.to_thread(
        lambda: Client(app=create_app(Config(engine="fake", data=tmp_path)))
    ) as client:
        llm = Conure(client=client, max_tokens=20)
        app = engine(llm, way, response_mode="compact")
        assert llm.metadata.context_window
    async with asyncio.timeout(60):
        with pytest.raises((ConureError, RuntimeError), match="closed"):
            await ask_engine(accelerate(app) if is_fast else app, way)
    await llm._clients.aclose()


async def test_server_shutdown_reaches_every_waiter(submitted: list[str]) -> None:
    async with leaving_server() as (client, leave):
        llm = Conure(client=client)
        apps = [
            (way, accelerate(app) if is_fast else app)
            for way in APP_WAYS
            for is_fast in (False, True)
            for app in [engine(llm, way, response_mode="tree_summarize")]
        ]
        waiting = [asyncio.create_task(ask_engine(app, way)) for way, app in apps]
        waiting += [asyncio.create_task(call_llm(llm, way, "tea")) for way in LLM_WAYS]
        await all_submitted(submitted, len(waiting))
        await leave()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [each for each in results if not isinstance(each, ConureError)] == []
        await llm._clients.aclose()


@pytest.mark.parametrize(
    "constraint",
    [{"regex": "[a-z]{30}"}, {"choices": ["x" * 30, "y" * 30]}, {"lark": 'start: "x"~30'}],
    ids=["regex", "choices", "lark"],
)
async def test_cut_answer_under_a_constraint_is_an_error(
    make_llm: Callable[..., Conure], constraint: dict[str, Any]
) -> None:
    llm = make_llm(max_tokens=1)
    with pytest.raises(ValueError, match="before it satisfied its constraint"):
        llm.complete("x", constraint=constraint)
    with pytest.raises(ValueError, match="before it satisfied its constraint"):
        list(llm.stream_complete("x", constraint=constraint))
    with pytest.raises(ValueError, match="before it satisfied its constraint"), conure_run():
        await llm.acomplete("x", constraint=constraint)


class Point(BaseModel):
    x: int


@pytest.mark.parametrize(
    "response_format",
    [
        Point,
        {"type": "json_schema", "json_schema": {"schema": Point.model_json_schema()}},
        {"type": "json_object"},
    ],
)
def test_response_format_is_a_constraint(
    make_llm: Callable[..., Conure], response_format: Any
) -> None:
    answer = make_llm(max_tokens=400).complete("x", response_format=response_format, n=1)
    assert isinstance(json.loads(answer.text), dict)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 3}, "got n=3; call the LLM several times"),
        ({"response_format": {"type": "xml"}}, "response_format must be"),
        (
            {"response_format": {"type": "json_object"}, "constraint": {"regex": "a"}},
            "either constraint or response_format",
        ),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    make_llm: Callable[..., Conure], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm().complete("x", **arguments)
