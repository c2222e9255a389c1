"""The chat model keeps LangChain's protocol, whatever happens on the way to the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessageChunk, HumanMessage

from conure.adapters.client import Client, NotReadyError, Retry
from conure.adapters.langchain import ChatConure
from conure.server.program.errors import RunError

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
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    path = f"{PROGRAM}/variables/answer"
    double.on("GET", path, kit.Answer(200, {"status": "done", "value": VALUE}))
    retry = Retry(max_retries=1, first_s=0.0001)
    with Client(app=double, retry=retry) as client:
        yield ChatConure(client=client, model="tiny", temperature=0, stop=["."])


def delta(kit: Any, text: str, offset: int, attempt: int = 0) -> bytes:
    wire: bytes = kit.sse(
        None, "node.delta", variable="answer", text=text, attempt=attempt, offset=offset
    )
    return wire


def committed(kit: Any) -> bytes:
    return bytes(kit.sse(5, "variable.committed", variable="answer", value=VALUE)) + bytes(
        kit.finished(6)
    )


def test_a_call_is_a_program_of_one_node(llm: ChatConure, double: Any) -> None:
    message = llm.invoke([("system", "s"), ("human", "h")], seed=7, max_tokens=3)
    (post,) = double.of("POST", "/v1/programs")
    assert post.body["program"]["nodes"] == [
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


def test_a_stop_of_the_call_wins(llm: ChatConure, double: Any) -> None:
    llm.bind(stop="x").invoke("a")
    llm.invoke("a", stop=["y"])
    stops = [
        post.body["program"]["nodes"][0]["output"]["stop"]
        for post in double.of("POST", "/v1/programs")
    ]
    assert stops == [["x"], ["y"]]


def test_an_unknown_argument_is_refused_by_name(llm: ChatConure) -> None:
    with pytest.raises(ValueError, match="temprature=1"):
        llm.invoke("a", temprature=1)


def test_a_stream_survives_restarts_without_saying_anything_twice(
    llm: ChatConure, double: Any, kit: Any
) -> None:
    double.on(
        "GET",
        f"{PROGRAM}/events",
        kit.Answer(chunks=[delta(kit, "hel", 0)], is_cut=True),
        kit.Answer(chunks=[delta(kit, "hello", 0), delta(kit, "he", 0, 1)], is_cut=True),
        kit.Answer(chunks=[delta(kit, "ea", 7, 1), committed(kit)]),
    )
    chunks = list(llm.stream("a"))
    assert [chunk.content for chunk in chunks] == ["hel", "lo", " tea", ""]
    last = chunks[-1]
    assert isinstance(last, AIMessageChunk)
    assert last.chunk_position == "last"
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False, False, False, True]


def test_a_stream_that_is_left_is_cancelled(llm: ChatConure, double: Any, kit: Any) -> None:
    never = kit.Answer(chunks=[delta(kit, "hel", 0), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    stream = llm.stream("a")
    assert next(stream).content == "hel"
    stream.close()  # type: ignore[attr-defined]  # a generator, declared as an iterator
    assert len(double.of("DELETE", PROGRAM)) == 1
    assert double.num_disconnects == 1


async def test_an_awaited_stream_that_is_left_is_cancelled(
    llm: ChatConure, double: Any, kit: Any
) -> None:
    never = kit.Answer(chunks=[delta(kit, "hel", 0), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    # LangChain's own `astream` leaves closing this one to the loop, a little later.
    async with aclosing(llm._astream([HumanMessage("a")])) as stream:  # type: ignore[type-var]
        assert (await anext(stream)).text == "hel"
    assert len(double.of("DELETE", PROGRAM)) == 1
    await llm._aclient().close()


def test_a_stream_of_a_program_that_fails_is_an_error(
    llm: ChatConure, double: Any, kit: Any
) -> None:
    failed = kit.sse(3, "node.failed", node="chat", code="engine.lost", message="three times")
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[failed, kit.finished(4, "failed")]))
    with pytest.raises(RunError, match="three times"):
        list(llm.stream("a"))


def test_tokens_reach_callbacks_when_invoke_streams(llm: ChatConure, double: Any, kit: Any) -> None:
    tokens: list[str] = []

    class Listener(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            tokens.append(token)

    double.on(
        "GET", f"{PROGRAM}/events", kit.Answer(chunks=[delta(kit, "hello", 0), committed(kit)])
    )
    eager = llm.model_copy(update={"streaming": True})
    message = eager.invoke("a", config={"callbacks": [Listener()]})
    assert message.content == "hello tea"
    assert tokens == ["hello", " tea", ""]


def test_a_call_that_takes_too_long_is_cancelled(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted())
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    double.on("GET", f"{PROGRAM}/variables/answer", kit.Answer(202, {"status": "running"}))
    with Client(app=double) as client:
        llm = ChatConure(client=client, timeout=0.01)
        with pytest.raises(NotReadyError):
            llm.invoke("a")
    assert double.of("POST", "/v1/programs")[0].body["options"] == {"deadline_s": 0.01}
    assert len(double.of("DELETE", PROGRAM)) == 1


def test_tracing_knows_provider_model_and_settings() -> None:
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
