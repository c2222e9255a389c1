"""Constraints from HTTP to the fake engine and back: values, counts, rejections, OpenAI's
fields.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from conure.server.app import create_app
from conure.server.config import Config
from conure.server.engines import constraint_validator

from .service_double import in_process, over_socket

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"type": "integer", "maximum": 9}, "uniqueItems": True}
SCRIPT: list[dict[str, str]] = [
    {"match": "person", "text": '{"name":"Jo","age":42}'},
    {"match": "twice", "text": "[1,1]"},
    {"match": "once", "text": "[1,2]"},
    {"match": "decide", "text": "probably not"},
    {"match": "sunny", "text": "It is sunny."},
    {
        "match": "weather in",
        "text": "Let me see.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>',
    },
]


@contextlib.asynccontextmanager
async def client_of(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    app = create_app(Config(data=tmp_path / "data", engine="fake", script=script))
    async with in_process(app) as client:
        yield client


def program(prompt: str, **output: Any) -> dict[str, Any]:
    slot = {"output": "answer", "max_tokens": 60, "temperature": 0, **output}
    node = {"id": "ask", "op": "generate", "prompt": [{"text": prompt}, slot]}
    return {"program": {"nodes": [node], "outputs": ["answer"]}}


async def run(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Submit a program, wait for the answer, and return the program's status."""
    accepted = await client.post("/v1/programs", json=body)
    assert accepted.status_code == 202, accepted.text
    path = accepted.headers["location"]
    await client.get(f"{path}/variables/answer", params={"wait_s": 60})
    await client.get(f"{path}/events")
    status: dict[str, Any] = (await client.get(path)).json()
    return status


@pytest.mark.parametrize(
    ("prompt", "constraint", "value"),
    [
        ("a person", {"json_schema": PERSON}, {"name": "Jo", "age": 42}),
        ("decide", {"choices": ["yes", "no"]}, "yes"),
        ("decide", {"regex": "[a-z]+ [a-z]+"}, "probably not"),
        ("decide", {"lark": 'start: "maybe" | "probably"'}, "probably"),
        ("decide", {"type": "bool"}, True),
        ("once", {"type": "int"}, 12),
        ("once", {"type": "float"}, 12),
        ("decide", {"type": "list"}, ["probably not"]),
        ("decide", {"type": "string"}, "probably not"),
    ],
)
async def test_every_constraint_kind_is_enforced(
    tmp_path: Path, prompt: str, constraint: dict[str, Any], value: Any
) -> None:
    async with client_of(tmp_path) as client:
        status = await run(client, program(prompt, constraint=constraint))
        assert status["status"] == "done", status
        found = status["variables"]["answer"]["value"]
        assert type(found) is type(value)
        assert found == value or constraint.get("type") == "bool"


