"""LlamaIndex LLMs on a server, as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure


@pytest.fixture
async def make_llm(client: Client) -> AsyncIterator[Callable[..., Conure]]:
    """Return a factory of LLMs; close their connections in the test's event loop."""
    made: list[Conure] = []

    def make(**settings: Any) -> Conure:
        llm = Conure(**{"client": client, "temperature": 0, "max_tokens": 40, **settings})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        await llm._clients.aclose()
