"""`/v1/tokenize` counts what a call sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conure.adapters.client import Client
from conure.adapters.client.local_app import SyncTransport
from conure.server.app import create_app
from conure.server.config import Config

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(app=create_app(Config(engine="fake", data=tmp_path_factory.mktemp("d")))) as client:
        yield client


@pytest.fixture
def http(client: Client) -> Iterator[httpx.Client]:
    local = client._settings.local_app
    assert local is not None
    with httpx.Client(transport=SyncTransport(local), base_url="http://127.0.0.1") as http:
        yield http


def test_text_is_counted_without_special_tokens(client: Client, http: httpx.Client) -> None:
    reply = http.post("/v1/tokenize", json={"prompt": "hello"}).json()
    assert reply["count"] == len(reply["tokens"]) == len("hello")
    assert reply["tokens"] == client.tokenize("hello")
    assert reply["max_model_len"] == client.models()[0]["max_model_len"]


def test_messages_are_counted_as_a_call_sends_them(client: Client) -> None:
    node: dict[str, Any] = {"id": "n", "op": "generate", "messages": MESSAGES}
    node["output"] = {"variable": "x", "as": "message", "max_tokens": 1}
    value: Any = client.run({"nodes": [node], "outputs": ["x"]}).outputs["x"]
    assert len(client.tokenize(MESSAGES)) == value["usage"]["prompt_tokens"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}])
def test_prompt_is_given_once(http: httpx.Client, body: Any) -> None:
    reply = http.post("/v1/tokenize", json=body)
    assert reply.status_code == 400
    assert "either 'prompt' or 'messages'" in reply.json()["detail"]


def test_unknown_model_is_refused(http: httpx.Client) -> None:
    reply = http.post("/v1/tokenize", json={"prompt": "a", "model": "gpt"})
    assert (reply.status_code, reply.json()["code"]) == (400, "model.unknown")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"content": []}, "program.segment"),
        ({"role": "user"}, "program.segment"),
        ({"splice": "history"}, "tokenize.prompt"),
        ({"role": "user", "content": [{"input": "x"}]}, "tokenize.prompt"),
        ({"role": "user", "content": [{"output": "x"}]}, "program.segment"),
    ],
)
def test_messages_are_checked_as_those_of_a_call(
    http: httpx.Client, message: Any, code: str
) -> None:
    reply = http.post("/v1/tokenize", json={"messages": [message]})
    assert (reply.status_code, reply.json()["code"]) == (400, code)
    assert reply.json()["path"].startswith("messages")
