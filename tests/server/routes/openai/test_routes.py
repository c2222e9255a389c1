"""The OpenAI endpoints, by raw requests and by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from conure.server.app import drain
from conure.server.program.errors import UnavailableError
from conure.server.program.ir import GenerateNode
from conure.server.runtime.reporting.request_times import MIN_REQUESTS, RequestTimeMeter

from ...service_double import (
    ScriptedProgram,
    ScriptedService,
    app_of,
    client_at,
    in_process,
    over_socket,
    service_error,
    until,
)

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def answering(text: str = "Hello!", pieces: tuple[str, ...] = (), reason: str = "stop") -> Any:
    """Return a script that streams the pieces and then commits the text."""

    def play(program: ScriptedProgram) -> None:
        offset = 0
        for piece in pieces:
            program.delta("answer", piece, offset=offset)
            offset += len(piece)
        # The call ran twice; the usage excludes the first attempt.
        program.set_usage("call", prompt=24, shared=8, output=9)
        message = {"role": "assistant", "content": text, "finish_reason": reason}
        program.commit("answer", message | {"usage": usage(prompt=12, output=5)})
        program.finish()

    return play


def usage(*, prompt: int, output: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def failing(code: str, message: str) -> Any:
    def play(program: ScriptedProgram) -> None:
        program.fail("answer", "failed", code, message)
        program.finish("failed")

    return play


def node_of(service: ScriptedService) -> GenerateNode:
    [node] = service.programs["p_1"].submission.program.nodes
    assert isinstance(node, GenerateNode)
    return node


async def test_openai_client_completes_a_chat() -> None:
    service = ScriptedService()
    service.on_submit = answering()
    async with (
        over_socket(app_of(service)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            stop="END",
            seed=-1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
        )
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 5)
    assert answer.usage.total_tokens == 17
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    node = node_of(service)
    assert node.messages
    assert [message.role for message in node.messages] == ["system", "user"]
    output = node.output
    assert output
    assert (output.max_tokens, output.temperature, output.top_p) == (7, 0, 0.5)
    assert (output.stop, output.form) == (["END"], "message")
    assert (output.presence_penalty, output.frequency_penalty) == (0.5, -0.5)
    assert output.seed == 2**63 - 1
    assert service.cancelled == []


async def test_openai_client_streams_a_chat_with_usage() -> None:
    service = ScriptedService()
    service.on_submit = answering("Hello, you!", ("Hel", "lo,"), "length")
    async with (
        over_socket(app_of(service)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts = [c.choices[0].delta.content for c in chunks if c.choices]
    assert texts == ["", "Hel", "lo,", " you!", None]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 17
    assert len({chunk.id for chunk in chunks}) == 1
    assert service.cancelled == []


async def test_openai_client_completes_and_streams_text() -> None:
    service = ScriptedService()
    service.on_submit = answering("one two", ("one",))
    async with (
        over_socket(app_of(service)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        answer = await client.completions.create(model="tiny", prompt="Count:")
        assert answer.choices[0].text == "one two"
        stream = await client.completions.create(model="tiny", prompt="Count:", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "one two"
    node = node_of(service)
    assert node.prompt
    assert node.prompt[0].text == "Count:"
    assert node.prompt[1].max_tokens is None  # what the context leaves


async def test_openai_client_lists_models() -> None:
    async with (
        over_socket(app_of(ScriptedService())) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        models = [model.model_dump() async for model in client.models.list()]
        assert [model["id"] for model in models] == ["tiny", "org/other"]
        assert (await client.models.retrieve("org/other")).owned_by == "conure"
        assert [model["aliases"] for model in models] == [["org/tiny"], []]
        assert (await client.models.retrieve("org/tiny")).id == "tiny"
        tiny, other = ((model["purpose"], model["notice"]) for model in models)
        assert other == ("general", "")
        assert tiny[0] == "test"
        assert "no meaning" in tiny[1]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nothing")
        assert caught.value.code == "model_not_found"


async def test_restarted_call_repeats_no_text() -> None:
    service = ScriptedService()

    def play(program: ScriptedProgram) -> None:
        program.delta("answer", "abc", offset=0)
        program.emit("node.restarted", node="call", attempt=2)
        program.delta("answer", "ab", offset=0, attempt=2)
        program.delta("answer", "cde", offset=2, attempt=2)
        program.delta("answer", "hi", offset=7, attempt=2)
        program.set_usage("call", prompt=1, shared=0, output=1)
        message = {"content": "abcdefghij", "finish_reason": "stop"}
        program.commit("answer", message | {"usage": usage(prompt=1, output=1)})
        program.finish()

    service.on_submit = play
    async with in_process(app_of(service)) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert contents == ["", "abc", "de", "fghij", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_early_error_is_an_http_error(stream: bool) -> None:
    service = ScriptedService()
    service.on_submit = failing("prompt.too_long", "5000 tokens, 4096 fit")
    async with in_process(app_of(service)) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "error": {
            "message": "5000 tokens, 4096 fit",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
    }


async def test_late_error_is_the_last_event() -> None:
    service = ScriptedService()

    def play(program: ScriptedProgram) -> None:
        program.delta("answer", "Hel", offset=0)
        failing("engine.failed", "it broke")(program)

    service.on_submit = play
    async with (
        over_socket(app_of(service)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_before_text_cancels_program(stream: bool) -> None:
    service = ScriptedService()
    async with over_socket(app_of(service)) as url, client_at(url) as client:
        body = {**CHAT, "stream": stream}
        waiting = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        await until(lambda: any(p.num_waiters + p.num_readers for p in service.programs.values()))
        waiting.cancel()
        await until(lambda: service.cancelled == ["p_1"])
        program = service.programs["p_1"]
        await until(lambda: program.num_waiters + program.num_readers == 0)


async def test_disconnect_during_stream_cancels_program() -> None:
    service = ScriptedService()
    service.on_submit = lambda program: program.delta("answer", "Hel", offset=0)
    async with over_socket(app_of(service)) as url, client_at(url) as client:
        body = {**CHAT, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if "Hel" in line:
                    break
        await until(lambda: service.cancelled == ["p_1"])
        await until(lambda: service.programs["p_1"].num_readers == 0)


async def test_drain_ends_waiting_requests_with_503() -> None:
    service = ScriptedService()
    app = app_of(service)
    async with in_process(app) as client:
        waiting = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: bool(service.programs) and service.programs["p_1"].num_waiters == 1)
        await drain(app, timeout_s=1)
        answer = await waiting
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server.draining"
        assert answer.json()["error"]["type"] == "server_error"
        assert service.cancelled == ["p_1"]


@pytest.mark.parametrize("binding", [{"read": {"ad": "ad"}}, {"write": f"p_{'0' * 24}.ad"}])
async def test_invalid_request_opens_no_session(binding: dict[str, Any]) -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        body = {**CHAT, "conure": {"session": "shop", **binding}}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert not service.programs


async def test_full_queue_is_429_with_retry_after() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        service.refusal = service_error(UnavailableError, "queue.full", status=429, retry_after_s=3)
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_an_assistants_refusal_is_text() -> None:
    service = ScriptedService()
    service.on_submit = answering()
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": " Sorry."}]
    async with in_process(app_of(service)) as client:
        messages = [{"role": "assistant", "content": parts}, *CHAT["messages"]]
        await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    node: Any = node_of(service)
    assert [part.text for part in node.messages[0].content] == ["No.", " Sorry."]


async def test_a_refusal_without_content_is_text() -> None:
    service = ScriptedService()
    service.on_submit = answering()
    async with in_process(app_of(service)) as client:
        refused = {"role": "assistant", "content": None, "refusal": "No."}
        await client.post("/v1/chat/completions", json={**CHAT, "messages": [refused]})
    node: Any = node_of(service)
    assert node.messages[0].content == "No."


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_copies_of_a_large_prompt_are_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conure.server.routes.openai.routes.MAX_BODY_BYTES", 1_000)
    service = ScriptedService()
    service.on_submit = answering()
    prompt = "x" * 400
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt}
    if path == "chat/completions":
        body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}]}
    async with in_process(app_of(service)) as client:
        refused = await client.post(f"/v1/{path}", json={**body, "n": 3})
        assert refused.status_code == 413
        assert refused.json()["error"]["param"] == "n"
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200


async def test_echo_of_a_long_prompt_is_refused_before_it_is_decoded() -> None:
    service = ScriptedService()
    service.decode = None  # type: ignore[method-assign, assignment]  # not called
    async with in_process(app_of(service)) as client:
        body = {"model": "tiny", "prompt": [5] * 5_000, "echo": True}
        refused = await client.post("/v1/completions", json=body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("tier", "objective"), [("flex", "throughput"), ("auto", "latency"), (None, "latency")]
)
async def test_flexible_requests_run_in_the_background(tier: str | None, objective: str) -> None:
    service = ScriptedService()
    service.on_submit = answering()
    async with in_process(app_of(service)) as client:
        await client.post("/v1/chat/completions", json={**CHAT, "service_tier": tier})
    assert service.programs["p_1"].submission.objectives == {"answer": objective}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "No"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_unsupported_field_is_rejected_by_name(extra: dict[str, Any], param: str) -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, **extra})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert not service.programs


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [], "tool_choice": "none", "n": 1, "logprobs": False, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tools": None, "modalities": ["text"]},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 1, "stop_token_ids": [3]},
    ],
)
async def test_no_op_values_are_accepted(extra: dict[str, Any]) -> None:
    service = ScriptedService()
    service.on_submit = answering()
    async with in_process(app_of(service)) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, **extra})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "extra",
    [
        {"suffix": "x"},
        {"prompt": []},
        {"prompt": ["a", 1]},
        {"prompt": [[1], "a"]},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"echo": True, "logprobs": 1},
        {"best_of": 2},
        {"logprobs": 21},
        {"chat_template_kwargs": {"a": 1}},
    ],
)
async def test_completions_reject_unsupported_values(extra: dict[str, Any]) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        body = {"model": "tiny", "prompt": "x", **extra}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in extra


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**CHAT, "temperature": -1}, "temperature"),
        ({**CHAT, "max_tokens": 0}, "max_tokens"),
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "stop": ["x"] * 17}, "stop"),
        ({**CHAT, "n": 17}, "n"),
        ({**CHAT, "n": 0}, "n"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "logit_bias": {"5": 101}}, "logit_bias.5"),
        ({**CHAT, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({**CHAT, "response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
async def test_out_of_bounds_value_names_its_field(body: dict[str, Any], param: str) -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_model_and_field_are_rejected() -> None:
    async with in_process(app_of(ScriptedService())) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "gpt"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        answer = await client.post("/v1/chat/completions", json={**CHAT, "surprise": 1})
        assert answer.status_code == 400
        assert "surprise" in answer.json()["error"]["message"]
        answer = await client.post("/v1/chat/completions", content=b"{}")
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "request.media_type"


async def test_internal_error_has_openai_shape_without_details() -> None:
    service = ScriptedService()
    async with in_process(app_of(service)) as client:
        service.refusal = RuntimeError("canary")
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "server.internal"
    assert "canary" not in answer.text


async def test_oversized_program_is_rejected_before_acceptance() -> None:
    service = ScriptedService()
    parts = [{"type": "text", "text": "x"}] * 10_001
    async with in_process(app_of(service)) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "program.invalid"
    assert service.programs == {}


@pytest.mark.parametrize(
    ("path", "body", "is_measured"),
    [
        ("chat/completions", CHAT, True),
        ("completions", {"model": "tiny", "prompt": "Hi"}, True),
        ("chat/completions", CHAT | {"stream": True}, False),
        ("chat/completions", CHAT | {"temperature": -1}, False),
    ],
)
async def test_single_answers_are_measured(
    path: str, body: dict[str, Any], is_measured: bool
) -> None:
    service = ScriptedService()
    service.on_submit = answering()
    async with in_process(app_of(service)) as client:
        for _ in range(MIN_REQUESTS):
            await client.post(f"/v1/{path}", json=body)
    assert (sum(service.request_times.times) > 0) == is_measured


async def test_the_time_of_an_answer_begins_when_the_body_has_arrived() -> None:
    async def parts() -> AsyncIterator[bytes]:
        text = json.dumps(CHAT).encode()
        yield text[:10]
        clock.append(1000.0)
        yield text[10:]

    clock = [0.0]
    headers = {"content-type": "application/json"}
    service = ScriptedService()
    service.on_submit = answering()
    service.request_times = RequestTimeMeter(
        service.count_calls, now=lambda: clock[-1], busy=lambda: 0.0
    )
    async with in_process(app_of(service)) as client:
        for _ in range(MIN_REQUESTS):
            clock.append(0.0)
            answer = await client.post("/v1/chat/completions", content=parts(), headers=headers)
            assert answer.status_code == 200
            assert clock[-1] == 1000.0
    assert service.request_times.times == (0.0, 0.0)
    assert len(service.request_times._found) == MIN_REQUESTS
