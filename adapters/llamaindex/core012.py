"""What is used of llama-index-core 0.12 and is gone from later cores.

Imported only where `QueryPipeline` is there. Types are checked on a later core, where these
are classes of which nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class QueryComponent:
        """A module of a pipeline."""

        def __getattr__(self, name: str) -> Any: ...

    class ArgPackComponent(QueryComponent):
        """Packs its inputs into a list."""

    class BaseStatefulComponent(QueryComponent):
        """Reads and writes the state of its pipeline."""

    class InputComponent(QueryComponent):
        """Passes its inputs on."""

    class KwargPackComponent(QueryComponent):
        """Packs its inputs into a dict."""

    class LLMChatComponent(QueryComponent):
        """Asks an LLM by `chat`."""

    class LLMCompleteComponent(QueryComponent):
        """Asks an LLM by `complete`."""

    class LoopComponent(QueryComponent):
        """Runs a pipeline until a condition holds."""

    class PromptComponent(QueryComponent):
        """Formats a prompt."""

    class QueryPipeline(QueryComponent):
        """A graph of components."""

    def validate_and_convert_stringable(value: Any) -> str:
        """A value as the text that prompts print."""
        ...

else:
    from llama_index.core.base.query_pipeline.query import (
        QueryComponent,
        validate_and_convert_stringable,
    )
    from llama_index.core.llms.llm import LLMChatComponent, LLMCompleteComponent
    from llama_index.core.prompts.base import PromptComponent
    from llama_index.core.query_pipeline import InputComponent, QueryPipeline
    from llama_index.core.query_pipeline.components.argpacks import (
        ArgPackComponent,
        KwargPackComponent,
    )
    from llama_index.core.query_pipeline.components.loop import LoopComponent
    from llama_index.core.query_pipeline.components.stateful import BaseStatefulComponent

__all__ = [
    "ArgPackComponent",
    "BaseStatefulComponent",
    "InputComponent",
    "KwargPackComponent",
    "LLMChatComponent",
    "LLMCompleteComponent",
    "LoopComponent",
    "PromptComponent",
    "QueryComponent",
    "QueryPipeline",
    "validate_and_convert_stringable",
]
