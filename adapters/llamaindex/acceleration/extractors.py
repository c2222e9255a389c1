"""Plans of LlamaIndex's metadata extractors.

Only the exact classes in `PLANNERS` are planned. Their calls are independent of each other, except
for titles: the title of a document is made from candidates, one for each node. LlamaIndex makes
independent calls four at a time, and the candidates of a document one after the other.

Invariant: the planned calls are the calls that the extractor makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.extractors import (
    BaseExtractor,
    DocumentContextExtractor,
    KeywordExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import BaseNode, Document, Node, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore

from .plan_builder import NotPlanned, PlanBuilder
from .prompt_inputs import text_read


def plan_titles(extractor: TitleExtractor, builder: PlanBuilder, nodes: Sequence[BaseNode]) -> None:
    """Plan a candidate for each node, and a title for each document."""
    one = PromptTemplate(template=extractor.node_template)
    combined = PromptTemplate(template=extractor.combine_template)
    for document in extractor.separate_nodes_by_ref_id(nodes).values():
        candidates = [builder.add(one, {"context_str": _text_or_raise(node)}) for node in document]
        known = [each for each in candidates if each is not None]
        inputs = [builder.placeholder(text_read(each.variable)) for each in known]
        joined = ", ".join(each.placeholder for each in inputs)
        builder.add(combined, {"context_str": joined}, inputs, known)


def plan_keywords(
    extractor: KeywordExtractor, builder: PlanBuilder, nodes: Sequence[BaseNode]
) -> None:
    """Plan one call per node."""
    template = PromptTemplate(template=extractor.prompt_template)
    for node in _used_nodes(extractor, nodes):
        text = node.get_content(metadata_mode=extractor.metadata_mode)
        builder.add(template, {"keywords": extractor.keywords, "context_str": text})


def plan_questions(
    extractor: QuestionsAnsweredExtractor, builder: PlanBuilder, nodes: Sequence[BaseNode]
) -> None:
    """Plan one call per node."""
    template = PromptTemplate(template=extractor.prompt_template)
    for node in _used_nodes(extractor, nodes):
        text = node.get_content(metadata_mode=extractor.metadata_mode)
        builder.add(template, {"num_questions": extractor.questions, "context_str": text})


def plan_summaries(
    extractor: SummaryExtractor, builder: PlanBuilder, nodes: Sequence[BaseNode]
) -> None:
    """Plan one call per node."""
    template = PromptTemplate(template=extractor.prompt_template)
    for node in nodes:
        text = _text_node(node).get_content(metadata_mode=extractor.metadata_mode)
        builder.add(template, {"context_str": text})


def plan_contexts(
    extractor: DocumentContextExtractor, builder: PlanBuilder, nodes: Sequence[BaseNode]
) -> None:
    """Plan one call per node whose document is stored in this process."""
    if type(extractor.docstore) is not SimpleDocumentStore:
        raise NotPlanned("its documents are in another process")
    for node in nodes:
        source = node.source_node
        if (
            source is None
            or not isinstance(node, Node | TextNode)
            or extractor.key in node.metadata
        ):
            continue
        document = extractor.docstore.get_document(source.node_id, raise_error=False)
        if not isinstance(document, Node | TextNode):
            continue
        _check_length(extractor, document)
        texts = (
            f"<document>{document.get_content()}</document>",
            "Here is the chunk we want to situate within the whole document:\n"
            f"<chunk>{node.get_content()}</chunk>\n{extractor.prompt}",
        )
        messages = [ChatMessage(role=MessageRole.USER, content=text) for text in texts]
        options = {"max_tokens": extractor.max_output_tokens}
        builder.add_request(builder.llm.chat_request(messages, options))


def _check_length(extractor: DocumentContextExtractor, document: BaseNode) -> None:
    """Raise `NotPlanned` if the extractor refuses a document of this length."""
    if extractor.oversized_document_strategy != "error" or extractor.max_context_length is None:
        return
    # LlamaIndex caches the count by text, and will need it.
    if extractor._count_tokens(document.get_content()) > extractor.max_context_length:
        raise NotPlanned("a document is longer than its max_context_length")


PLANNERS: dict[type[BaseExtractor], Callable[[Any, PlanBuilder, Sequence[BaseNode]], None]] = {
    TitleExtractor: plan_titles,
    KeywordExtractor: plan_keywords,
    QuestionsAnsweredExtractor: plan_questions,
    SummaryExtractor: plan_summaries,
    DocumentContextExtractor: plan_contexts,
}
"""The planner of each class; subclasses have none."""


def plan(
    extractor: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]
) -> list[str]:
    """Plan the calls of an extractor in `aextract`; see `synthesizers.plan`."""
    planner = PLANNERS.get(kind)
    if planner is None:
        raise NotPlanned(f"class {kind.__name__} is not supported")
    planner(extractor, builder, arguments["nodes"])
    return []


def _used_nodes(extractor: Any, nodes: Sequence[BaseNode]) -> list[BaseNode]:
    return [node for node in nodes if isinstance(node, TextNode) or not extractor.is_text_node_only]


def _text_or_raise(node: BaseNode) -> str:
    if not isinstance(node, TextNode | Document):
        raise NotPlanned(f"a {type(node).__name__} has no text")
    return node.text


def _text_node(node: BaseNode) -> TextNode:
    if not isinstance(node, TextNode):
        raise NotPlanned(f"a {type(node).__name__} has no text")
    return node
