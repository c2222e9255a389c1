"""An answer that was cut is an error under a schema or a tool, and never a value."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableBranch, RunnableLambda
from pydantic import BaseModel, field_validator

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ConureError, RunError


class Small(BaseModel):
    """A small object."""

    is_small: bool


class Big(BaseModel):
    """A long answer."""

    items: list[str]


WHOLE = {"items": [f"{n:040}" for n in range(20)]}
JSON_SCHEMA = {
    "title": "Big",
    "description": "A long answer.",
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string"}}},
    "required": ["items"],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("script")
    text = msgspec.json.encode(WHOLE).decode()
    script = folder / "script.json"
    script.write_bytes(msgspec.json.encode([{"text": text}]))
    config = Config(engine="fake", data=folder / "data", script=script)
    with Client(app=create_app(config)) as client:
        yield client


def test_answer_without_a_limit_is_whole(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0)
    assert len(WHOLE["items"]) * 43 > 512
    assert llm.with_structured_output(Big).invoke("JSON") == Big(**WHOLE)
    assert llm.invoke("JSON").response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("schema", "strict", "closed"),
    [(Big, None, True), (JSON_SCHEMA, None, False), (JSON_SCHEMA, True, True)],
    ids=["class", "schema", "strict schema"],
)
def test_other_fields_are_refused(client: Client, schema: Any, strict: Any, closed: bool) -> None:
    chain: Any = ChatConure(client=client).with_structured_output(schema, strict=strict)
    sent = chain.first.kwargs["response_format"]["json_schema"]["schema"]
    assert sent.get("additionalProperties", True) is not closed


@pytest.mark.parametrize("is_accelerated", [False, True])
@pytest.mark.parametrize("schema", [Big, JSON_SCHEMA], ids=["class", "schema"])
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_cut_answer_is_an_error(
    client: Client, schema: Any, method: Any, is_accelerated: bool
) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=100)

    def chain(**options: Any) -> Any:
        made = llm.with_structured_output(schema, method=method, **options)
        return accelerate(made) if is_accelerated else made

    with pytest.raises(OutputParserException, match=r"cut after 100 tokens.*raise max_tokens"):
        chain().invoke("JSON")
    raw = chain(include_raw=True).invoke("JSON")
    assert raw["parsed"] is None
    assert "cut after 100 tokens" in str(raw["parsing_error"])


def test_stream_of_a_cut_answer_ends_with_an_error(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=100)
    with pytest.raises(OutputParserException, match="cut after"):
        list(llm.with_structured_output(JSON_SCHEMA).stream("JSON"))


def test_cut_tool_call_is_an_error(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=30)
    bound = llm.bind_tools([Big], tool_choice="any")
    with pytest.raises(RunError, match="cut after 30 tokens before its tool call"):
        bound.invoke("JSON")
    with pytest.raises(RunError, match="cut after 30 tokens before its tool call"):
        list(bound.stream("JSON"))


CONSTRAINTS: list[dict[str, Any]] = [
    {"constraint": {"regex": "[a-z]{30}"}},
    {"constraint": {"choices": ["x" * 30, "y" * 30]}},
    {"constraint": {"lark": 'start: "x"~30'}},
    {"response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("arguments", CONSTRAINTS, ids=["regex", "choices", "lark", "json_object"])
async def test_cut_answer_under_any_constraint_is_an_error(
    client: Client, arguments: dict[str, Any]
) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=1).bind(**arguments)
    for run in (llm.invoke, accelerate(llm).invoke, lambda text: [*llm.stream(text)]):
        with pytest.raises(RunError, match="cut after 1 tokens before it satisfied") as cut:
            run("x")
        assert cut.value.code == "output.incomplete"
    with pytest.raises(RunError, match="before it satisfied its constraint"):
        await llm.ainvoke("x")
    with pytest.raises(RunError, match="before it satisfied its constraint"):
        [chunk async for chunk in llm.astream("x")]
    await cast(Any, llm).bound.async_connection().close()


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_cut_answer_is_not_cached_for_retries(
    client: Client, method: Any, is_streaming: bool
) -> None:
    cache = InMemoryCache()
    llm = ChatConure(
        client=client, temperature=0, max_tokens=100, cache=cache, streaming=is_streaming
    )
    for _ in range(2):
        with pytest.raises(OutputParserException, match="cut after 100 tokens"):
            llm.with_structured_output(Big, method=method).invoke("JSON")
    assert cache._cache == {}
    whole = llm.model_copy(update={"max_tokens": None}).with_structured_output(Big, method=method)
    assert whole.invoke("JSON") == whole.invoke("JSON")
    assert len(cache._cache) == 1


def test_a_parser_does_not_repair_the_cut_answer_of_a_compiled_chain(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=30)
    chains: list[Any] = [
        llm.bind(response_format={"type": "json_object"}) | JsonOutputParser(),
        llm.bind(response_format={"type": "json_object"}),
        llm.bind_tools([Big], tool_choice="any"),
    ]
    for chain in chains:
        with pytest.raises(RunError, match="cut after 30 tokens before"):
            to_program(chain).run(client, "JSON")


def test_answer_of_a_branch_is_checked_by_the_arguments_of_the_branch(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=30)
    bound = llm.bind_tools([Big], tool_choice="any")
    chains: list[Any] = [
        RunnableBranch((lambda text: text == "tool", bound), llm),
        RunnableBranch((lambda text: text != "tool", llm), bound),
    ]
    for chain in chains:
        compiled = to_program(chain)
        assert compiled.run(client, "JSON").content == chain.invoke("JSON").content
        with pytest.raises(RunError, match="before its tool call was complete"):
            compiled.run(client, "tool")


def test_answers_that_a_map_reads_are_checked_by_their_call(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=30)
    bound = llm.bind_tools([Big], tool_choice="any")

    def kind(message: AIMessage) -> str:
        return message.type

    named = RunnableLambda(kind)
    chain = bound.map() | (named | llm).map()
    with pytest.raises(RunError, match="before its tool call was complete"):
        to_program(chain).run(client, ["a", "b"])


def test_text_of_a_cut_tool_call_is_an_error_of_a_compiled_chain(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=30)
    bound = llm.bind_tools([Big], tool_choice="any")
    branch: Any = RunnableBranch((lambda text: text == "tool", bound), llm) | StrOutputParser()
    length: Any = RunnableLambda(len)
    listed: Any = RunnableLambda(lambda text: [text])
    chains: list[Any] = [
        bound | StrOutputParser(),
        {"text": bound | StrOutputParser()},
        branch,
        branch | length,
        listed | branch.map(),
        listed | (bound | StrOutputParser()).map() | length.map(),
    ]
    for chain in chains:
        with pytest.raises(RunError, match="before its tool call was complete"):
            to_program(chain).run(client, "tool")
    for chain in (branch, branch | length):
        assert to_program(chain).run(client, "JSON") == chain.invoke("JSON")


@pytest.mark.parametrize("choice", ["none", "any"])
def test_text_of_an_answer_with_tools_is_the_text_in_a_compiled_chain(
    client: Client, choice: str
) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=200)
    answer: Any = llm.bind_tools([Small], tool_choice=choice) | StrOutputParser()
    assert (answer.invoke("tea") == "") is (choice == "any")
    listed: Any = RunnableLambda(lambda text: [text, "x"])
    chains: list[Any] = [
        answer,
        listed | answer.map(),
        listed | answer.map() | RunnableLambda(", ".join),
        listed | answer.map() | RunnableLambda(lambda text: text).map(),
        answer | RunnableLambda(str.strip),
        RunnableBranch((answer, RunnableLambda(lambda _: "yes")), RunnableLambda(lambda _: "no")),
        listed | answer.map() | (llm | StrOutputParser()).map(),
        {"x": answer} | ChatPromptTemplate.from_template("{x}") | llm | StrOutputParser(),
        {"x": {"y": answer}} | ChatPromptTemplate.from_template("{x}") | llm | StrOutputParser(),
    ]
    for chain in chains:
        assert to_program(chain).run(client, "tea") == chain.invoke("tea")


OPENAI_SCHEMA = {"name": "big", "strict": True, "schema": Big.model_json_schema()}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize(
    "schema", [OPENAI_SCHEMA, {"type": "json_schema", "json_schema": OPENAI_SCHEMA}]
)
def test_schema_in_the_form_of_openai_is_enforced(client: Client, schema: Any, method: Any) -> None:
    llm = ChatConure(client=client, temperature=0)
    chain: Any = llm.with_structured_output(schema, method=method)
    assert b'"items"' in msgspec.json.encode(chain.first.kwargs["ls_structured_output_format"])
    sent = {name: chain.first.kwargs.get(name) for name in ("response_format", "tools")}
    assert b'"items"' in msgspec.json.encode(sent)
    assert chain.invoke("JSON").keys() == WHOLE.keys()


def test_name_without_a_schema_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="the output 'order' has no schema"):
        ChatConure(client=client).with_structured_output({"name": "order"})


class Few(BaseModel):
    """At most two items."""

    items: list[str]

    @field_validator("items")
    @classmethod
    def check_number(cls, items: list[str]) -> list[str]:
        if len(items) > 2:
            raise ValueError("too many items")
        return items


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_a_stream_fails_if_a_validator_rejects_the_answer(client: Client, method: Any) -> None:
    llm = ChatConure(client=client, temperature=0)
    chain = llm.with_structured_output(Few, method=method)
    for run in (chain.invoke, lambda text: [*chain.stream(text)]):
        with pytest.raises(Exception, match="too many items"):
            run("JSON")


def test_cut_text_without_a_constraint_is_an_answer(client: Client) -> None:
    llm = ChatConure(client=client, temperature=0, max_tokens=2)
    given: list[dict[str, Any]] = [{}, {"response_format": {"type": "text"}}]
    for arguments in given:
        assert len(llm.invoke("x", **arguments).text) == 2


async def test_answer_that_does_not_match_its_schema_is_a_parsing_error(
    double: Any, kit: Any
) -> None:
    said = "output answer does not satisfy its schema: ['a', 'a']"
    failed = kit.sse(2, "node.failed", node="chat", code="output.invalid", message=said)
    double.on("POST", "/v1/programs", kit.followed(failed, kit.finished(3, "failed")))
    double.on("DELETE", "/v1/programs/p_1", kit.status("failed"))
    problem = kit.Answer(422, kit.problem(422, "output.invalid", said))
    double.on("GET", "/v1/programs/p_1/variables/answer", problem)
    with Client(app=double) as client:
        llm = ChatConure(client=client)
        chain = llm.with_structured_output(Big, include_raw=True)
        for raw in (chain.invoke("JSON"), await chain.ainvoke("JSON")):
            assert said in str(raw["parsing_error"])
        with pytest.raises(OutputParserException, match="does not satisfy its schema"):
            llm.with_structured_output(Big).invoke("JSON")
        with pytest.raises(OutputParserException, match="does not satisfy its schema"):
            list(llm.with_structured_output(Big).stream("JSON"))
        with pytest.raises(ConureError, match="does not satisfy its schema"):
            llm.bind(response_format={"type": "json_object"}).invoke("JSON")
        await llm.async_connection().close()