async def test_forced_tokens_are_counted_separately(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        status = await run(client, program("a person", constraint={"json_schema": PERSON}))
        text = '{"name":"Jo","age":42}'
        # The model writes Jo, the quote and 42; a number up to 99 needs no end token.
        tokens = {"decoded": 5, "forced": len(text) - 5, "discarded": 0}
        assert status["nodes"]["ask"]["output_tokens"] == tokens
        assert status["receipt"]["output_tokens"] == tokens
        assert status["receipt"]["prompt_tokens"]["computed"] == len("a person")


async def test_constrained_output_is_part_of_later_prompt(
    tmp_path: Path,
) -> None:
    async with client_of(tmp_path) as client:
        body = program("a person", constraint={"json_schema": PERSON})
        node = body["program"]["nodes"][0]
        node["prompt"] += [
            {"text": " decide: "},
            {"output": "next", "max_tokens": 9, "constraint": {"choices": ["yes", "no"]}},
        ]
        body["options"] = {"trace": True}
        status = await run(client, body)
        query = {"token_ids": "true"}
        trace = await client.get(f"/v1/programs/{status['id']}/trace", params=query)
        _, first, second = (json.loads(line)["attributes"] for line in trace.text.splitlines())
        text = 'a person{"name":"Jo","age":42} decide: '
        assert bytes(second["conure.prompt_token_ids"]).decode() == text
        assert status["nodes"]["ask"]["prompt_tokens"]["logical"] == len("a person") + len(text)
        assert bytes(first["conure.output_token_ids"]).decode() == '{"name":"Jo","age":42}'


async def test_truncated_output_fails_with_reason(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        body = program("a person", constraint={"json_schema": PERSON}, max_tokens=12)
        status = await run(client, body)
        error = status["variables"]["answer"]["error"]
        assert error["code"] == "output.incomplete"
        assert "was cut off by max_tokens=12 before its object was complete" in error["message"]
        assert "raise max_tokens, or bound its texts by maxLength" in error["message"]
        assert error["message"].endswith("""the text was '{"name":"Jo"'""")
        body = program("a person", constraint={"json_schema": PERSON}, stop=["age"])
        error = (await run(client, body))["variables"]["answer"]["error"]
        assert error["code"] == "output.incomplete"
        assert "stop string" in error["message"]
        assert "remove it" in error["message"]
        body = program(
            "a person", constraint={"json_schema": PERSON}, max_tokens=12, **{"as": "text"}
        )
        assert (await run(client, body))["variables"]["answer"]["value"] == '{"name":"Jo"'
        body = program(
            "a person", constraint={"json_schema": PERSON}, max_tokens=12, **{"as": "message"}
        )
        message = (await run(client, body))["variables"]["answer"]["value"]
        assert message["finish_reason"] == "length"
        assert message["usage"]["completion_tokens"] == 12


async def test_relaxed_constraint_is_checked_and_flagged(
    tmp_path: Path,
) -> None:
    async with client_of(tmp_path) as client:
        status = await run(client, program("once", constraint={"json_schema": UNIQUE}))
        assert status["variables"]["answer"]["value"] == [1, 2]
        assert status["nodes"]["ask"]["constraint_relaxed"] is True
        status = await run(client, program("twice", constraint={"json_schema": UNIQUE}))
        assert status["variables"]["answer"]["error"]["code"] == "output.invalid"
        status = await run(client, program("a person", constraint={"json_schema": PERSON}))
        assert "constraint_relaxed" not in status["nodes"]["ask"]


async def test_invalid_constraint_is_rejected_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A program is accepted if no engine answers in time, and the sandbox of a busy machine is slow.
    monkeypatch.setattr(constraint_validator, "ANSWER_S", 100.0)
    monkeypatch.setattr(constraint_validator, "BUDGET_S", 200.0)
    async with client_of(tmp_path) as client:
        for constraint, code in (
            ({"lark": "start: ("}, "constraint.invalid"),
            ({"regex": "(?=a)b"}, "constraint.invalid"),
            (
                {"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}},
                "constraint.invalid",
            ),
            ({"json_schema": {"type": "integer", "multipleOf": 999_983}}, "constraint.too_complex"),
            ({"lark": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "constraint.invalid"),
        ):
            answer = await client.post("/v1/programs", json=program("x", constraint=constraint))
            assert answer.status_code == 400
            problem = answer.json()
            assert problem["code"] == code
            assert problem["path"] == "program.nodes[0].prompt[1].constraint"
            # The result is cached by now and still a rejection.
            again = await client.post("/v1/programs", json=program("x", constraint=constraint))
            assert (again.status_code, again.json()["code"]) == (400, code)
        status = await run(client, program("decide", constraint={"choices": ["yes", "no"]}))
        assert status["status"] == "done"


async def test_logprobs_and_bias_are_bounded(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        body = program("decide", logprobs=2, **{"as": "message"})
        message = (await run(client, body))["variables"]["answer"]["value"]
        content = message["logprobs"]["content"]
        assert "".join(each["token"] for each in content) == message["content"] == "probably not"
        assert [len(each["top_logprobs"]) for each in content] == [2] * len(content)
        assert content[0]["bytes"] == [ord("p")]
        assert content[0]["logprob"] < 0
        for output, path in (
            ({"logprobs": 2}, ".logprobs"),
            ({"logprobs": 21, "as": "message"}, ".logprobs"),
            ({"logit_bias": {"259": 1}}, ".logit_bias"),
            ({"logit_bias": {"5": 1000}}, ".logit_bias.5"),
            ({"logit_bias": {"x": 1}}, ".logit_bias"),
        ):
            answer = await client.post("/v1/programs", json=program("x", **output))
            assert answer.status_code == 400, output
            assert path in answer.json()["path"]
        status = await run(client, program("decide", logit_bias={"5": 1.5, "100": -100}))
        assert status["status"] == "done"


async def test_grammar_can_be_checked_alone(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:

        async def check(**body: Any) -> dict[str, Any]:
            answer = await client.post("/v1/grammar/check", json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        yes = {"choices": ["yes", "no"]}
        assert await check(constraint=yes) == {
            "is_supported": True,
            "is_relaxed": False,
            "matches": None,
            "error": None,
        }
        assert (await check(constraint=yes, text="yes"))["matches"] is True
        assert (await check(constraint=yes, text="ye"))["matches"] is False
        found = await check(constraint={"json_schema": UNIQUE}, text="[1,1]")
        assert (found["is_relaxed"], found["matches"]) == (True, False)
        found = await check(constraint={"lark": "start: ["}, text="x")
        assert (found["is_supported"], found["error"]["code"]) == (False, "constraint.invalid")
        bad: list[dict[str, Any]] = [{"constraint": {}}, {}, {"constraint": {"x": 1}}]
        for body in [*bad, {"constraint": {"regex": "a", "lark": "b"}}]:
            answer = await client.post("/v1/grammar/check", json=body)
            assert answer.status_code == 400


@contextlib.asynccontextmanager
async def official_of(tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    app = create_app(Config(data=tmp_path / "data", engine="fake", script=script))
    async with (
        over_socket(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_openai_response_formats(tmp_path: Path) -> None:
    async with official_of(tmp_path) as official:
        messages: Any = [{"role": "user", "content": "a person"}]
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        answer = await official.chat.completions.create(
            model="default", messages=messages, response_format=form
        )
        assert json.loads(answer.choices[0].message.content or "") == {"name": "Jo", "age": 42}
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 22
        answer = await official.chat.completions.create(
            model="default", messages=messages, response_format={"type": "json_object"}
        )
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await official.chat.completions.create(
                model="default", messages=messages, response_format=bad
            )
        assert (caught.value.code, caught.value.param) == ("constraint.invalid", "response_format")


async def test_openai_n_answers_share_their_prompt(tmp_path: Path) -> None:
    async with official_of(tmp_path) as official:
        messages: Any = [{"role": "user", "content": "decide " * 40}]
        answer = await official.chat.completions.create(
            model="default", messages=messages, n=5, logprobs=True, top_logprobs=3, seed=7
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
        for choice in answer.choices:
            assert choice.message.content == "probably not"
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            entries = choice.logprobs.content
            assert "".join(each.token for each in entries) == "probably not"
            assert len(entries[0].top_logprobs) == 3
        usage = answer.usage
        assert usage is not None
        assert usage.completion_tokens == 5 * len("probably not") + 5
        assert 280 < usage.prompt_tokens < 400


async def test_openai_answers_stream_interleaved(tmp_path: Path) -> None:
    async with official_of(tmp_path) as official:
        messages: Any = [{"role": "user", "content": "decide"}]
        stream = await official.chat.completions.create(
            model="default", messages=messages, n=3, stream=True, logprobs=True
        )
        texts, reasons, num_logprobs = [""] * 3, [""] * 3, [0] * 3
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] += choice.finish_reason or ""
                if choice.logprobs is not None:
                    num_logprobs[choice.index] += len(choice.logprobs.content or [])
        assert texts == ["probably not"] * 3
        assert reasons == ["stop"] * 3
        assert num_logprobs == [12] * 3


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}


async def test_openai_tool_call_round_trip(tmp_path: Path) -> None:
    async with official_of(tmp_path) as official:
        messages: list[Any] = [{"role": "user", "content": "weather in Rome?"}]
        given: Any = {"model": "default", "messages": messages, "tools": [WEATHER]}
        answer = await official.chat.completions.create(**given)
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        assert (message.content, reason) == ("Let me see.", "tool_calls")
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather",
            {"place": "Rome"},
        )
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        answer = await official.chat.completions.create(**given)
        assert answer.choices[0].message.content == "It is sunny."
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


async def test_openai_stream_has_text_then_whole_calls(tmp_path: Path) -> None:
    async with official_of(tmp_path) as official:
        messages: Any = [{"role": "user", "content": "weather in Rome?"}]
        tools: Any = [WEATHER]
        stream = await official.chat.completions.create(
            model="default", messages=messages, tools=tools, stream=True
        )
        text, calls, reason = "", [], None
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            calls += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason or reason
        assert (text, reason) == ("Let me see.", "tool_calls")
        assert [(call.index, call.function.name) for call in calls if call.function] == [
            (0, "weather")
        ]


async def test_openai_tool_choices_are_enforced(tmp_path: Path) -> None:
    async with official_of(tmp_path) as official:
        messages: Any = [{"role": "user", "content": "decide"}]
        tools: Any = [WEATHER]

        async def ask(choice: Any) -> Any:
            answer = await official.chat.completions.create(
                model="default", messages=messages, tools=tools, tool_choice=choice, max_tokens=200
            )
            return answer.choices[0]

        forced: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
        for choice in forced:
            found = await ask(choice)
            assert found.message.tool_calls[0].function.name == "weather"
            assert found.message.content is None
        for choice in ("auto", "none"):
            assert (await ask(choice)).message.content == "probably not"
        wrong: list[Any] = ["x", {"type": "function"}]
        for choice in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(choice)
            assert (caught.value.code, caught.value.param) == ("program.tools", "tool_choice")
        tools = [{"type": "function", "function": {"name": "a b"}}]
        with pytest.raises(openai.BadRequestError) as caught:
            await ask("auto")
        assert caught.value.param == "tools[0].function.name"


async def test_program_tools_need_a_message_output(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        output: dict[str, Any] = {"variable": "answer", "as": "message"}
        node: dict[str, Any] = {
            "id": "ask",
            "op": "generate",
            "messages": [{"role": "user", "content": "weather in Rome?"}],
            "tools": [WEATHER],
            "output": output,
        }
        body: dict[str, Any] = {"program": {"nodes": [node], "outputs": ["answer"]}}
        status = await run(client, body)
        value = status["variables"]["answer"]["value"]
        assert value["tool_calls"][0]["function"]["name"] == "weather"
        assert value["finish_reason"] == "tool_calls"
        output["max_tokens"] = 60
        value = (await run(client, body))["variables"]["answer"]["value"]
        assert value["finish_reason"] == "length"
        assert value["tool_calls"][0]["function"]["arguments"] == '{"p'
        output.pop("as")
        refused = await client.post("/v1/programs", json=body)
        assert refused.json()["path"] == "program.nodes[0].output.as"
