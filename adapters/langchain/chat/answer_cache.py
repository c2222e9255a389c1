"""LangChain's cache without answers whose parser raises.

A call of `with_structured_output` returns an answer that was cut or is invalid, and its parser
raises. From a cache, each retry would get the same answer.
"""

from __future__ import annotations

from typing import Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.outputs import ChatGeneration

from .answer_chunks import INVALID


def cache_of(given: BaseCache | bool | None) -> BaseCache | None:
    """Return the cache that a model with this field `cache` uses."""
    if isinstance(given, BaseCache):
        return given
    return None if given is False else get_llm_cache()


class CompleteAnswerCache(BaseCache):
    """Stores only answers that are complete and valid in another cache."""

    def __init__(self, cache: BaseCache) -> None:
        self._cache = cache

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """Return the stored answers, if any."""
        return self._cache.lookup(prompt, llm_string)

    async def alookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """`lookup`, with await."""
        return await self._cache.alookup(prompt, llm_string)

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Store answers if all are complete and valid."""
        if all(map(_is_complete, return_val)):
            self._cache.update(prompt, llm_string, return_val)

    async def aupdate(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """`update`, with await."""
        if all(map(_is_complete, return_val)):
            await self._cache.aupdate(prompt, llm_string, return_val)

    def clear(self, **kwargs: Any) -> None:
        """Clear the other cache."""
        self._cache.clear(**kwargs)


def _is_complete(answer: object) -> bool:
    assert isinstance(answer, ChatGeneration)
    return answer.message.response_metadata.get("finish_reason") not in (INVALID, "length")
