"""Arguments of `ChatConure`: every one is applied or refused with a cure."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, trim_messages
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError

from conure.adapters.client import Client, ServerUnreachableError
from conure.adapters.langchain import ChatConure, accelerate
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ConureError, ProgramError

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "max_tokens": 7,
    "min_tokens": 1,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "stop_token_ids": [3],
    "ignore_eos": True,
    "seed": 3,
    "stop": ["x"],
}


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0)


def output_of(llm: ChatConure) -> dict[str, Any]:
    node = llm.node("id", "x", [], {})
    return {k: v for k, v in node["output"].items() if k not in ("variable", "as")}


def test_all_sampling_fields_are_arguments() -> None:
    assert output_of(ChatConure(**SAMPLING)) == SAMPLING


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
    ],
)
def test_other_names_of_arguments(given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert output_of(ChatConure(**given)) == sent
    bound = ChatConure().node("id", "x", [], given)["output"]
    assert {k: v for k, v in bound.items() if k not in ("variable", "as")} == sent


@pytest.mark.parametrize(
    ("name", "cure"),
    [("temprature", "did you mean `temperature`"), ("extra", "it has "), ("num_ctx", "")],
)
def test_unknown_argument_is_refused(name: str, cure: str) -> None:
    with pytest.raises(ValidationError, match=f"unknown argument {name}=0 .*{cure}"):
        ChatConure(**cast(Any, {name: 0}))


@pytest.mark.parametrize("given", [{"temperature": -5}, {"top_p": 2}, {"timeout": 0}])
def test_value_out_of_range_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(given))):
        ChatConure(**given)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_forms_of_one_address_are_one_server(ending: str) -> None:
    plain = ChatConure(base_url="http://127.0.0.1:9")
    assert ChatConure(base_url=f"http://127.0.0.1:9{ending}").connection() is plain.connection()


@pytest.mark.parametrize("url", ["localhost:8400", "ftp://host", "http://", "127.0.0.1", "h?x=1"])
def test_wrong_address_is_explained(url: str) -> None:
    with pytest.raises(ProgramError, match=r"is not the address of a server.*write for example"):
        ChatConure(base_url=url).invoke("hi")


def test_timeout_limits_the_wait_for_an_absent_server() -> None:
    retry = ChatConure(base_url="http://127.0.0.1:9", timeout=0.01).connection()._retry
    assert (retry.first_contact_timeout_s, retry.unreachable_timeout_s) == (0.01, 0.01)
    assert (retry.refused_timeout_s, retry.max_retry_after_s) == (0.01, 0.01)
    with pytest.raises(ServerUnreachableError):
        ChatConure(base_url="http://127.0.0.1:9", timeout=0.01).invoke("hi")


def test_tokens_are_counted_by_the_server(llm: ChatConure) -> None:
    answer = llm.invoke("hello world")
    counts: Any = answer.usage_metadata
    assert llm.get_num_tokens_from_messages([HumanMessage("hello world")]) == counts["input_tokens"]
    assert llm.get_num_tokens("hello") == len(llm.get_token_ids("hello")) == len("hello")
    kept = trim_messages(
        [HumanMessage("a" * 100), AIMessage("b" * 100), HumanMessage("c")],
        token_counter=llm,
        max_tokens=60,
        strategy="last",
    )
    assert [message.text for message in kept] == ["c"]


def test_no_messages_have_no_tokens(llm: ChatConure) -> None:
    assert llm.get_num_tokens_from_messages([]) == 0
    long = [HumanMessage("hi there " * 50)]
    kept = trim_messages(long, token_counter=llm, max_tokens=3, strategy="last", allow_partial=True)
    assert kept == []


def test_profile_has_the_context_length_of_the_server(llm: ChatConure, client: Client) -> None:
    (model,) = client.models()
    assert llm.profile["max_input_tokens"] == model["max_model_len"] > 0
    assert llm.profile.get("tool_calling") is True
    assert llm.profile.get("another") is None


def test_profile_of_a_copy_describes_the_model_of_the_copy(double: Any, kit: Any) -> None:
    models = [{"id": "small", "max_model_len": 1000}, {"id": "big", "max_model_len": 9000}]
    double.on("GET", "/v1/models", kit.Answer(200, {"data": models}))
    with Client(app=double) as client:
        small = ChatConure(client=client, model="small")
        assert small.profile["max_input_tokens"] == 1000
        named = small.configurable_fields(model=ConfigurableField("name"))
        chosen, _ = named.prepare({"configurable": {"name": "big"}})  # type: ignore[attr-defined]
        for copied in (small.model_copy(update={"model": "big"}), chosen):
            assert copied.profile["max_input_tokens"] == 9000
        given = {"max_input_tokens": 5}
        assert small.model_copy(update={"profile": given}).profile == given


def test_profile_of_an_absent_server_can_be_printed() -> None:
    assert "tool_calling" in repr(ChatConure(base_url="http://127.0.0.1:9"))


def test_repeated_prompt_is_reported_as_cached(llm: ChatConure) -> None:
    text = "a long prompt that fills several blocks of the cache " * 4
    llm.invoke(text)
    counts: Any = llm.invoke(text).usage_metadata
    assert 0 < counts["input_token_details"]["cache_read"] < counts["input_tokens"]


def test_cached_tokens_are_reported_with_several_answers(llm: ChatConure) -> None:
    text = "another long prompt that fills several blocks of the cache " * 4
    llm.invoke(text)
    (answers,) = llm.generate([[HumanMessage(text)]], n=2).generations
    counts = cast(Any, answers[0]).message.usage_metadata
    assert 0 < counts["input_token_details"]["cache_read"] < counts["input_tokens"]


def test_usage_of_several_answers_is_in_llm_output(llm: ChatConure) -> None:
    result = llm.generate([[HumanMessage("hi")]], n=3)
    assert result.llm_output is not None
    usage = result.llm_output["token_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def test_blocks_of_other_providers_are_left_out(llm: ChatConure) -> None:
    history = [
        HumanMessage("q"),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a"}]),
        AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]),
        ToolMessage([{"type": "json", "json": {"n": 1}}], tool_call_id="1"),
        HumanMessage([{"type": "text-plain", "text": "file"}, {"type": "text", "text": "!"}]),
    ]
    messages = llm._model_call(history, None, {}, None).messages
    assert [each["content"] for each in messages] == ["q", "a", "b", '{"n":1}', "file!"]


def test_half_of_a_surrogate_pair_is_refused_by_name(llm: ChatConure) -> None:
    with pytest.raises(ProgramError, match="half of a surrogate pair"):
        llm.invoke("\ud800")


@pytest.mark.parametrize("tool", [{"type": "web_search_preview"}, {"type": "computer"}])
def test_tool_of_another_provider_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="run by another provider"):
        ChatConure().bind_tools([tool])


def test_tool_in_the_form_of_responses_is_a_function() -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    bound: Any = ChatConure().bind_tools([tool])
    assert bound.kwargs["tools"][0]["function"]["name"] == "add"


def test_unknown_type_in_a_schema_is_refused() -> None:
    schema = {"title": "T", "type": "object", "properties": {"a": {"type": "objct"}}}
    with pytest.raises(ValueError, match=r"properties\.a: unknown type 'objct'"):
        ChatConure().with_structured_output(schema)


def test_loops_do_not_leak_connections(llm: ChatConure) -> None:
    for _ in range(20):
        assert asyncio.run(llm.ainvoke("w")).content
    assert len(llm.async_connection()._per_loop) <= 1


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def failing_chains(client: Client) -> dict[str, tuple[Any, Any]]:
    llm = ChatConure(client=client, temperature=0)
    placed = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{x}")])
    return {
        "image in a history": (placed | llm, {"history": [HumanMessage([IMAGE])], "x": "?"}),
        "image": (llm, [HumanMessage([IMAGE])]),
        "too long": (llm, "x" * 100_000),
        "unknown model": (llm.bind(model="gpt"), "hi"),
    }


@pytest.mark.parametrize("name", ["image in a history", "image", "too long", "unknown model"])
async def test_errors_are_equal_plain_and_accelerated(client: Client, name: str) -> None:
    chain, given = failing_chains(client)[name]
    found = []
    for each in (chain, accelerate(chain)):
        with pytest.raises(ConureError) as problem:
            await asyncio.to_thread(each.invoke, given)
        found.append(problem)
        with pytest.raises(ConureError) as problem:
            await each.ainvoke(given)
        found.append(problem)
    assert len({(each.type, str(each.value)) for each in found}) == 1
    assert "node " not in str(found[0].value)


async def test_timeouts_are_equal_plain_and_accelerated(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=1.0)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        llm = ChatConure(client=client, timeout=0.1)
        found = []
        for each in (llm, accelerate(llm)):
            with pytest.raises(TimeoutError) as problem:
                await asyncio.to_thread(each.invoke, "hi")
            found.append(problem)
            with pytest.raises(TimeoutError) as problem:
                await each.ainvoke("hi")
            found.append(problem)
        assert len({(each.type, str(each.value)) for each in found}) == 1
