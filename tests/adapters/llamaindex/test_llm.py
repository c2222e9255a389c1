"""Requests and responses of the LlamaIndex LLM, also when connections or programs fail."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import BaseOutputParser

from conure.adapters.client import Client, NotReadyError, Retry, ServerUnreachableError
from conure.adapters.llamaindex import Conure
from conure.server.program.errors import NotFoundError, ProgramError, RunError

from ..interrupted import check_cancelled_task_cancels, check_interruption_cancels
from .conformance import Person

PROGRAM = "/v1/programs/p_1"
VALUE = {
    "role": "assistant",
    "content": "hello tea",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    "model": "tiny",
}
MODELS = {
    "data": [
        {"id": "tiny", "max_model_len": 4096, "object": "model"},
        {"id": "tools", "max_model_len": 100, "capabilities": ["tools"]},
    ]
}


@pytest.fixture
async def llm(double: Any, kit: Any) -> AsyncIterator[Conure]:
    double.on("POST", "/v1/programs", kit.accepted("answer"))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    double.on("GET", "/v1/models", kit.Answer(200, MODELS))
    path = f"{PROGRAM}/variables/answer"
    double.on("GET", path, kit.Answer(200, {"status": "done", "value": VALUE}))
    with Client(app=double, retry=Retry(max_retries=1, base_delay_s=0.0001)) as client:
        llm = Conure(client=client, temperature=0, stop=["."])
        yield llm
        await llm._clients.aclose()


def nodes(double: Any) -> list[Any]:
    """Return the submitted nodes, one per program."""
    posts = double.of("POST", "/v1/programs")
    for post in posts:
        assert len(post.body["program"]["nodes"]) == 1
    return [post.body["program"]["nodes"][0] for post in posts]


def test_chat_is_a_program_of_one_node(llm: Conure, double: Any) -> None:
    chat = [ChatMessage(role="system", content="s"), ChatMessage(role="user", content="h")]
    response = llm.chat(chat, seed=7, max_tokens=3)
    assert nodes(double) == [
        {
            "id": "call",
            "op": "generate",
            "model": "default",
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
    assert response.message.content == "hello tea"
    assert response.additional_kwargs == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
    }
    assert response.raw == {
        "finish_reason": "stop",
        "usage": VALUE["usage"],
        "model": "tiny",
        "program": "p_1",
    }


def test_completion_follows_is_chat_model(llm: Conure, double: Any) -> None:
    llm.complete("once")
    llm.is_chat_model = False
    llm.complete("once")
    llm.chat([ChatMessage(role="user", content="once")])
    chat, bare, written_out = nodes(double)
    assert chat["messages"] == [{"role": "user", "content": "once"}]
    assert bare["prompt"][0] == {"text": "once"}
    assert bare["prompt"][1]["output"] == "answer"
    assert written_out["prompt"][0] == {"text": "user: once\nassistant: "}


def test_formatted_prompt_is_not_formatted_again(llm: Conure, double: Any) -> None:
    llm.completion_to_prompt = lambda prompt: f"<{prompt}>"
    llm.complete("a")
    llm.complete("b", formatted=True)
    assert [node["messages"][0]["content"] for node in nodes(double)] == ["<a>", "b"]


def test_call_option_overrides_llm(llm: Conure, double: Any) -> None:
    llm.complete("a", stop="x", model="other")
    llm.complete("a", stop=["y", "z"], temperature=None)
    first, second = nodes(double)
    assert (first["model"], first["output"]["stop"]) == ("other", ["x"])
    assert second["output"]["stop"] == ["y", "z"]
    assert "temperature" not in second["output"]


def test_unknown_argument_is_rejected_by_name(llm: Conure) -> None:
    with pytest.raises(ValueError, match="temprature=1"):
        llm.complete("a", temprature=1)


def test_additional_kwargs_apply_to_every_call(llm: Conure, double: Any) -> None:
    made = Conure(client=llm.client, additional_kwargs={"top_k": 3, "min_tokens": 1})
    made.complete("a", min_tokens=2)
    (node,) = nodes(double)
    assert node["output"] == {"variable": "answer", "as": "message", "top_k": 3, "min_tokens": 2}
    with pytest.raises(ValueError, match="beams=4"):
        Conure(client=llm.client, additional_kwargs={"beams": 4}).complete("a")
    with pytest.raises(ValueError, match="top_k"):
        Conure(client=llm.client, top_k=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="set the field `model`"):
        Conure(client=llm.client, additional_kwargs={"model": "tools"}).complete("a")


def test_additional_kwargs_may_have_tools(llm: Conure, double: Any) -> None:
    tools = [FunctionTool.from_defaults(add).metadata.to_openai_tool()]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    made = Conure(client=llm.client, additional_kwargs=options)
    made.chat([ChatMessage("hi")])
    made.chat([ChatMessage("hi")], tool_choice="none")
    made.chat([ChatMessage("hi")], tools=None)
    made.chat_with_tools([FunctionTool.from_defaults(add)], user_msg="hi")
    first, second, third, fourth = nodes(double)
    assert options.items() <= first.items()
    assert second["tool_choice"] == "none"
    assert "tools" not in third
    assert fourth["tool_choice"] == "required"


def test_pickled_llm_keeps_the_server() -> None:
    with Client("http://127.0.0.1:9") as client:
        llm = Conure(client=client, temperature=0)
        made = pickle.loads(pickle.dumps(llm))
        assert (made.client, made.base_url, made.temperature) == (None, "http://127.0.0.1:9", 0)
        assert llm.connection() is client
        assert copy.deepcopy(llm).connection() is client


def test_llm_with_local_app_cannot_be_pickled(llm: Conure) -> None:
    with pytest.raises(TypeError, match="base_url"):
        pickle.dumps(llm)
    assert llm.complete("a").text


def test_messages_keep_roles_parts_and_calls(llm: Conure, double: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    llm.chat(
        [
            ChatMessage(
                role="user",
                blocks=[TextBlock(text="see"), ImageBlock(url="https://images.test/a.png")],
            ),
            ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]}),
            ChatMessage(role="tool", content="7", additional_kwargs={"tool_call_id": "c"}),
            ChatMessage(role="user", blocks=[TextBlock(text="a"), TextBlock(text="b")]),
            ChatMessage(role="developer", content="d"),
        ]
    )
    (node,) = nodes(double)
    assert node["messages"] == [
        {
            "role": "user",
            "content": [
                {"text": "see"},
                {
                    "part": {
                        "type": "image_url",
                        "image_url": {"url": "https://images.test/a.png"},
                    }
                },
            ],
        },
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
        {"role": "user", "content": "a\nb"},
        {"role": "system", "content": "d"},
    ]


def test_metadata_comes_from_the_server(llm: Conure, double: Any) -> None:
    assert llm.metadata.context_window == 4096
    assert llm.metadata.num_output == 512
    assert llm.metadata.model_name == "tiny"
    assert llm.metadata.is_chat_model
    assert not llm.metadata.is_function_calling_model
    assert len(double.of("GET", "/v1/models")) == 1
    other = Conure(client=llm.client, model="tools", max_tokens=9, is_chat_model=False)
    assert other.metadata.context_window == 100
    assert other.metadata.num_output == 9
    assert not other.metadata.is_function_calling_model, "tools need a chat template"
    assert not other.metadata.is_chat_model
    assert Conure(client=llm.client, model="tools").metadata.is_function_calling_model
    assert Conure(client=llm.client, context_window=50).metadata.num_output == 12


def test_unknown_model_is_named(llm: Conure) -> None:
    with pytest.raises(NotFoundError, match="model 'huge' not found; the server has: tiny, tools"):
        _ = Conure(client=llm.client, model="huge").metadata


def test_stream_survives_restarts_without_duplicates(llm: Conure, double: Any, kit: Any) -> None:
    double.on(
        "GET",
        f"{PROGRAM}/events",
        kit.Answer(chunks=[kit.delta("hel", 0)], is_cut=True),
        kit.Answer(chunks=[kit.delta("hello", 0), kit.delta("he", 0, 1)], is_cut=True),
        kit.Answer(chunks=[kit.delta("ea", 7, 1), kit.committed(VALUE)]),
    )
    pieces = list(llm.stream_complete("a"))
    assert [piece.delta for piece in pieces] == ["hel", "lo", " tea", ""]
    assert [piece.text for piece in pieces] == ["hel", "hello", "hello tea", "hello tea"]
    assert [bool(piece.raw) for piece in pieces] == [False, False, False, True]


def test_abandoned_stream_is_cancelled(llm: Conure, double: Any, kit: Any) -> None:
    never = kit.Answer(chunks=[kit.delta("hel", 0), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    for leave in (llm.stream_complete("a"), llm.stream_chat([ChatMessage(content="a")])):
        assert next(leave).delta == "hel"
        leave.close()
    assert len(double.of("DELETE", PROGRAM)) == 2
    double.wait_for_disconnects(2)


async def test_abandoned_async_stream_is_cancelled(llm: Conure, double: Any, kit: Any) -> None:
    never = kit.Answer(chunks=[kit.delta("hel", 0), b""], gate=lambda: False)
    double.on("GET", f"{PROGRAM}/events", never)
    stream = await llm.astream_complete("a")
    assert (await anext(stream)).delta == "hel"
    await stream.aclose()
    # LlamaIndex's wrapper does not close our generator. The garbage collector finds it in a
    # cycle with the exception that ended the wrapper, and a task of the loop closes it.
    del stream
    gc.collect()
    await asyncio.sleep(0)
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    assert len(double.of("DELETE", PROGRAM)) == 1


CALLS: dict[str, Callable[[Conure], Any]] = {
    "complete": lambda llm: llm.complete("a"),
    "stream": lambda llm: list(llm.stream_complete("a")),
}


async def first_piece(llm: Conure) -> Any:
    return await anext(await llm.astream_complete("a"))


AWAITED_CALLS: dict[str, Callable[[Conure], Awaitable[Any]]] = {
    "acomplete": lambda llm: llm.acomplete("a"),
    "astream": first_piece,
}


@pytest.mark.parametrize("way", CALLS)
def test_a_call_that_is_interrupted_while_it_is_submitted_is_cancelled(
    llm: Conure, double: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    check_interruption_cancels(lambda: CALLS[way](llm), llm.connection(), double, kit, monkeypatch)


@pytest.mark.parametrize("way", AWAITED_CALLS)
async def test_a_task_that_is_cancelled_while_it_submits_a_call_cancels_it(
    llm: Conure, double: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    await check_cancelled_task_cancels(lambda: AWAITED_CALLS[way](llm), double, monkeypatch)


def test_unread_stream_submits_nothing(llm: Conure, double: Any) -> None:
    llm.stream_complete("a")
    assert double.of("POST", "/v1/programs") == []


def test_stream_of_failed_program_raises(llm: Conure, double: Any, kit: Any) -> None:
    failed = kit.sse(3, "node.failed", node="call", code="engine.lost", message="three times")
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[failed, kit.finished(4, "failed")]))
    with pytest.raises(RunError, match="three times"):
        list(llm.stream_complete("a"))


def test_timed_out_stream_raises(llm: Conure, double: Any, kit: Any) -> None:
    code = "program.deadline_exceeded"
    killed = kit.sse(3, "node.killed", node="call", code=code, message="not within 1 s")
    end = kit.finished(4, "deadline_exceeded")
    double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.delta("he", 0), killed, end]))
    with pytest.raises(RunError, match="not within 1 s"):
        list(llm.stream_complete("a"))


def test_timed_out_call_is_cancelled(double: Any, kit: Any) -> None:
    double.on("POST", "/v1/programs", kit.accepted("answer"))
    double.on("DELETE", PROGRAM, kit.status("cancelled"))
    double.on("GET", "/v1/models", kit.Answer(200, MODELS))
    double.on("GET", f"{PROGRAM}/variables/answer", kit.Answer(202, {"status": "running"}))
    with Client(app=double) as client:
        llm = Conure(client=client, timeout=0.01)
        with pytest.raises(NotReadyError):
            llm.complete("a")
    assert double.of("POST", "/v1/programs")[0].body["options"] == {"deadline_s": 0.01}
    assert len(double.of("DELETE", PROGRAM)) == 1


def test_unreachable_server_raises() -> None:
    llm = Conure(base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(ServerUnreachableError, match="conure serve"):
        llm.complete("a")
    llm.connection().close()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_tool_calls_round_trip(llm: Conure, double: Any, kit: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    value = {**VALUE, "content": None, "tool_calls": [call]}
    path = "/v1/programs/p_2"
    accepted = {"id": "p_2", "status": "accepted", "outputs": ["answer"], "url": path}
    double._script["POST", "/v1/programs"].clear()
    double.on("POST", "/v1/programs", kit.Answer(202, accepted))
    double.on(
        "GET", f"{path}/variables/answer", kit.Answer(200, {"status": "done", "value": value})
    )
    tool = FunctionTool.from_defaults(add)
    response = llm.chat_with_tools([tool], user_msg="1 + 2", chat_history=[ChatMessage("hi")])
    (node,) = nodes(double)
    assert node["tools"][0]["function"]["name"] == "add"
    assert node["tool_choice"] == "auto"
    assert [message["content"] for message in node["messages"]] == ["hi", "1 + 2"]
    (selected,) = llm.get_tool_calls_from_response(response)
    assert (selected.tool_id, selected.tool_name, selected.tool_kwargs) == ("c", "add", {"a": 1})
    assert response.message.role == MessageRole.ASSISTANT


def tool_call(arguments: str, call_id: str = "c") -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_plain_text_refuses_tools(llm: Conure, double: Any) -> None:
    llm.is_chat_model = False
    with pytest.raises(ValueError, match="set is_chat_model=True"):
        llm.chat_with_tools([FunctionTool.from_defaults(add)], user_msg="hi")
    assert nodes(double) == []


def test_agent_names_the_tool_of_its_first_call(llm: Conure, double: Any) -> None:
    tool = FunctionTool.from_defaults(add)
    chosen = {"type": "function", "function": {"name": "add"}}
    for choice in ("add", chosen, "none"):
        llm.chat_with_tools([tool], user_msg="hi", tool_choice=choice)
    assert [node["tool_choice"] for node in nodes(double)] == [chosen, chosen, "none"]


def test_function_program_forces_its_tool(
    llm: Conure, double: Any, answered: Callable[..., None]
) -> None:
    llm.model = "tools"
    function = {"name": "Person", "arguments": '{"name": "Ruth", "age": 3}'}
    answered(tool_calls=[{"id": "c", "type": "function", "function": function}])
    program = FunctionCallingProgram.from_defaults(Person, "Who?", llm=llm)
    assert program() == Person(name="Ruth", age=3)
    assert nodes(double)[0]["tool_choice"] == "required"


@pytest.fixture
def answered(double: Any, kit: Any) -> Callable[..., None]:
    """Return a function that sets the answer of the server."""

    def answer(**fields: Any) -> None:
        value = {**VALUE, **fields}
        double._script["GET", f"{PROGRAM}/variables/answer"].clear()
        double._script["GET", f"{PROGRAM}/events"].clear()
        page = kit.Answer(200, {"status": "done", "value": value})
        double.on("GET", f"{PROGRAM}/variables/answer", page)
        double.on("GET", f"{PROGRAM}/events", kit.Answer(chunks=[kit.committed(value)]))

    return answer


def test_one_tool_call_where_only_one_is_allowed(
    llm: Conure, double: Any, answered: Callable[..., None]
) -> None:
    llm.model = "tools"
    tool = FunctionTool.from_defaults(add)
    answered(tool_calls=[tool_call('{"a": 40, "b": 2}'), tool_call('{"a": 1, "b": 1}', "d")])
    assert llm.predict_and_call([tool], "40 + 2").response == "42"
    assert nodes(double)[0]["parallel_tool_calls"] is False
    response = llm.chat_with_tools([tool], user_msg="40 + 2", allow_parallel_tool_calls=True)
    assert [each.tool_id for each in llm.get_tool_calls_from_response(response)] == ["c", "d"]
    assert "parallel_tool_calls" not in nodes(double)[1]
    one = llm.chat_with_tools(
        [tool], user_msg="?", allow_parallel_tool_calls=True, parallel_tool_calls=False
    )
    assert len(llm.get_tool_calls_from_response(one)) == 1


def test_tool_calls_are_blocks_where_the_core_has_them(
    llm: Conure, answered: Callable[..., None]
) -> None:
    if not hasattr(types, "ToolCallBlock"):
        pytest.skip("this core has no blocks for tool calls")
    answered(content="", tool_calls=[tool_call('{"a": 1}')])
    block: Any = llm.chat([ChatMessage("hi")]).message.blocks[1]
    assert (block.tool_call_id, block.tool_name, block.tool_kwargs) == ("c", "add", '{"a": 1}')


def test_arguments_that_are_not_a_json_object_raise(
    llm: Conure, answered: Callable[..., None]
) -> None:
    answered(tool_calls=[tool_call('{"a": ')])
    response = llm.chat([ChatMessage("hi")])
    with pytest.raises(RunError, match="called add with arguments that are not a JSON object"):
        llm.get_tool_calls_from_response(response)


class Echo(BaseOutputParser):
    """Returns the text."""

    def parse(self, output: str) -> str:
        return output


def test_other_fields_than_those_of_the_class_are_refused(llm: Conure) -> None:
    schema = llm.structured_output_options(Person, None)["constraint"]["json_schema"]
    assert schema["additionalProperties"] is False


CUT = r"cut after 2 tokens before it was complete \(finish_reason 'length'\); raise max_tokens"


def test_cut_answer_under_a_schema_or_parser_raises(
    llm: Conure, answered: Callable[..., None]
) -> None:
    answered(content='{"name": "a", "age": 1', finish_reason="length")
    for ask in (
        lambda: llm.structured_predict(Person, PromptTemplate("Who?")),
        lambda: llm.as_structured_llm(Person).chat([ChatMessage("Who?")]),
        lambda: llm.complete("Who?", constraint={"json_schema": {"type": "object"}}),
        lambda: list(llm.stream_complete("Who?", constraint={"json_schema": {"type": "object"}})),
    ):
        with pytest.raises(ValueError, match=CUT) as caught:
            ask()
        assert isinstance(caught.value, RunError)
        assert caught.value.code == "output.incomplete"
    assert llm.complete("Who?").text == '{"name": "a", "age": 1'
    llm.output_parser = Echo()
    with pytest.raises(RunError, match=CUT):
        llm.predict(PromptTemplate("Who?"))


async def test_awaited_cut_answer_raises(llm: Conure, answered: Callable[..., None]) -> None:
    answered(content='{"name": "a"', finish_reason="length")
    with pytest.raises(RunError, match=CUT):
        await llm.astructured_predict(Person, PromptTemplate("Who?"))
    schema = {"json_schema": {"type": "object"}}
    with pytest.raises(RunError, match=CUT):
        await llm.achat([ChatMessage("Who?")], constraint=schema)
    with pytest.raises(RunError, match=CUT):
        async for _ in await llm.astream_chat([ChatMessage("Who?")], constraint=schema):
            pass


@pytest.mark.parametrize(
    ("tool_calls", "is_required"), [([tool_call('{"a": 4')], False), ([], True)]
)
def test_cut_tool_call_raises(
    llm: Conure, answered: Callable[..., None], tool_calls: Any, is_required: bool
) -> None:
    answered(finish_reason="length", tool_calls=tool_calls)
    tool = FunctionTool.from_defaults(add)
    with pytest.raises(RunError, match="before its tool call was complete"):
        llm.chat_with_tools([tool], user_msg="?", tool_required=is_required)
    answered(finish_reason="length")
    assert llm.chat_with_tools([tool], user_msg="?").message.content == "hello tea"


def test_logprobs_may_be_a_flag(llm: Conure, double: Any) -> None:
    llm.complete("a", logprobs=True)
    llm.complete("a", logprobs=False)
    first, second = nodes(double)
    assert first["output"]["logprobs"] == 0
    assert "logprobs" not in second["output"]


def test_half_a_surrogate_pair_is_refused_by_position(llm: Conure, double: Any) -> None:
    for is_chat in (True, False):
        llm.is_chat_model = is_chat
        with pytest.raises(ProgramError, match=r"character 1 of the prompt, '\\ud800', is half"):
            llm.complete("a\ud800")
    assert nodes(double) == []


def test_key_and_headers_reach_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Conure(base_url="http://127.0.0.1:9", api_key="k", default_headers={"x-team": "a"})
    assert "api_key" not in llm.to_dict()
    assert "api_key" not in repr(llm)
    headers = llm.connection()._settings.headers
    assert (headers["authorization"], headers["x-team"]) == ("Bearer k", "a")
    plain = Conure(base_url="http://127.0.0.1:9")
    assert llm.connection() is not plain.connection()
    monkeypatch.setenv("CONURE_API_KEY", "k")
    assert plain.connection() is Conure(base_url="http://127.0.0.1:9", api_key="k").connection()


def test_tokenizer_is_that_of_the_server(make_llm: Callable[..., Conure]) -> None:
    llm = make_llm()
    count = llm.tokenizer
    assert count("tea is hot") == llm.connection().tokenize("tea is hot")
    assert count("") == []
    splitter = TokenTextSplitter(chunk_size=20, chunk_overlap=0, tokenizer=count)
    pieces = splitter.split_text("tea is hot and milk is cold " * 3)
    assert len(pieces) > 1
    assert all(len(llm.connection().tokenize(piece)) <= 20 for piece in pieces)


def test_required_tool_call_that_is_missing_raises(llm: Conure) -> None:
    response = llm.chat([ChatMessage("hi")])
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="at least one tool call"):
        llm.get_tool_calls_from_response(response)


def test_rejection_keeps_code_and_reason(make_llm: Callable[..., Conure]) -> None:
    with pytest.raises(ProgramError) as caught:
        make_llm().complete("a", max_tokens=0)
    assert caught.value.code == "program.invalid"
    assert "max_tokens" in caught.value.message
