"""`/v1/responses` by OpenAI's client, on a server with a fake engine."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from conure.server.app import drain
from conure.server.routes.openai.response_request import ResponseRequest, lower_response

from ...service_double import ScriptedProgram, ScriptedService, app_of, in_process, until
from ...store.journal_records import FILE
from .test_requests import openai_client

GREEDY: dict[str, Any] = {"model": "fake", "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


async def chat_answer(client: openai.AsyncOpenAI, *messages: tuple[str, str]) -> str:
    """Return what the chat endpoint answers to the same messages."""
    found = await client.chat.completions.create(
        messages=[{"role": role, "content": content} for role, content in messages],  # type: ignore[misc]  # any role
        **GREEDY,
    )
    return found.choices[0].message.content or ""


async def test_a_response_is_the_chats_answer(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        found = await client.responses.create(input="Hi", instructions="Be kind.", **GREEDY)
        expected = await chat_answer(client, ("system", "Be kind."), ("user", "Hi"))
        assert found.output_text == expected
        assert (found.status, found.object) == ("completed", "response")
        assert found.usage is not None
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
        again = await client.responses.retrieve(found.id)
        assert again.output_text == expected
        assert again.instructions == "Be kind."
        items = await client.responses.input_items.list(found.id)
        [item] = items.data
        assert item.to_dict()["content"] == [{"type": "input_text", "text": "Hi"}]
        cut = await client.responses.create(input="Hi", max_output_tokens=1, **GREEDY)
        assert cut.status == "incomplete"
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"


async def test_the_input_is_listed_in_pages(tmp_path: Path) -> None:
    texts = [str(i) for i in range(25)]
    async with openai_client(tmp_path) as client:
        given: Any = [{"role": "user", "content": text} for text in texts]
        found = await client.responses.create(input=given, **GREEDY)

        async def listed(**options: Any) -> list[Any]:
            pages: Any = client.responses.input_items.list(found.id, **options)
            return [item.content[0].text async for item in pages]

        assert await listed() == texts[::-1]
        assert await listed(order="asc", limit=10) == texts
        first: Any = await client.responses.input_items.list(found.id)
        assert (len(first.data), first.has_more) == (20, True)
        second = await client.responses.input_items.list(found.id, after=first.last_id)
        assert (len(second.data), second.has_more) == (5, False)
        for name, value in (("after", "x"), ("limit", 0), ("limit", 101), ("order", "up")):
            with pytest.raises(openai.BadRequestError) as refused:
                await listed(**{name: value})
            assert str(refused.value.param).endswith(name)


async def test_input_tokens_are_counted_as_a_response_counts_them(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        first = await client.responses.create(input="One?", **GREEDY)
        request: dict[str, Any] = {
            "input": "Two?",
            "instructions": "Be kind.",
            "previous_response_id": first.id,
            "model": "fake",
        }
        counted = await client.responses.input_tokens.count(**request)
        answered = await client.responses.create(**request)
        assert answered.usage is not None
        assert counted.input_tokens == answered.usage.input_tokens
        assert counted.object == "response.input_tokens"


async def test_a_conversation_continues_by_the_earlier_response(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        first = await client.responses.create(input="One?", instructions="Old.", **GREEDY)
        second = await client.responses.create(
            input="Two?", previous_response_id=first.id, instructions="New.", **GREEDY
        )
        third = await client.responses.create(
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Three?"}]}],
            previous_response_id=second.id,
            **GREEDY,
        )
        one, two = first.output_text, second.output_text
        # Instructions apply to their own response only.
        assert two == await chat_answer(
            client, ("system", "New."), ("user", "One?"), ("assistant", one), ("user", "Two?")
        )
        assert third.output_text == await chat_answer(
            client,
            ("user", "One?"),
            ("assistant", one),
            ("user", "Two?"),
            ("assistant", two),
            ("user", "Three?"),
        )
    async with openai_client(tmp_path) as client:  # after a restart
        assert (await client.responses.retrieve(first.id)).output_text == one
        with pytest.raises(openai.BadRequestError, match="does not exist") as refused:
            await client.responses.create(input="x", previous_response_id="resp_0", **GREEDY)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"


async def test_a_stream_has_the_clients_events(tmp_path: Path) -> None:
    async with openai_client(tmp_path, time_per_output_token=0.002) as client:
        async with client.responses.stream(input="Hi", **GREEDY) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == await chat_answer(client, ("user", "Hi"))
        types = [event.type for event in events]
        assert types[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert types[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert set(types[4:-4]) == {"response.output_text.delta"}
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(set(numbers))


async def test_tools_are_called_and_answered(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        arguments: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", **GREEDY}
        found = await client.responses.create(input="Weather?", **arguments)
        [call] = found.output
        assert call.type == "function_call"
        assert call.name == "weather"
        async with client.responses.stream(input="Weather?", **arguments) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        [streamed] = final.output
        assert streamed.type == "function_call"
        assert streamed.arguments == call.arguments
        assert "response.function_call_arguments.done" in [event.type for event in events]
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        answered = await client.responses.create(
            input=output,
            previous_response_id=found.id,
            tools=[WEATHER],
            tool_choice="none",
            **GREEDY,
        )
        assert answered.output_text
        named = await client.responses.create(
            input="Weather?",
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "weather"},
            **GREEDY,
        )
        assert named.output[0].type == "function_call"


async def test_a_cut_call_is_incomplete(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        arguments: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", **GREEDY}
        whole = await client.responses.create(input="Weather?", **arguments)
        assert whole.usage is not None
        limit = whole.usage.output_tokens - 20
        cut = await client.responses.create(input="Weather?", max_output_tokens=limit, **arguments)
        assert (cut.status, cut.output[-1].type) == ("incomplete", "function_call")
        assert cut.output[-1].status == "incomplete"
        stream: Any = await client.responses.create(
            input="Weather?", max_output_tokens=limit, stream=True, **arguments
        )
        events = [event async for event in stream]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in done] == ["incomplete"]


def test_many_calls_of_one_message_are_added_in_linear_time() -> None:
    def seconds(num_calls: int) -> float:
        item = {"type": "function_call", "call_id": "", "name": "", "arguments": ""}
        request = ResponseRequest(model="fake", input=[dict(item) for _ in range(num_calls)])
        start = time.process_time()
        node = lower_response(request, [], None)
        taken = time.process_time() - start
        assert node.messages
        [message] = node.messages
        assert message.tool_calls
        assert len(message.tool_calls) == num_calls
        return taken

    # If the calls before are copied for each call, the second takes more than 50 times as long.
    few, many = (min(seconds(num_calls) for _ in range(3)) for num_calls in (3_000, 30_000))
    assert many < 30 * few


@pytest.mark.parametrize(
    "metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {f"k{i}": "v" for i in range(17)}]
)
async def test_metadata_has_the_bounds_of_openai(tmp_path: Path, metadata: dict[str, str]) -> None:
    async with openai_client(tmp_path) as client:
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(input="Hi", metadata=metadata, **GREEDY)


async def test_events_do_not_repeat_a_long_input(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        for text, is_repeated in (("Hi", True), ("long " * 1_000, False)):
            found = await client.responses.create(input=text, max_output_tokens=1, **GREEDY)
            program = "p_" + found.id.removeprefix("resp_")
            url = f"{str(client.base_url).removesuffix('/v1/')}/v1/programs/{program}/events"
            events = (await client.get(url, cast_to=httpx.Response)).text
            assert ('"meta"' in events) == is_repeated


async def test_a_background_response_outlives_its_stream(tmp_path: Path) -> None:
    async with openai_client(tmp_path, time_per_output_token=0.005) as client:
        expected = await chat_answer(client, ("user", "Hi"))
        stream: Any = await client.responses.create(
            input="Hi", background=True, stream=True, **GREEDY
        )
        text, last, found = "", -1, ""
        async for event in stream:
            last = event.sequence_number
            if event.type == "response.created":
                found = event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
                break
        await stream.close()
        resumed: Any = await client.responses.retrieve(found, stream=True, starting_after=last)
        rest = [event async for event in resumed]
        assert all(event.sequence_number > last for event in rest)
        text += "".join(e.delta for e in rest if e.type == "response.output_text.delta")
        assert text == expected
        assert rest[-1].response.output_text == expected
    async with openai_client(tmp_path) as client:  # after a restart
        resumed = await client.responses.retrieve(found, stream=True, starting_after=last)
        again = [event async for event in resumed]
        assert "".join(e.delta for e in again if e.type.endswith("text.delta")) == "".join(
            e.delta for e in rest if e.type.endswith("text.delta")
        )
        assert [e.sequence_number for e in again][-4:] == [e.sequence_number for e in rest][-4:]


@pytest.mark.parametrize("background", [False, True])
async def test_a_stop_of_the_server_fails_no_response_that_goes_on(background: bool) -> None:
    service = ScriptedService()
    service.on_submit = lambda program: program.delta("answer", "Hel", offset=0)
    app = app_of(service)
    async with in_process(app) as client:
        body = {"model": "tiny", "input": "Hi", "stream": True, "background": background}
        streaming = asyncio.ensure_future(client.post("/v1/responses", json=body))
        await until(lambda: bool(service.programs) and service.programs["p_1"].num_readers == 1)
        await drain(app, timeout_s=1)
        lines = (await streaming).text.split("\n")
    last = [line for line in lines if line.startswith("event: ")][-1]
    assert last == f"event: response.{'output_text.delta' if background else 'failed'}"


async def test_a_background_response_is_polled_or_cancelled(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        queued = await client.responses.create(input="Hi", background=True, **GREEDY)
        assert (queued.status, queued.background) == ("queued", True)
        events: Any = await client.responses.retrieve(queued.id, stream=True)
        assert [event.type async for event in events][-1] == "response.completed"
        found = await client.responses.retrieve(queued.id)
        assert found.status == "completed"
        assert found.output_text == await chat_answer(client, ("user", "Hi"))
        assert (await client.responses.cancel(queued.id)).status == "completed"
    async with openai_client(tmp_path / "slow", time_per_output_token=2.0) as client:
        slow = await client.responses.create(input="Hi", background=True, **GREEDY)
        assert (await client.responses.cancel(slow.id)).status == "cancelled"
        assert (await client.responses.retrieve(slow.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="has no answer"):
            await client.responses.create(input="x", previous_response_id=slow.id, **GREEDY)


async def test_streams_of_a_cancelled_response_end_alike(tmp_path: Path) -> None:
    async with openai_client(tmp_path, time_per_output_token=0.1) as client:
        live: Any = await client.responses.create(
            input="Hi",
            background=True,
            stream=True,
            extra_body={"ignore_eos": True, "min_tokens": 1_000},
            **GREEDY,
        )
        events: list[Any] = []
        async for event in live:
            if event.type == "response.output_text.delta" and events[-1].type != event.type:
                await client.responses.cancel(events[0].response.id)
            events.append(event)
        again: Any = await client.responses.retrieve(events[0].response.id, stream=True)
        last = [event async for event in again][-1]
    assert last == events[-1]
    assert last.response.status == "cancelled"
    assert last.response.error is None
    assert last.sequence_number > events[-2].sequence_number


async def test_a_response_that_cannot_be_resumed_has_failed_and_can_be_deleted(
    tmp_path: Path,
) -> None:
    async with openai_client(tmp_path, time_per_output_token=2.0) as client:
        slow = await client.responses.create(input="a secret", background=True, **GREEDY)
    with sqlite3.connect(tmp_path / FILE) as journal:
        change = """replace(CAST(body AS TEXT), '"op":"generate"', '"op":"of another version"')"""
        journal.execute(f"UPDATE program SET body = CAST({change} AS BLOB), crc = NULL")
    async with openai_client(tmp_path) as client:
        found = await client.responses.retrieve(slow.id)
        assert found.status == "failed"
        assert found.error is not None
        assert "program.unreadable" in str(found.error)
        await client.responses.delete(slow.id)
        with pytest.raises(openai.NotFoundError, match=slow.id):
            await client.responses.retrieve(slow.id)


async def test_a_deleted_response_does_not_exist(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        first = await client.responses.create(input="Hi", **GREEDY)
        second = await client.responses.create(
            input="And?", previous_response_id=first.id, **GREEDY
        )
        await client.responses.delete(first.id)
        for request in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match=first.id):
                await request(first.id)
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text
        with pytest.raises(openai.BadRequestError, match=first.id):
            await client.responses.create(input="x", previous_response_id=second.id, **GREEDY)


class Point(BaseModel):
    x: bool


async def test_structured_output_and_logprobs(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        parsed = await client.responses.parse(input="Hi", text_format=Point, **GREEDY)
        assert isinstance(parsed.output_parsed, Point)
        found = await client.responses.create(
            input="Hi", include=["message.output_text.logprobs"], top_logprobs=1, **GREEDY
        )
        part = found.output[0].to_dict()["content"][0]
        assert "".join(token["token"] for token in part["logprobs"]) == found.output_text


async def test_a_stream_has_the_logprobs_of_tokens_without_text() -> None:
    first: dict[str, Any] = {"token": "Hel", "logprob": -1.0, "top_logprobs": []}
    tokens = [first, {**first, "token": ""}]

    def play(program: ScriptedProgram) -> None:
        at: Any = {"variable": "answer", "offset": 0, "logprobs_offset": 0}
        program.emit("node.delta", is_journaled=False, text="Hel", logprobs=tokens[:1], **at)
        program.set_usage("call", prompt=1, shared=0, output=2)
        counts = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        message = {"role": "assistant", "content": "Hel", "logprobs": {"content": tokens}}
        program.commit("answer", message | {"usage": counts})
        program.finish()

    service = ScriptedService()
    service.on_submit = play
    async with in_process(app_of(service)) as client:
        body = {"model": "tiny", "input": "Hi", "stream": True}
        lines = (await client.post("/v1/responses", json=body)).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [each["delta"] for each in deltas] == ["Hel", ""]
    assert [token for each in deltas for token in each["logprobs"]] == tokens
    numbers = [each["sequence_number"] for each in events]
    assert numbers == sorted(set(numbers))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "use type 'function'"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "use messages, function calls"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "read text only",
    ),
    ({"input": []}, "is empty"),
    ({"conversation": "c"}, "use `previous_response_id`"),
    ({"truncation": "auto"}, "nothing is truncated here"),
    ({"reasoning": {"effort": "high"}}, "is not supported"),
    ({"include": ["x"]}, "cannot be included"),
    ({"background": True, "store": False}, "needs 'store'"),
    ({"max_tokens": 5}, "unknown option 'max_tokens'"),
]


async def test_bad_input_gets_the_cure(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        for fields, text in BAD:
            body = {"input": "Hi", **GREEDY, **fields}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/responses", body=body, cast_to=object)
            assert text in caught.value.message, fields
        kept = await client.responses.create(input="Hi", store=False, **GREEDY)
        with pytest.raises(openai.NotFoundError, match="was not stored"):
            await client.responses.retrieve(kept.id)
        found = await client.responses.create(input="Hi", **GREEDY)
        with pytest.raises(openai.BadRequestError, match="'background': true"):
            await client.responses.cancel(found.id)


@pytest.mark.parametrize("item", [{"role": {}, "content": "a"}, {"role": [], "content": "a"}])
async def test_a_role_that_is_not_text_is_rejected(tmp_path: Path, item: Any) -> None:
    async with openai_client(tmp_path) as client:
        with pytest.raises(openai.BadRequestError, match="not supported"):
            await client.responses.create(input=[item], **GREEDY)
        part: Any = {"role": "user", "content": [{"type": {}, "text": "a"}]}
        with pytest.raises(openai.BadRequestError, match="not supported"):
            await client.responses.create(input=[part], **GREEDY)
