"""Conure for LangChain: a chat model, and whole chains on one server.

Re-exports `conure.adapters.langchain`. `register` makes the provider `conure` known to LangChain's
`init_chat_model` and `create_agent`.
"""

from __future__ import annotations

import importlib
from typing import Any

from conure.adapters.langchain import (
    Accelerated,
    ChainOutcome,
    ChatConure,
    CompiledChain,
    ConureEmbeddings,
    Explanation,
    accelerate,
    to_program,
)

__all__ = [
    "Accelerated",
    "ChainOutcome",
    "ChatConure",
    "CompiledChain",
    "ConureEmbeddings",
    "Explanation",
    "accelerate",
    "register",
    "to_program",
]

PROVIDER = "conure"


def register() -> None:
    """Make `init_chat_model("conure:MODEL")` and `create_agent("conure:MODEL")` work.

    LangChain has a fixed table of providers; this adds one entry. Call it once, where the
    application starts.

    Raises:
        ImportError: if `langchain` is not installed.
        RuntimeError: if this version of `langchain` has another table.
    """
    module: Any = importlib.import_module("langchain.chat_models.base")
    table = getattr(module, "_BUILTIN_PROVIDERS", None)
    if not isinstance(table, dict):
        raise RuntimeError(
            "this version of langchain has no table of providers; pass ChatConure(...) itself"
        )
    table[PROVIDER] = ("langchain_conure", "ChatConure", _create)


def _create(cls: type[ChatConure], **settings: Any) -> ChatConure:
    return cls(**settings)
