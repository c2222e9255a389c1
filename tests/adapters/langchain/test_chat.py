"""The chat model follows LangChain's protocol, also when connections or programs fail."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from inspect import signature
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, dumps, load
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, Runnable, RunnablePassthrough

from conure.adapters.client import Client, NotReadyError, Retry
from conure.adapters.langchain import ChatConure
from conure.server.program.errors import ConureError, RunError, UnavailableError

from ..interrupted import check_cancelled_task_cancels, check_interruption_cancels

PROGRAM = "/v1/programs/p_1"
VALUE = {
    "role": "assistant",
    "content": "hello tea",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "model": "tiny",
}


@pytest.fixture
def llm(double: Any, kit: Any) -> Iterator[ChatConure]:
    double.on("POST", "/v1/programs", kit.accepted("answer"))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    path = f"{PROGRAM}/variables/answer"
    double.on("GET", path, kit.Answer(200, {"status": "done", "value": VALUE}))
    retry = Retry(max_retries=1, base_delay_s=0.0001)
    with Client(app=double, retry=retry) as client:
        yield ChatConure(client=client, model="tiny", temperature=0, stop=["."])


def test_call_is_a_program_of_one_node(llm: ChatConure, double: Any) -> None:
    message = llm.invoke([("system", "s"), ("human", "h")], seed=7, max_tokens=3)
    (post,) = double.of("POST", "/v1/programs")
    nodes = post.body["program"]["nodes"]
    assert nodes[0].pop("meta").keys() == {"run_id"}
    assert nodes == [
        {
            "id": "chat",
            "op": "generate",
            "model": "tiny",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "h"}],
            "output": {
                "variable": "answer",
                "as": "message",
                "temperature": 0.0,
                "seed": 7,
                "max_tokens": 3,
                "stop": ["."],
            },
        }
    ]
    assert message.content == "hello tea"
    assert message.usage_metadata == {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    assert message.response_metadata["model_name"] == "tiny"
    assert message.response_metadata["finish_reason"] == "stop"


async def test_the_time_limit_of_a_call_includes_the_wait_for_a_busy_server(
    double: Any, kit: Any
) -> None:
    busy = kit.Answer(429, kit.problem(429, "queue.full", "full"), {"Retry-After": "1"})
    double.on("POST", "/v1/programs", busy)
    with Client(app=double) as client:
        llm = ChatConure(client=client, timeout=0.1)
        with pytest.raises(UnavailableError, match="full"):
            llm.invoke("a")
        with pytest.raises(UnavailableError, match="full"):
            await llm.ainvoke("a")
    assert len(double.seen) == 2, "one request of each call"


async def test_call_takes_one_exchange(llm: ChatConure, double: Any, kit: Any) -> None:
    double.answer("POST", "/v1/programs", kit.followed(kit.delta("hello", 0), kit.committed(VALUE)))
    one = await asyncio.to_thread(llm.invoke, "a")
    other = await llm.ainvoke("a")
    assert one.content == other.content == "hello tea"
    pieces = await asyncio.to_thread(lambda: [piece.content for piece in llm.stream("a")])
    assert pieces == [piece.content async for piece in llm.astream("a")] == ["hello", " tea", ""]
    assert [seen.method for seen in double.seen] == ["POST"] * 4
    whole = "types=program.finished&types=variable.committed"
    assert [seen.query for seen in double.seen] == [whole, whole, "", ""]
    await llm.async_connection().close()


CALLS: dict[str, Callable[[ChatConure], Any]] = {
    "invoke": lambda llm: llm.invoke("a"),
    "stream": lambda llm: list(llm.stream("a")),
}
AWAITED_CALLS: dict[str, Callable[[ChatConure], Awaitable[Any]]] = {
    "ainvoke": lambda llm: llm.ainvoke("a"),
    "astream": lambda llm: anext(llm.astream("a")),
}


@pytest.mark.parametrize("way", CALLS)
def test_a_call_that_is_interrupted_while_it_is_submitted_is_cancelled(
    llm: ChatConure, double: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    check_interruption_cancels(lambda: CALLS[way](llm), llm.connection(), double, kit, monkeypatch)


@pytest.mark.parametrize("way", AWAITED_CALLS)
async def test_a_task_that_is_cancelled_while_it_submits_a_call_cancels_it(
    llm: ChatConure, double: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    await check_cancelled_task_cancels(lambda: AWAITED_CALLS[way](llm), double, monkeypatch)
    await llm.async_connection().close()


async def test_call_continues_after_broken_stream(llm: ChatConure, double: Any, kit: Any) -> None:
    double.answer("POST", "/v1/programs", kit.followed(kit.delta("hel", 0), is_cut=True))
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.committed(VALUE)]))
    assert (await asyncio.to_thread(llm.invoke, "a")).content == "hello tea"
    assert (await llm.ainvoke("a")).content == "hello tea"
    await llm.async_connection().close()


async def test_failed_call_raises_its_reason(llm: ChatConure, double: Any, kit: Any) -> None:
    double.answer("POST", "/v1/programs", kit.followed(kit.finished(3, "failed")))
    lost = kit.problem(503, "engine.lost", "three times", variable_status="failed")
    double.answer("GET", f"{PROGRAM}/variables/answer", kit.Answer(503, lost))
    with pytest.raises(UnavailableError, match="three times"):
        await asyncio.to_thread(llm.invoke, "a")
    with pytest.raises(UnavailableError, match="three times"):
        await llm.ainvoke("a")
    assert len(double.of("DELETE", PROGRAM)) == 2
    await llm.async_connection().close()


def test_stop_of_call_overrides_model(llm: ChatConure, double: Any) -> None:
    llm.bind(stop="x").invoke("a")
    llm.invoke("a", stop=["y"])
    stops = [
        post.body["program"]["nodes"][0]["output"]["stop"]
        for post in double.of("POST", "/v1/programs")
    ]
    assert stops == [["x"], ["y"]]


def test_unknown_argument_is_rejected_by_name(llm: ChatConure) -> None:
    with pytest.raises(ValueError, match="temprature=1"):
        llm.invoke("a", temprature=1)


def test_stream_survives_restarts_without_duplicates(
    llm: ChatConure, double: Any, kit: Any
) -> None:
    double.on(
        "GET",
        f"{PROGRAM}/events",
        kit.Answer(chunks=[kit.delta("hel", 0)], is_cut=True),
        kit.Answer(chunks=[kit.delta("hello", 0), kit.delta("he", 0, 1)], is_cut=True),
        kit.Answer(chunks=[kit.delta("ea", 7, 1), kit.committed(VALUE)]),
    )
    chunks = list(llm.stream("a"))
    assert [chunk.content for chunk in chunks] == ["hel", "lo", " tea", ""]
    last = chunks[-1]
    assert isinstance(last, AIMessageChunk)
    assert last.chunk_position == "last"
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False, False, False, True]


def test_abandoned_stream_is_cancelled(llm: ChatConure, double: Any, kit: Any) -> None:
    never = kit.Answer(chunks=[kit.delta("hel", 0), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    stream = llm.stream("a")
    assert next(stream).content == "hel"
    stream.close()  # type: ignore[attr-defined]  # a generator, declared as an iterator
    assert len(double.of("DELETE", PROGRAM)) == 1
    double.wait_for_disconnects(1)


async def test_abandoned_async_stream_is_cancelled(llm: ChatConure, double: Any, kit: Any) -> None:
    never = kit.Answer(chunks=[kit.delta("hel", 0), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    # LangChain's `astream` leaves it to the event loop to close this one.
    async with aclosing(llm._astream([HumanMessage("a")])) as stream:  # type: ignore[type-var]
        assert (await anext(stream)).text == "hel"
    assert len(double.of("DELETE", PROGRAM)) == 1
    await llm.async_connection().close()


def test_stream_of_failed_program_raises(llm: ChatConure, double: Any, kit: Any) -> None:
    failed = kit.sse(3, "node.failed", node="chat", code="engine.lost", message="three times")
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[failed, kit.finished(4, "failed")]))
    with pytest.raises(RunError, match="three times"):
        list(llm.stream("a"))


def test_streaming_invoke_sends_tokens_to_callbacks(llm: ChatConure, double: Any, kit: Any) -> None:
    tokens: list[str] = []

    class Listener(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            tokens.append(token)

    double.on(
        "GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.delta("hello", 0), kit.committed(VALUE)])
    )
    eager = llm.model_copy(update={"streaming": True})
    message = eager.invoke("a", config={"callbacks": [Listener()]})
    assert message.content == "hello tea"
    assert tokens == ["hello", " tea", ""]


def test_timed_out_call_is_cancelled(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted("answer"))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    double.on("GET", f"{PROGRAM}/variables/answer", kit.Answer(202, {"status": "running"}))
    with Client(app=double) as client:
        llm = ChatConure(client=client, timeout=0.01)
        with pytest.raises(NotReadyError):
            llm.invoke("a")
    assert double.of("POST", "/v1/programs")[0].body["options"] == {"deadline_s": 0.01}
    assert len(double.of("DELETE", PROGRAM)) == 1


def test_tracing_has_provider_model_and_settings() -> None:
    llm = ChatConure(model="m", temperature=0.5, max_tokens=9, stop=["x"])
    assert llm._get_ls_params() == {
        "ls_provider": "conure",
        "ls_model_name": "m",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 9,
        "ls_stop": ["x"],
    }
    assert llm._get_ls_params(model="other").get("ls_model_name") == "other"
    assert llm._llm_type == "conure"
    assert llm._identifying_params["model"] == "m"


def test_model_has_a_profile() -> None:
    llm = ChatConure()
    assert (llm.profile["tool_calling"], llm.profile["image_inputs"]) == (True, False)
    assert ChatConure(profile={"max_input_tokens": 9}).profile == {"max_input_tokens": 9}
    assert "profile" not in llm.model_dump()


def test_model_is_serialized_without_its_key(monkeypatch: Any) -> None:
    monkeypatch.setenv("CONURE_API_KEY", "k3y")
    llm = ChatConure(model="m", temperature=0.5, base_url="http://x")
    written = dumpd(llm)
    assert "k3y" not in str(written)
    since_core_1_2_5 = {"allowed_objects": [ChatConure], "secrets_from_env": True}
    known = signature(load).parameters
    arguments: Any = {name: each for name, each in since_core_1_2_5.items() if name in known}
    with pytest.warns(match="`load` is in beta"):
        read = load(written, valid_namespaces=["conure"], **arguments)
    assert read == llm


def test_tools_and_formats_are_in_the_node(llm: ChatConure, double: Any) -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    llm.bind_tools([add], tool_choice="add", parallel_tool_calls=False).invoke("x")
    llm.bind_tools([add], tool_choice="any").invoke("x")
    llm.bind_tools([add]).invoke("x")
    llm.with_structured_output({"title": "T", "type": "object", "properties": {}})
    llm.invoke("x", response_format={"type": "json_object"})
    llm.bind(constraint={"choices": ["a", "b"]}).invoke("x")
    nodes = [post.body["program"]["nodes"][0] for post in double.of("POST", "/v1/programs")]
    named = {"type": "function", "function": {"name": "add"}}
    assert [node.get("tool_choice") for node in nodes[:3]] == [named, "required", None]
    assert nodes[0]["parallel_tool_calls"] is False
    assert nodes[1]["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
    assert nodes[3]["output"]["constraint"] == {"json_schema": {"type": "object"}}
    assert nodes[4]["output"]["constraint"] == {"choices": ["a", "b"]}
    with pytest.raises(ValueError, match="not the name of a tool; the tools are: add"):
        llm.bind_tools([add], tool_choice="sub")
    wrongs: list[dict[str, Any]] = [
        {"response_format": 3},
        {"constraint": {"rgx": "a"}},
        {"constraint": "a"},
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"response_format|constraint"):
            llm.invoke("x", **wrong)


def test_invalid_tool_calls_are_returned(llm: ChatConure, double: Any, kit: Any) -> None:
    def wire(call_id: str, arguments: str) -> dict[str, Any]:
        function = {"name": "add", "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    calls = [wire("one", '{"a": 1}'), wire("two", '{"a":')]
    value = {**VALUE, "content": "", "tool_calls": calls}
    path = f"{PROGRAM}/variables/answer"
    double._script["GET", path].clear()
    double.on("GET", path, kit.Answer(200, {"status": "done", "value": value}))
    message = llm.invoke("x")
    assert [(c["name"], c["args"], c["id"]) for c in message.tool_calls] == [
        ("add", {"a": 1}, "one")
    ]
    assert [(c["args"], c["id"]) for c in message.invalid_tool_calls] == [('{"a":', "two")]
    committed_event = kit.sse(5, "variable.committed", variable="answer", value=value)
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[committed_event, kit.finished(6)]))
    whole = None
    for chunk in llm.stream("x"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    # LangChain parses the readable part of an incomplete call.
    assert whole.tool_calls[0] == message.tool_calls[0]
    # The call is sent back to the server unchanged.
    llm.invoke([HumanMessage("q"), AIMessage(**message.model_dump(exclude={"type"}))])
    sent = double.of("POST", "/v1/programs")[-1].body["program"]["nodes"][0]["messages"][1]
    assert [call["id"] for call in sent["tool_calls"]] == ["one", "two"]
    assert sent["tool_calls"][1]["function"]["arguments"] == '{"a":'


def test_call_metadata_is_sent_to_the_server(llm: ChatConure, double: Any) -> None:
    config: Any = {"metadata": {"thread_id": "t1", "langgraph_node": "agent", "mine": 1}}
    llm.invoke("x", config=config)
    meta = double.of("POST", "/v1/programs")[0].body["program"]["nodes"][0]["meta"]
    assert (meta["thread_id"], meta["langgraph_node"]) == ("t1", "agent")
    assert "run_id" in meta
    assert "mine" not in meta


async def test_streamed_call_sends_the_same_metadata(
    llm: ChatConure, double: Any, kit: Any
) -> None:
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.committed(VALUE)]))
    config: Any = {"metadata": {"thread_id": "t1", "langgraph_node": "agent", "mine": 1}}
    list(llm.stream("x", config=config))
    assert [chunk async for chunk in llm.astream("x", config=config)]
    assert [event async for event in llm.astream_events("x", config=config, version="v2")]
    streaming = llm.model_copy(update={"streaming": True})
    streaming.invoke("x", config=config)
    await streaming.ainvoke("x", config=config)
    bodies = [post.body for post in double.of("POST", "/v1/programs")]
    assert len(bodies) == 5
    for body in bodies:
        meta = body["program"]["nodes"][0]["meta"]
        assert meta.keys() == {"thread_id", "langgraph_node", "run_id"}
        assert body["options"]["session"] == "thread t1"
    await llm.async_connection().close()


def test_stream_sends_the_run_ids_that_callbacks_get(
    llm: ChatConure, double: Any, kit: Any
) -> None:
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.committed(VALUE)]))

    class Watch(BaseCallbackHandler):
        ids: tuple[str, str]

        def on_chat_model_start(
            self, *args: Any, run_id: Any, parent_run_id: Any = None, **kwargs: Any
        ) -> None:
            self.ids = (str(run_id), str(parent_run_id))

    watch = Watch()
    chain: Runnable[Any, Any] = RunnablePassthrough() | llm
    list(chain.stream("x", config={"callbacks": [watch]}))
    meta = double.of("POST", "/v1/programs")[0].body["program"]["nodes"][0]["meta"]
    assert (meta["run_id"], meta["parent_run_id"]) == watch.ids


def test_langchain_cache_and_limiter_apply_to_model(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted("answer"))
    path = f"{PROGRAM}/variables/answer"
    double.on("GET", path, kit.Answer(200, {"status": "done", "value": VALUE}))
    limiter = InMemoryRateLimiter(requests_per_second=1000, check_every_n_seconds=0.001)
    with Client(app=double) as client:
        llm = ChatConure(client=client, cache=InMemoryCache(), rate_limiter=limiter)
        assert llm.invoke("a").content == llm.invoke("a").content == "hello tea"
        assert len(double.of("POST", "/v1/programs")) == 1
        llm.invoke("a", temperature=0.3)
        assert len(double.of("POST", "/v1/programs")) == 2


def test_servers_do_not_share_cached_answers(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted("answer"))
    path = f"{PROGRAM}/variables/answer"
    double.on("GET", path, kit.Answer(200, {"status": "done", "value": VALUE}))
    cache = InMemoryCache()
    with Client(app=double) as one, Client(app=double) as other:
        for client in (one, one, other):
            ChatConure(client=client, cache=cache).invoke("a")
    assert len(double.of("POST", "/v1/programs")) == 2
    one_url, other_url = (ChatConure(base_url=f"http://{name}") for name in "ab")
    assert one_url._get_llm_string() != other_url._get_llm_string()


def test_headers_stay_out_of_dumps_and_caches() -> None:
    llm = ChatConure(base_url="http://a", default_headers={"x-api-key": "SECRET"})
    assert "SECRET" not in f"{dumps(llm)} {llm!r} {llm._get_llm_string()}"
    assert llm.model_copy().default_headers == {"x-api-key": "SECRET"}


def test_several_answers_are_not_streamed_for_callbacks(double: Any, kit: Any) -> None:
    accepted = kit.accepted("answer")
    accepted.body["outputs"] = ["answer", "answer_1"]
    double.on("POST", "/v1/programs", accepted)
    for name in ("answer", "answer_1"):
        path = f"{PROGRAM}/variables/{name}"
        double.on("GET", path, kit.Answer(200, {"status": "done", "value": VALUE}))
    with Client(app=double) as client:
        llm = ChatConure(client=client, n=2, streaming=True)
        assert len(llm.generate([[HumanMessage("a")]]).generations[0]) == 2
        with pytest.raises(ValueError, match="a stream has one answer, got n=2"):
            list(llm.stream("a"))


def test_fields_are_configurable_per_call(llm: ChatConure, double: Any) -> None:
    open_llm = llm.configurable_fields(model=ConfigurableField(id="model"))
    open_llm.invoke("a", config={"configurable": {"model": "other"}})
    llm.invoke("a", model="third")
    nodes = [post.body["program"]["nodes"][0] for post in double.of("POST", "/v1/programs")]
    assert [node["model"] for node in nodes] == ["other", "third"]


COPIES: dict[str, Callable[[ChatConure], ChatConure]] = {
    "deepcopy": copy.deepcopy,
    "model_copy": lambda llm: llm.model_copy(deep=True),
    "pickle": lambda llm: pickle.loads(pickle.dumps(llm)),
}


@pytest.mark.parametrize("way", COPIES)
def test_used_model_can_be_copied(way: str) -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9", max_retries=0, api_key="k")  # type: ignore[arg-type]  # pydantic makes it a secret
    with pytest.raises(ConureError):
        llm.invoke("tea")
    other = COPIES[way](llm)
    assert other == llm == ChatConure(base_url=llm.base_url, max_retries=0, api_key=llm.api_key)
    assert other.invoke is not None
    with pytest.raises(ConureError):
        other.invoke("tea")


def test_copied_model_keeps_its_client(llm: ChatConure) -> None:
    assert copy.deepcopy(llm).invoke("tea").content == llm.invoke("tea").content
    with pytest.raises(TypeError, match="cannot be pickled; pickle its base_url"):
        pickle.dumps(llm)


def test_changed_url_gets_another_client() -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9")
    assert llm.connection().server == "http://127.0.0.1:9"
    other = llm.model_copy(update={"base_url": "http://127.0.0.1:10"})
    assert other.connection().server == "http://127.0.0.1:10"
    assert llm.connection() is llm.connection()


ASKED = [HumanMessage("hi"), AIMessage("hello tea"), HumanMessage("more")]
WAYS: dict[str, Callable[[ChatConure], Any]] = {
    "invoke": lambda llm: llm.invoke(ASKED),
    "stream": lambda llm: list(llm.stream(ASKED)),
}


def sessions(double: Any) -> list[str | None]:
    """Return the sessions of the submitted programs."""
    posts = double.of("POST", "/v1/programs")
    return [post.body.get("options", {}).get("session") for post in posts]


@pytest.mark.parametrize("way", WAYS)
def test_retry_of_failed_call_keeps_session(double: Any, kit: Any, way: str) -> None:
    refused = kit.Answer(400, kit.problem(400, "prompt.too_long", "too long"))
    double.on(
        "POST", "/v1/programs", kit.accepted("answer"), refused, refused, kit.accepted("answer")
    )
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.committed(VALUE)]))
    path = f"{PROGRAM}/variables/answer"
    double.on("GET", path, kit.Answer(200, {"status": "done", "value": VALUE}))
    with Client(app=double) as client:
        llm = ChatConure(client=client)
        llm.invoke("hi")
        with pytest.raises(ValueError, match="n must be"):
            llm.invoke(ASKED, n=0)
        with pytest.raises(ValueError, match="a stream has one answer"):
            list(llm.stream(ASKED, n=2))
        for _ in range(3):
            with suppress(ConureError):
                WAYS[way](llm)
        with suppress(ConureError):
            WAYS[way](llm)
    assert sessions(double) == [None, *["conversation p_1"] * 3, None]
