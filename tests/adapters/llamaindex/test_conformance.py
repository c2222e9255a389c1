"""`Conure` (chat and completion) and LlamaIndex's `MockLLM` pass the conformance tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.llms import MockLLM

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure
from conure.server.app import create_app
from conure.server.config import Config

from .conformance import CONCURRENT, STREAMS_STRUCTURED, LLMConformance


class Together:
    """An application whose programs are submitted only when a number of them wait."""

    def __init__(self, app: Any, number: int) -> None:
        self._app = app
        self._barrier = asyncio.Barrier(number)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            # Longer than any machine needs to send the requests: calls one after the other fail.
            await asyncio.wait_for(self._barrier.wait(), 60)
        await self._app(scope, receive, send)


class TestChat(LLMConformance):
    streams_structured = STREAMS_STRUCTURED

    @pytest.fixture
    def llm(self, make_llm: Callable[..., Any]) -> Any:
        return make_llm()

    @pytest.fixture
    async def patient_llm(self, tmp_path: Path) -> AsyncIterator[Conure]:
        app = Together(create_app(Config(engine="fake", data=tmp_path)), CONCURRENT)
        with Client(app=app) as client:
            llm = Conure(client=client, temperature=0, max_retries=0)
            yield llm
            await llm._clients.aclose()


class TestCompletion(LLMConformance):
    streams_structured = STREAMS_STRUCTURED

    @pytest.fixture
    def llm(self, make_llm: Callable[..., Any]) -> Any:
        return make_llm(is_chat_model=False)


class TestMock(LLMConformance):
    is_async = False
    has_own_chat = False
    pieces_grow = False
    has_counts = False
    is_held_to_schemas = False
    streams_structured = False

    @pytest.fixture
    def llm(self) -> Any:
        return MockLLM()
