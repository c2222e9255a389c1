"""LlamaIndex LLMs on a server, as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure


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
