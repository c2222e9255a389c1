"""Plans of LlamaIndex's indices that an LLM writes: summaries, keywords, and trees of summaries.

LlamaIndex makes their calls one after the other, though the summaries of documents and the keywords
of nodes do not depend on each other, nor do the summaries of one level of a tree. It opens no span
for these methods, so `watch_methods` wraps them: a call inside a run is planned first.

Only the exact classes are planned, because a subclass may behave differently. Of a large index, the
first `MAX_CALLS` calls are planned.

Invariant: the planned calls are the calls that the index makes.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeAlias

from llama_index.core.indices.common_tree.base import GPTTreeIndexBuilder
from llama_index.core.indices.document_summary import DocumentSummaryIndex
from llama_index.core.indices.keyword_table.base import BaseKeywordTableIndex, KeywordTableIndex
from llama_index.core.schema import MetadataMode
from llama_index.core.storage.docstore import SimpleDocumentStore

from . import synthesizers
from .plan_builder import NotPlanned, PlanBuilder, checked_template
from .scope import app_class

MAX_CALLS = 1_000
"""Calls that one plan has at most: the server may have other clients, and the application waits
until the plan is made."""
IndexPlanner: TypeAlias = Callable[[Any, PlanBuilder, dict[str, Any]], None]
"""Plans the calls that a method makes with these arguments."""
MethodPlanner: TypeAlias = Callable[[Any, Callable[..., Any], Any, Any], None]
"""Plans a method inside a run: instance, method, arguments by position and by name."""
_IS_WATCHED = "__conure_watched__"
"""Attribute of a method that is planned before it runs."""


def plan_keywords(
    index: KeywordTableIndex, builder: PlanBuilder, arguments: dict[str, Any]
) -> None:
    """Plan the keywords of all nodes."""
    for node in islice(arguments["nodes"], MAX_CALLS):
        text = node.get_content(metadata_mode=MetadataMode.LLM)
        builder.add(index.keyword_extract_template, {"text": text})


def plan_summaries(
    index: DocumentSummaryIndex, builder: PlanBuilder, arguments: dict[str, Any]
) -> None:
    """Plan the summaries of all documents."""
    synthesizer = index._response_synthesizer
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


def plan_level(tree: GPTTreeIndexBuilder, builder: PlanBuilder, arguments: dict[str, Any]) -> None:
    """Plan the summaries of one level."""
    if tree._use_async:
        raise NotPlanned("its calls run in parallel already (use_async)")
    if type(tree._docstore) is not SimpleDocumentStore:
        raise NotPlanned("its documents are in another process")
    nodes = arguments["cur_node_ids"]
    if len(nodes) <= tree.num_children:
        return
    checked_template(builder.llm, tree.summary_prompt)
    packing = synthesizers.without_spans(tree)
    _, _, texts = packing._prepare_node_and_text_chunks(nodes)
    for text in texts[:MAX_CALLS]:
        builder.add(tree.summary_prompt, {"context_str": text})


PLANNERS: dict[type[Any], IndexPlanner] = {
    KeywordTableIndex: plan_keywords,
    DocumentSummaryIndex: plan_summaries,
    GPTTreeIndexBuilder: plan_level,
}
"""The planner of each class; subclasses have none."""

METHODS: dict[type[Any], tuple[str, ...]] = {
    KeywordTableIndex: ("_add_nodes_to_index", "_async_add_nodes_to_index"),
    DocumentSummaryIndex: ("_add_nodes_to_index",),
    GPTTreeIndexBuilder: ("build_index_from_nodes", "abuild_index_from_nodes"),
}
"""The methods of each class that make the calls. Those of a tree call themselves for each level."""

_OWNERS: dict[type[Any], type[Any]] = {KeywordTableIndex: BaseKeywordTableIndex}
"""The class that defines the methods, if it is another one."""


def plan(index: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]) -> list[str]:
    """Plan the calls of a method of an index; see `synthesizers.plan`."""
    planner = PLANNERS.get(kind)
    if planner is None:
        raise NotPlanned(f"class {kind.__name__} is not supported")
    planner(index, builder, arguments)
    return []


def watch_methods(plan_method: MethodPlanner) -> None:
    """Plan these methods before they run. Repeated calls have no effect."""
    for kind, names in METHODS.items():
        owner = _OWNERS.get(kind, kind)
        for name in names:
            method = vars(owner).get(name)
            if method is not None and not hasattr(method, _IS_WATCHED):
                setattr(owner, name, _planned_first(method, plan_method))


def _planned_first(method: Callable[..., Any], plan_method: MethodPlanner) -> Callable[..., Any]:
    """Return the method, which is planned before it runs."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(self: Any, *args: Any, **kwargs: Any) -> Any:
            plan_method(self, method, args, kwargs)
            return await method(self, *args, **kwargs)

        watched: Callable[..., Any] = awaited
    else:

        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            plan_method(self, method, args, kwargs)
            return method(self, *args, **kwargs)

        watched = called
    setattr(watched, _IS_WATCHED, True)
    return watched
