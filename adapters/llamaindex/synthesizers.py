"""Plans of LlamaIndex's response synthesizers, for core 0.13 and 0.14.

Every planner does what the synthesizer will do, with the synthesizer's own prompts and the
same `PromptHelper`, up to where an answer decides: how the answers of a tree's level are
packed, and whether a chunk fits beside the answer that it refines. There a call is planned
under a condition that the server checks when it has the answers; where the condition is
false the app makes its calls itself.

Knows exactly the classes in `PLANNERS`: a subclass may do anything.

Kept true: what is planned is what the synthesizer asks for, call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.prompt_utils import get_biggest_prompt
from llama_index.core.response_synthesizers import (
    Accumulate,
    BaseSynthesizer,
    CompactAndRefine,
    Refine,
    SimpleSummarize,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate

from .draft import Draft, NotPlanned
from .plan import SLOT, Planned, Slot, fits, text_read

MARGIN = 8
"""Tokens by which two texts together may have more than each alone."""


def plan_tree(synthesizer: TreeSummarize, draft: Draft, query: str, texts: Sequence[str]) -> None:
    """A level of the tree, and the root above it if the answers fit into one prompt."""
    template = synthesizer._summary_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    chunks = helper.repack(template, text_chunks=texts, llm=draft.llm)
    level = list(_each(draft, template, "context_str", chunks))
    if len(level) < 2:
        return
    stripped = [{"strip": text_read(each.variable)} for each in level]
    slots = [Slot(SLOT.format(i), text) for i, text in enumerate(stripped)]
    size = helper._get_available_chunk_size(template, padding=DEFAULT_PADDING, llm=draft.llm)
    conditions = [{"ne": [text, ""]} for text in stripped]
    conditions.append(fits({"join": [stripped, "\n\n"]}, size - MARGIN))
    joined = "\n\n".join(slot.mark for slot in slots)
    draft.add(template, {"context_str": joined}, slots, level, {"and": conditions})


def plan_refine(synthesizer: Refine, draft: Draft, query: str, texts: Sequence[str]) -> None:
    """A chain of answers, each of which refines the one before, as far as chunks stay whole."""
    helper = synthesizer._prompt_helper
    first, refine = synthesizer._text_qa_template, synthesizer._refine_template
    padding = synthesizer._response_padding_size
    biggest = get_biggest_prompt([first, refine])
    chunks = [
        chunk
        for text in texts
        for chunk in helper.repack(biggest, [text], llm=draft.llm, padding=padding)
    ]
    template = first.partial_format(query_str=query)
    before = next(_each(draft, template, "context_str", chunks[:1]), None)
    empty = refine.partial_format(query_str=query, existing_answer="")
    size = helper._get_available_chunk_size(empty, padding=DEFAULT_PADDING, llm=draft.llm)
    for chunk in chunks[1:]:
        whole = chunk.strip()
        left = size - helper._token_counter.get_string_tokens(whole) - MARGIN
        if before is None or left <= 0:
            return
        answer = text_read(before.variable)
        slot = Slot(SLOT.format(0), answer)
        template = refine.partial_format(query_str=query, existing_answer=slot.mark)
        when = {"and": [{"ne": [answer, ""]}, fits(answer, left)]}
        before = draft.add(template, {"context_msg": whole}, [slot], [before], when)


def plan_compact(
    synthesizer: CompactAndRefine, draft: Draft, query: str, texts: Sequence[str]
) -> list[str]:
    """The same on chunks that fill the window, on which it calls its base class."""
    chunks = synthesizer._make_compact_text_chunks(query, texts)
    plan_refine(synthesizer, draft, query, chunks)
    return chunks


def plan_accumulate(
    synthesizer: Accumulate, draft: Draft, query: str, texts: Sequence[str]
) -> None:
    """One call per chunk."""
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    for text in texts:
        chunks = synthesizer._prompt_helper.repack(template, [text], llm=draft.llm)
        list(_each(draft, template, "context_str", chunks))


def plan_compact_accumulate(
    synthesizer: CompactAndAccumulate, draft: Draft, query: str, texts: Sequence[str]
) -> list[str]:
    """The same on chunks that fill the window, on which it calls its base class."""
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    chunks = helper.repack(template, texts, llm=draft.llm)
    plan_accumulate(synthesizer, draft, query, chunks)
    return chunks


def plan_simple(
    synthesizer: SimpleSummarize, draft: Draft, query: str, texts: Sequence[str]
) -> None:
    """One call on as much text as fits."""
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    # LlamaIndex prints this list into the prompt as it is.
    texts = helper.truncate(prompt=template, text_chunks=["\n".join(texts)], llm=draft.llm)
    draft.add(template, {"context_str": texts})


Planner: TypeAlias = Callable[[Any, Draft, str, Sequence[str]], Sequence[str] | None]
"""Plans a synthesizer's calls for a query and texts; returns the texts on which the
synthesizer calls its base class, if it does."""

PLANNERS: dict[type[BaseSynthesizer], Planner] = {
    TreeSummarize: plan_tree,
    Refine: plan_refine,
    CompactAndRefine: plan_compact,
    Accumulate: plan_accumulate,
    CompactAndAccumulate: plan_compact_accumulate,
    SimpleSummarize: plan_simple,
}
"""By exact class."""


def plan(synthesizer: Any, kind: type[Any], draft: Draft, arguments: dict[str, Any]) -> list[str]:
    """Plan what a synthesizer asks for in `get_response`.

    Args:
        synthesizer: at the beginning of its work.
        kind: its class.
        draft: gets the calls.
        arguments: of `get_response`.

    Returns:
        The texts on which it calls `get_response` of its base class; empty if it does not.

    Raises:
        NotPlanned: if what it asks for is not known, with the reason.
    """
    planner = PLANNERS.get(kind)
    if planner is None:
        raise NotPlanned(f"what a {kind.__name__} asks for is not known")
    if type(synthesizer._prompt_helper) is not PromptHelper:
        raise NotPlanned("its prompt helper is not LlamaIndex's own")
    if synthesizer._output_cls is not None:
        raise NotPlanned("its answers are structured (output_cls)")
    if getattr(synthesizer, "_structured_answer_filtering", False):
        raise NotPlanned("its answers are filtered (structured_answer_filtering)")
    if arguments.get("prev_response") is not None:
        raise NotPlanned("it goes on from an earlier response")
    extra = arguments.keys() - {"query_str", "text_chunks", "prev_response", "separator"}
    if extra:
        raise NotPlanned(f"it is called with {sorted(extra)}")
    texts = list(arguments["text_chunks"])
    return list(planner(synthesizer, draft, arguments["query_str"], texts) or [])


def _each(
    draft: Draft, template: BasePromptTemplate, name: str, chunks: Sequence[str]
) -> Iterator[Planned]:
    for chunk in chunks:
        planned = draft.add(template, {name: chunk})
        assert planned is not None  # it has no slots
        yield planned
