"""Plans of LlamaIndex's metadata extractors, for core 0.13 and 0.14.

Knows exactly the classes in `PLANNERS`, with the prompts and texts that they use. All but
titles are calls side by side, which LlamaIndex makes four at a time; a title is made of the
candidates that its document's nodes are asked for one after the other.

Kept true: what is planned is what the extractor asks for, call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.extractors import (
    BaseExtractor,
    KeywordExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import BaseNode, Document, TextNode

from .draft import Draft, NotPlanned
from .plan import text_read


def plan_titles(extractor: TitleExtractor, draft: Draft, nodes: Sequence[BaseNode]) -> None:
    """Candidates of a document's nodes, and its title made of them."""
    one = PromptTemplate(template=extractor.node_template)
    combined = PromptTemplate(template=extractor.combine_template)
    for document in extractor.separate_nodes_by_ref_id(nodes).values():
        candidates = [draft.add(one, {"context_str": _text_of(node)}) for node in document]
        known = [each for each in candidates if each is not None]
        slots = [draft.slot(text_read(each.variable)) for each in known]
        joined = ", ".join(slot.mark for slot in slots)
        draft.add(combined, {"context_str": joined}, slots, known)


def plan_keywords(extractor: KeywordExtractor, draft: Draft, nodes: Sequence[BaseNode]) -> None:
    """One call per node."""
    template = PromptTemplate(template=extractor.prompt_template)
    for node in _text_nodes(extractor, nodes):
        text = node.get_content(metadata_mode=extractor.metadata_mode)
        draft.add(template, {"keywords": extractor.keywords, "context_str": text})


def plan_questions(
    extractor: QuestionsAnsweredExtractor, draft: Draft, nodes: Sequence[BaseNode]
) -> None:
    """One call per node."""
    template = PromptTemplate(template=extractor.prompt_template)
    for node in _text_nodes(extractor, nodes):
        text = node.get_content(metadata_mode=extractor.metadata_mode)
        draft.add(template, {"num_questions": extractor.questions, "context_str": text})


def plan_summaries(extractor: SummaryExtractor, draft: Draft, nodes: Sequence[BaseNode]) -> None:
    """One call per node."""
    template = PromptTemplate(template=extractor.prompt_template)
    for node in nodes:
        text = _text_node(node).get_content(metadata_mode=extractor.metadata_mode)
        draft.add(template, {"context_str": text})


PLANNERS: dict[type[BaseExtractor], Callable[[Any, Draft, Sequence[BaseNode]], None]] = {
    TitleExtractor: plan_titles,
    KeywordExtractor: plan_keywords,
    QuestionsAnsweredExtractor: plan_questions,
    SummaryExtractor: plan_summaries,
}
"""By exact class."""


def plan(extractor: Any, kind: type[Any], draft: Draft, arguments: dict[str, Any]) -> list[str]:
    """Plan what an extractor asks for in `aextract`; see `synthesizers.plan`."""
    planner = PLANNERS.get(kind)
    if planner is None:
        raise NotPlanned(f"what a {kind.__name__} asks for is not known")
    planner(extractor, draft, arguments["nodes"])
    return []


def _text_nodes(extractor: Any, nodes: Sequence[BaseNode]) -> list[BaseNode]:
    return [node for node in nodes if isinstance(node, TextNode) or not extractor.is_text_node_only]


def _text_of(node: BaseNode) -> str:
    if not isinstance(node, TextNode | Document):
        raise NotPlanned(f"a {type(node).__name__} has no text")
    return node.text


def _text_node(node: BaseNode) -> TextNode:
    if not isinstance(node, TextNode):
        raise NotPlanned(f"a {type(node).__name__} has no text")
    return node
