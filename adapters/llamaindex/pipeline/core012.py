"""Names of llama-index-core 0.12 that later cores lack.

Importable only where `QueryPipeline` exists. Type checkers run with a later core, which lacks these
classes, so stand-ins with attributes of any type are declared for them.
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
        """Passes its inputs through."""

    class KwargPackComponent(QueryComponent):
        """Packs its inputs into a dict."""

    class LLMChatComponent(QueryComponent):
        """Calls `chat` of an LLM."""

    class LLMCompleteComponent(QueryComponent):
        """Calls `complete` of an LLM."""

    class LoopComponent(QueryComponent):
        """Runs a pipeline until a condition holds."""

    class PromptComponent(QueryComponent):
        """Formats a prompt."""

    class QueryPipeline(QueryComponent):
        """A graph of components."""

    class RouterComponent(QueryComponent):
        """Runs the component that a selector chooses."""

    def validate_and_convert_stringable(value: Any) -> str:
        """Return a value as text for prompts."""
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
    from llama_index.core.query_pipeline.components.router import RouterComponent
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
    "RouterComponent",
    "validate_and_convert_stringable",
]
