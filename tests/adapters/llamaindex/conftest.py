"""Fixtures for LlamaIndex; without LlamaIndex only `test_installed` is collected."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("llama_index") is None:
    collect_ignore_glob = ["test_[!i]*.py", "pipeline/*"]
else:
    from .conformance import events, make_llm

    __all__ = ["events", "make_llm"]
