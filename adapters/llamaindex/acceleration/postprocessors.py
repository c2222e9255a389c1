"""Plans of LlamaIndex's node postprocessors that call a model.

Only the exact class `LLMRerank` is planned. Its calls, one per batch of nodes, are independent;
LlamaIndex makes them one after the other.

Invariant: the planned calls are the calls that the postprocessor makes.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.indices import utils
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.schema import TextNode

from .plan_builder import NotPlanned, PlanBuilder

_FORMATTERS = ("default_format_node_batch_fn", "default_format_node_batch_for_chat_fn")
"""LlamaIndex's functions for the text of a batch; cores before 0.14.22 have the first one only."""


def plan(
    reranker: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]
) -> list[str]:
    """Plan the calls of a postprocessor in `_postprocess_nodes`; see `synthesizers.plan`."""
    query = arguments.get("query_bundle")
    if kind is not LLMRerank or query is None:
        return []
    format_batch: Any = reranker._format_node_batch_fn
    known = [id(getattr(utils, name, None)) for name in _FORMATTERS]
    if id(format_batch) not in known:
        raise NotPlanned("it formats nodes with a custom function")
    nodes = [found.node for found in arguments["nodes"]]
    if not all(type(node) is TextNode for node in nodes):
        raise NotPlanned("its nodes are not all text")
    size = reranker.choice_batch_size
    for start in range(0, len(nodes), size):
        batch = format_batch(nodes[start : start + size])
        name = "context_str" if isinstance(batch, str) else "context_messages"
        builder.add(reranker.choice_select_prompt, {name: batch, "query_str": query.query_str})
    return []
