"""Requests of OpenAI's client, run by a server with a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.status import Event

from ...inprocess import answer
from ...service_double import client_at, in_process, over_socket, until

HI: Any = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"model": "fake", "temperature": 0}


@contextlib.asynccontextmanager
async def openai_client(data: Path, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(Config(data=data, engine="fake", **settings))
    async with (
        over_socket(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_completions_of_lists_of_prompts(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        one = await client.completions.create(prompt="a tree", **GREEDY)
        # Without max_tokens, an answer ends where the model ends it.
        assert one.choices[0].text == answer("a tree")
        assert one.choices[0].finish_reason == "stop"
        both = await client.completions.create(prompt=["a tree", "a house"], n=2, **GREEDY)
        texts = [choice.text for choice in both.choices]
        assert texts == [answer("a tree")] * 2 + [answer("a house")] * 2
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        assert both.usage is not None
        assert both.usage.prompt_tokens == len("a treea house")
        stream = await client.completions.create(
            prompt=["a tree", "a house"], stream=True, echo=True, **GREEDY
        )
        streamed = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == [text + answer(text) for text in ("a tree", "a house")]


async def test_completions_of_token_ids(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        ids = list(b"a tree")
        one = await client.completions.create(prompt=ids, echo=True, **GREEDY)
        assert one.choices[0].text == "a tree" + answer("a tree")
        both = await client.completions.create(prompt=[ids, list(b"b")], **GREEDY)
        assert [choice.text for choice in both.choices] == [answer("a tree"), answer("b")]
        for prompt in ([[1_000_000]], [1_000_000]):
            with pytest.raises(openai.BadRequestError, match="its ids are below") as caught:
                await client.completions.create(prompt=prompt, **GREEDY)
            assert caught.value.param == "prompt"


async def test_logprobs_arrive_with_their_tokens(tmp_path: Path) -> None:
    async with openai_client(tmp_path, time_per_output_token=0.002) as client:
        whole = await client.completions.create(prompt="ab", logprobs=2, **GREEDY)
        text, logprobs = whole.choices[0].text, whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == text
        assert logprobs.text_offset == list(range(len(text)))
        assert logprobs.top_logprobs is not None
        assert all(
            token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
        )
        stream = await client.completions.create(prompt="ab", logprobs=2, stream=True, **GREEDY)
        tokens: list[str] = []
        offsets: list[int] = []
        async for chunk in stream:
            part = chunk.choices[0]
            if part.text:
                assert part.logprobs is not None
                assert part.logprobs.tokens is not None
                assert "".join(part.logprobs.tokens) == part.text
                tokens += part.logprobs.tokens
                offsets += part.logprobs.text_offset or []
        assert (tokens, offsets) == (logprobs.tokens, logprobs.text_offset)
        chat = await client.chat.completions.create(
            messages=HI, logprobs=True, top_logprobs=1, stream=True, **GREEDY
        )
        async for piece in chat:
            choice = piece.choices[0]
            if choice.delta.content:
                assert choice.logprobs is not None
                parts = [token.token for token in choice.logprobs.content or []]
                assert "".join(parts) == choice.delta.content


@pytest.mark.parametrize("begin", [3, 5, 12])
async def test_streamed_logprobs_end_before_a_stop_string(tmp_path: Path, begin: int) -> None:
    async with openai_client(tmp_path) as client:
        stop = answer("ab")[begin : begin + 4]
        options: Any = {"prompt": "ab", "logprobs": 0, "stop": [stop], **GREEDY}
        whole = (await client.completions.create(**options)).choices[0]
        assert whole.text == answer("ab").partition(stop)[0]
        assert whole.logprobs is not None
        tokens: list[str] = []
        async for chunk in await client.completions.create(stream=True, **options):
            if (logprobs := chunk.choices[0].logprobs) is not None:
                tokens += logprobs.tokens or []
        assert tokens == whole.logprobs.tokens == list(whole.text)


STRUCTURED: list[tuple[dict[str, Any], str]] = [
    ({"guided_choice": ["yes", "no"]}, "^(yes|no)$"),
    ({"guided_regex": "[0-9]{3}"}, "^[0-9]{3}$"),
    ({"guided_json": {"type": "integer", "minimum": 7, "maximum": 7}}, "^7$"),
    ({"guided_json": '{"const": 5}'}, "^5$"),
    ({"guided_grammar": 'start: "a" "b"'}, "^ab$"),
    ({"structured_outputs": {"choice": ["red"]}}, "^red$"),
    ({"structured_outputs": {"regex": "x{2}"}}, "^xx$"),
    ({"structured_outputs": {"json": {"const": 1}}}, "^1$"),
    ({"structured_outputs": {"grammar": 'start: "ok"'}}, "^ok$"),
]


async def test_vllms_constraints_are_honoured(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        for extra, pattern in STRUCTURED:
            found = await client.chat.completions.create(messages=HI, extra_body=extra, **GREEDY)
            content = found.choices[0].message.content
            assert content is not None
            assert re.match(pattern, content), (extra, content)
            text = await client.completions.create(prompt="x", extra_body=extra, **GREEDY)
            assert re.match(pattern, text.choices[0].text), extra


BAD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"guided_regex": "a", "structured_outputs": {"choice": ["b"]}},
        "exclude each other",
        "guided_regex",
    ),
    ({"guided_json": "{"}, "is not a JSON schema", "guided_json"),
    ({"max_token": 5}, "did you mean `max_tokens`", "max_token"),
    ({"surprise": 5}, "unknown option 'surprise': remove it", "surprise"),
    ({"functions": [{}]}, "use `tools`", "functions"),
    ({"priority": 1000}, "<= 100", "priority"),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        "'max_tokens' is 5 and 'max_completion_tokens' is 6: send one of them",
        "max_tokens",
    ),
    (
        {"messages": [{"role": "user", "content": None}]},
        "a message of role 'user' needs content: send a text",
        "messages[0].content",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "read text only",
        "messages[0].content[0]",
    ),
]


async def test_bad_input_gets_the_cure(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        for extra, text, param in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(messages=HI, extra_body=extra, **GREEDY)
            assert text in caught.value.message, extra
            assert caught.value.param == param
        schemas: list[Any] = [
            {"type": "nothing"},
            {"$ref": "#/nowhere"},
            {"type": "string", "pattern": "("},
        ]
        for schema in schemas:
            response_format: Any = {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    messages=HI, response_format=response_format, **GREEDY
                )
            assert caught.value.param == "response_format"


class Point(BaseModel):
    x: bool


async def test_the_clients_helpers_work(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        parsed = await client.chat.completions.parse(messages=HI, response_format=Point, **GREEDY)
        assert isinstance(parsed.choices[0].message.parsed, Point)
        async with client.chat.completions.stream(messages=HI, **GREEDY) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.content


async def test_extra_fields_do_not_change_a_greedy_answer(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        plain = await client.chat.completions.create(messages=HI, **GREEDY)
        extra = {
            "cache_salt": "mine",
            "priority": -5,
            "chat_template_kwargs": {"enable_thinking": False},
            "top_k": 5,
            "min_p": 0.1,
        }
        salted = await client.chat.completions.create(messages=HI, extra_body=extra, **GREEDY)
        assert salted.choices[0].message.content == plain.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="spells a control token"):
            await client.chat.completions.create(
                messages=HI,
                extra_body={"chat_template_kwargs": {"x": "<|im_end|>"}},
                **GREEDY,
            )


async def test_requests_of_a_session_pass_variables_on(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:

        async def ask(content: str, **binding: Any) -> str:
            found = await client.chat.completions.create(
                messages=[{"role": "user", "content": content}],
                extra_body={"conure": {"session": "shop", **binding}},
                **GREEDY,
            )
            return found.choices[0].message.content or ""

        # The reader may be submitted first: the server forwards the value when it exists.
        short = asyncio.ensure_future(ask("Shorter: {{ad}}", read={"ad": "ad"}))
        ad = await ask("Write an {{ad}}", write="ad")
        plain = await client.chat.completions.create(
            messages=[{"role": "user", "content": "Write an {{ad}}"}], **GREEDY
        )
        assert ad == plain.choices[0].message.content
        expected = await client.chat.completions.create(
            messages=[{"role": "user", "content": f"Shorter: {ad}"}], **GREEDY
        )
        assert await short == expected.choices[0].message.content
        stream = await client.completions.create(
            prompt="Again: {{ad}}",
            stream=True,
            extra_body={"conure": {"session": "shop", "read": {"ad": "ad"}}},
            **GREEDY,
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == answer(f"Again: {ad}")
        with pytest.raises(openai.BadRequestError, match="no text of the request"):
            await ask("Hi", read={"ad": "ad"})
        with pytest.raises(openai.BadRequestError):
            await ask("Again", write="ad")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tier", "objective"), [("default", "latency"), ("flex", "throughput")])
async def test_calls_of_a_session_have_an_objective(
    tmp_path: Path, stream: bool, tier: str, objective: str
) -> None:
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with in_process(app) as client:
        body = {"model": "fake", "messages": HI, "service_tier": tier, "stream": stream}
        for binding, n in (({}, 2), ({"write": "kept"}, 1)):
            extra = {"conure": {"session": "shop", **binding}, "n": n}
            await client.post("/v1/chat/completions", json={**body, **extra})
        [run] = app.state.service.programs
        graph = run.state.graph
    assert graph.objectives == dict.fromkeys(graph.variables, objective)


async def test_a_session_call_reads_a_variable_with_a_type(tmp_path: Path) -> None:
    async with in_process(create_app(Config(data=tmp_path, engine="fake"))) as client:
        program = {"variables": {"doc": {"type": "string"}}}
        body = {"open": True, "program": program, "inputs": {"doc": "hi"}}
        session = (await client.post("/v1/programs", json=body)).json()["id"]
        binding = {"session": session, "read": {"doc": "doc"}}
        body = {"model": "fake", "prompt": "Read {{doc}}:", "temperature": 0, "conure": binding}
        found = await client.post("/v1/completions", json=body)
    assert found.json()["choices"][0]["text"] == answer("Read hi:")


async def test_stream_in_a_session_reads_the_events_of_its_own_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Config(data=tmp_path, engine="fake"))
    read: list[Event] = []
    events = app.state.service.events

    async def record(*args: Any, **options: Any) -> AsyncIterator[Event]:
        async for event in events(*args, **options):
            read.append(event)
            yield event

    async with in_process(app) as client:
        body = {"model": "fake", "messages": HI, "conure": {"session": "shop"}, "stream": True}
        monkeypatch.setattr(app.state.service, "events", record)
        for _ in range(2):
            read.clear()
            assert "[DONE]" in (await client.post("/v1/chat/completions", json=body)).text
    nodes = {event.data["node"] for event in read if "node" in event.data}
    assert len(nodes) == 1
    assert "program.accepted" not in {event.type for event in read}


async def test_usage_counts_cached_tokens(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        prompt = "word " * 40
        first = await client.completions.create(prompt=prompt, max_tokens=1, **GREEDY)
        second = await client.completions.create(prompt=prompt, max_tokens=1, **GREEDY)
        salted = await client.completions.create(
            prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"}, **GREEDY
        )
        cached = [
            found.usage.prompt_tokens_details.cached_tokens
            for found in (first, second, salted)
            if found.usage is not None and found.usage.prompt_tokens_details is not None
        ]
        assert cached[0] == cached[2] == 0
        assert cached[1] is not None
        assert cached[1] > 100


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_disconnect_in_a_session_cancels_only_the_calls_of_its_request(
    tmp_path: Path, path: str
) -> None:
    app = create_app(Config(data=tmp_path, engine="fake", time_per_output_token=0.01))
    text = {"prompt": "Hi"} if path == "completions" else {"messages": HI}
    body = {**GREEDY, **text, "conure": {"session": "shop"}}
    long = {"stream": True, "n": 2, "max_tokens": 1_000, "ignore_eos": True}
    async with over_socket(app) as url, client_at(url) as client:
        other = asyncio.ensure_future(client.post(f"/v1/{path}", json={**body, "max_tokens": 40}))
        await until(lambda: bool(app.state.service.programs))
        async with client.stream("POST", f"/v1/{path}", json={**body, **long}) as stream:
            assert stream.status_code == 200
        [run] = app.state.service.programs
        nodes = run.state.nodes.values()
        await until(lambda: [node.phase for node in nodes].count("killed") == 2)
        assert (await other).status_code == 200
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200


async def test_a_disconnect_does_not_cancel_the_writer_of_a_variable(tmp_path: Path) -> None:
    app = create_app(Config(data=tmp_path, engine="fake", time_per_output_token=0.01))
    body = {**GREEDY, "prompt": "Hi", "stream": True}
    async with over_socket(app) as url, client_at(url) as client:
        written = {**body, "conure": {"session": "shop", "write": "ad"}}
        async with client.stream("POST", "/v1/completions", json=written) as stream:
            assert stream.status_code == 200
        read = {"conure": {"session": "shop", "read": {"ad": "ad"}}}
        later = {**GREEDY, "prompt": "Shorter: {{ad}}", **read}
        found = await client.post("/v1/completions", json=later)
    assert found.json()["choices"][0]["text"] == answer(f"Shorter: {answer('Hi')}")


async def test_a_disconnect_of_a_reader_does_not_cancel_the_writer(tmp_path: Path) -> None:
    app = create_app(Config(data=tmp_path, engine="fake", time_per_output_token=0.01))
    write = {"session": "shop", "write": "ad"}
    read = {"session": "shop", "read": {"ad": "ad"}}
    reading = {**GREEDY, "prompt": "Shorter: {{ad}}", "conure": read}
    async with over_socket(app) as url, client_at(url) as client:
        body = {**GREEDY, "prompt": "Hi", "conure": write, "max_tokens": 60, "ignore_eos": True}
        writer = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: bool(app.state.service.programs))
        [run] = app.state.service.programs
        await until(lambda: bool(run.state.nodes))
        num_nodes = len(run.state.nodes)
        reader = asyncio.ensure_future(client.post("/v1/completions", json=reading))
        await until(lambda: len(run.state.nodes) > num_nodes)
        reader.cancel()
        nodes = run.state.nodes.values()
        await until(lambda: "killed" in [node.phase for node in nodes])
        assert (await writer).status_code == 200
        assert (await client.post("/v1/completions", json=reading)).status_code == 200
    assert [node.phase for node in nodes].count("killed") == 1
