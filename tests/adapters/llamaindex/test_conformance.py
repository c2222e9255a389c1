"""`Conure` (chat and completion) and LlamaIndex's `MockLLM` pass the conformance tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.llms import MockLLM

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure
from conure.server.app import create_app
from conure.server.config import Config

from .conformance import STREAMS_STRUCTURED, LLMConformance


class TestChat(LLMConformance):
    streams_structured = STREAMS_STRUCTURED

    @pytest.fixture
    def llm(self, make_llm: Callable[..., Any]) -> Any:
        return make_llm()

    @pytest.fixture
    async def slow_llm(self, tmp_path: Path) -> AsyncIterator[Conure]:
        config = Config(engine="fake", data=tmp_path, time_per_call=0.05)
        with Client(app=create_app(config)) as client:
            llm = Conure(client=client, temperature=0)
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
