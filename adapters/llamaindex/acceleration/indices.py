"""Plans of LlamaIndex's indices that an LLM writes: summaries, keywords, and trees of summaries.

LlamaIndex makes their calls one after the other, though the summaries of documents and the keywords
of nodes do not depend on each other, nor do the summaries of one level of a tree. It opens no span
for these methods, so `add_spans` decorates them as LlamaIndex decorates others.

Only the exact classes are planned, because a subclass may behave differently. Of a large index, the
first `MAX_CALLS` calls are planned.

Invariant: the planned calls are the calls that the index makes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import islice
from typing import Any

from llama_index.core.indices.common_tree.base import GPTTreeIndexBuilder
from llama_index.core.indices.document_summary import DocumentSummaryIndex
from llama_index.core.indices.keyword_table.base import BaseKeywordTableIndex, KeywordTableIndex
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.schema import MetadataMode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index_instrumentation import get_dispatcher

from . import synthesizers
from .plan_builder import NotPlanned, PlanBuilder, checked_template
from .scope import app_class

MAX_CALLS = 1_000
"""Calls that one plan has at most: the server may have other clients, and the application waits
until the plan is made."""
KEYWORD_METHODS = ("_add_nodes_to_index", "_async_add_nodes_to_index")
"""Methods of `KeywordTableIndex` that make the calls."""
SUMMARY_METHODS = ("_add_nodes_to_index",)
"""Methods of `DocumentSummaryIndex` that make the calls."""
TREE_METHODS = ("build_index_from_nodes", "abuild_index_from_nodes")
"""Methods of `GPTTreeIndexBuilder` that make the calls of one level, and call themselves."""


def add_spans() -> None:
    """Let LlamaIndex report when these methods start. Repeated calls have no effect."""
    span = get_dispatcher(__name__).span
    for kind, names in (
        (BaseKeywordTableIndex, KEYWORD_METHODS),
        (DocumentSummaryIndex, SUMMARY_METHODS),
        (GPTTreeIndexBuilder, TREE_METHODS),
    ):
        for name in names:
            if (method := vars(kind).get(name)) is not None:
                setattr(kind, name, span(method))


def plan_keywords(
    index: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]
) -> list[str]:
    """Plan the keywords of all nodes; see `synthesizers.plan`."""
    if kind is not KeywordTableIndex:
        raise NotPlanned(f"class {kind.__name__} is not supported")
    for node in islice(arguments["nodes"], MAX_CALLS):
        text = node.get_content(metadata_mode=MetadataMode.LLM)
        builder.add(index.keyword_extract_template, {"text": text})
    return []


def plan_summaries(
    index: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]
) -> list[str]:
    """Plan the summaries of all documents; see `synthesizers.plan`."""
    synthesizer = index._response_synthesizer
    if kind is not DocumentSummaryIndex:
        raise NotPlanned(f"class {kind.__name__} is not supported")
    if synthesizer._llm is not builder.llm:
        raise NotPlanned("its response synthesizer has another LLM")
    if getattr(synthesizer, "_multimodal", False) or not isinstance(index._summary_query, str):
        raise NotPlanned("its summaries are not made from text")
    if synthesizer._streaming or synthesizer._output_cls is not None:
        raise NotPlanned("its summaries are not texts")
    documents: dict[str, list[str]] = defaultdict(list)
    for node in arguments["nodes"]:
        if node.ref_doc_id is None:
            raise NotPlanned("a node has no document")
        text = node.get_content(metadata_mode=MetadataMode.LLM)
        documents[node.ref_doc_id].append(text)
    for texts in documents.values():
        if len(builder.calls) >= MAX_CALLS:
            break
        part = {"query_str": index._summary_query, "text_chunks": texts}
        synthesizers.plan(synthesizer, app_class(synthesizer), builder, part)
    return []


def plan_tree(
    tree: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]
) -> list[str]:
    """Plan the summaries of one level; see `synthesizers.plan`."""
    if kind is not GPTTreeIndexBuilder:
        raise NotPlanned(f"class {kind.__name__} is not supported")
    if tree._use_async:
        raise NotPlanned("its calls run in parallel already (use_async)")
    if type(tree._prompt_helper) is not PromptHelper:
        raise NotPlanned("its prompt helper is not LlamaIndex's own")
    if type(tree._docstore) is not SimpleDocumentStore:
        raise NotPlanned("its documents are in another process")
    nodes = arguments["cur_node_ids"]
    if len(nodes) <= tree.num_children:
        return []
    checked_template(builder.llm, tree.summary_prompt)
    packing = copy.copy(tree)
    packing._prompt_helper = tree._prompt_helper.model_copy()
    packing._prompt_helper.__class__ = synthesizers.SpanlessTextPacker
    _, _, texts = packing._prepare_node_and_text_chunks(nodes)
    for text in texts[:MAX_CALLS]:
        builder.add(tree.summary_prompt, {"context_str": text})
    return []
