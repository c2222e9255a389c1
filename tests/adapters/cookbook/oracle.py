"""An LLM that computes the scripted engine's answers in this process, without a server.

Its answers are the truth that apps on a server are compared with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM

from conure.engine.testing.scripted_runner import default_text
from conure.engine.text.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_IDS

_TEMPLATE = jinja2.Environment().from_string(CHAT_TEMPLATE)
_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_IDS)) + ")")


class OracleLLM(LLM):
    """Answers as the scripted engine does."""

    script: list[dict[str, str]] = Field(default_factory=list)
    """Entries with `match` and `text`, as of a script file."""
    context_window: int
    max_tokens: int

    @classmethod
    def class_name(cls) -> str:
        return "oracle_llm"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name="oracle",
            system_role=MessageRole.SYSTEM,
        )

    def answer(self, messages: Sequence[ChatMessage]) -> str:
        """Return the answer to a chat."""
        turns = [{"role": each.role.value, "content": each.content or ""} for each in messages]
        prompt = _TEMPLATE.render(messages=turns, tools=None, add_generation_prompt=True)
        for entry in self.script:
            if re.search(entry["match"], prompt, re.DOTALL):
                return entry["text"]
        ids: list[int] = []
        for part in _SPECIAL.split(prompt):
            ids += [SPECIAL_IDS[part]] if part in SPECIAL_IDS else part.encode()
        return default_text(ids)

    def _chat_response(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        content = self.answer(messages)
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=content))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._chat_response(messages)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._chat_response(messages)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self.answer([ChatMessage(content=prompt)]))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return CompletionResponse(text=self.answer([ChatMessage(content=prompt)]))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        raise NotImplementedError

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        raise NotImplementedError

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        raise NotImplementedError

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        raise NotImplementedError
