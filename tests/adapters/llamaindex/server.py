"""A server on the scripted engine, in this process, and LlamaIndex LLMs on it, as fixtures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure
from conure.server.app import create_app
from conure.server.config import Config


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    config = Config(engine="fake", data=tmp_path_factory.mktemp("data"))
    with Client(app=create_app(config)) as made:
        yield made


@pytest.fixture
async def make_llm(client: Client) -> AsyncIterator[Callable[..., Conure]]:
    """Makes LLMs on the server, and closes the connections that they open in the test's loop."""
    made: list[Conure] = []

    def make(**settings: Any) -> Conure:
        llm = Conure(**{"client": client, "temperature": 0, "max_tokens": 40, **settings})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        await llm._own.aclose()
