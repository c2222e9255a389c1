"""One rule for the address of a server, for every client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import openai
import pytest
import uvicorn

from conure.adapters.client import AsyncClient, Client, ServerUnreachableError
from conure.adapters.langchain import ChatConure, ConureEmbeddings
from conure.adapters.llamaindex import Conure, ConureEmbedding
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ProgramError

PREFIX = "/team/llm"


class Proxy:
    """An application that serves another one below a path, as a reverse proxy does."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert scope["path"].startswith(f"{PREFIX}/v1/"), scope["path"]
            path = scope["path"].removeprefix(PREFIX)
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server behind a proxy, without a final slash."""
    app = Proxy(create_app(Config(engine="fake", data=tmp_path_factory.mktemp("data"))))
    config = uvicorn.Config(app, port=0, ws="none", lifespan="on", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}{PREFIX}"
    server.should_exit = True
    thread.join()


def models(url: str | None) -> None:
    with Client(url) as client:
        assert client.models()


def models_awaited(url: str | None) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client:
            assert await client.models()

    asyncio.run(run())


def program(url: str | None) -> None:
    prompt = [{"text": "a "}, {"output": "b", "max_tokens": 4}]
    nodes = [{"id": "n", "op": "generate", "prompt": prompt}]
    with Client(url) as client:
        assert client.run({"nodes": nodes, "outputs": ["b"]}).outputs["b"]


def langchain(url: str | None) -> None:
    assert ChatConure(base_url=url, max_tokens=4).invoke("hi").content


def langchain_embeddings(url: str | None) -> None:
    ConureEmbeddings(base_url=url).embed_query("hi")


def llamaindex(url: str | None) -> None:
    assert Conure(base_url=url, max_tokens=4).complete("hi").text


def llamaindex_embedding(url: str | None) -> None:
    ConureEmbedding(base_url=url).get_query_embedding("hi")


ASKING: tuple[Callable[[str | None], None], ...] = (
    *(models, models_awaited, program, langchain, llamaindex),
)
ALL = (*ASKING, langchain_embeddings, llamaindex_embedding)
WRONG = {
    "localhost:8400": "does not begin with http:// or https://; write for example "
    "http://localhost:8400$",
    "unix:///run/conure.sock": "does not begin with http",
    "http://": "no valid host name",
    "http://a b:8400": "no valid host name",
    "http://host:port": "Invalid port",
    "http://host:84000": "port is not between 1 and 65,535",
    "http://host:8400?key=1": "a query or a fragment; write for example http://host:8400$",
    "https://host:8400/llm/v1/chat/completions": "/v1/chat/completions is a route of it; "
    "write for example https://host:8400/llm$",
}


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host:8400/v1/models",
        "https://user:sec'secret@host:8400/v1/models",
        "user:secret@host:8400",
        "https://user:se cret secret@host:bad",
        "https://user:p@secret@host:bad",
        "https://user:x/secret@host:8400?a",
    ],
)
def test_no_message_shows_the_password_of_an_address(url: str) -> None:
    with pytest.raises(ProgramError, match="host:") as caught:
        Client(url)
    assert "cret" not in caught.value.message
    assert "user" not in caught.value.message


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("ask", ASKING)
def test_every_form_of_an_address_behind_a_proxy_works(
    ask: Callable[[str | None], None], ending: str, proxy: str
) -> None:
    ask(f"{proxy}{ending}")


@pytest.mark.parametrize("ending", ["/v1", "/v1/"])
def test_openai_client_works_behind_a_proxy(ending: str, proxy: str) -> None:
    with openai.OpenAI(base_url=f"{proxy}{ending}", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["fake"]


@pytest.mark.parametrize("ask", ASKING)
def test_the_address_comes_from_the_environment(
    ask: Callable[[str | None], None], proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONURE_URL", f"{proxy}/v1/")
    ask(None)


@pytest.mark.parametrize("ask", ALL)
@pytest.mark.parametrize("url", list(WRONG))
def test_a_wrong_address_gets_one_sentence(
    url: str, ask: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProgramError, match=f"^base_url .*{WRONG[url]}") as caught:
        ask(url)
    assert (caught.value.code, "\n" in caught.value.message) == ("client.base_url", False)
    monkeypatch.setenv("CONURE_URL", url)
    with pytest.raises(ProgramError, match=f"^the environment variable CONURE_URL .*{WRONG[url]}"):
        ask(None)


def test_a_path_that_contains_v1_is_an_address() -> None:
    with Client("https://gateway/v1/llm/v1") as client:
        assert client.server == "https://gateway/v1/llm"


def test_a_password_in_an_address_is_not_shown() -> None:
    url = "http://me:secret@127.0.0.1:9"
    with (
        pytest.raises(ServerUnreachableError) as caught,
        Client(url, timeout_s=0.01) as client,
    ):
        client.models()
    assert "secret" not in caught.value.message
    assert "http://127.0.0.1:9" in caught.value.message
