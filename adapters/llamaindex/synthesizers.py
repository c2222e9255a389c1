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
    Generation,
    Refine,
    SimpleSummarize,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate

from .draft import Draft, NotPlanned, plain
from .plan import Planned, fits, text_read

MARGIN = 8
"""Tokens by which two texts together may have more than each alone."""


def plan_tree(synthesizer: TreeSummarize, draft: Draft, query: str, texts: Sequence[str]) -> None:
    """A level of the tree, and the root above it if the answers fit into one prompt.

    Where answers are structured, what is made of one of them is the app's.
    """
    plain(draft.llm, synthesizer._summary_template)
    template = synthesizer._summary_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    chunks = helper.repack(template, text_chunks=texts, llm=draft.llm)
    level = list(_each(draft, template, "context_str", chunks))
    if len(level) < 2 or synthesizer._output_cls is not None:
        return
    stripped = [{"strip": text_read(each.variable)} for each in level]
    slots = [draft.slot(text) for text in stripped]
    size = helper._get_available_chunk_size(template, padding=DEFAULT_PADDING, llm=draft.llm)
    conditions = [{"ne": [text, ""]} for text in stripped]
    conditions.append(fits({"join": [stripped, "\n\n"]}, size - MARGIN))
    joined = "\n\n".join(slot.mark for slot in slots)
    draft.add(template, {"context_str": joined}, slots, level, {"and": conditions})


def plan_refine(synthesizer: Refine, draft: Draft, query: str, texts: Sequence[str]) -> None:
    """A chain of answers, each of which refines the one before, as far as chunks stay whole."""
    helper = synthesizer._prompt_helper
    first, refine = synthesizer._text_qa_template, synthesizer._refine_template
    plain(draft.llm, first)
    plain(draft.llm, refine)
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
        slot = draft.slot(answer)
        template = refine.partial_format(query_str=query, existing_answer=slot.mark)
        when = {"and": [{"ne": [answer, ""]}, fits(answer, left)]}
        before = draft.add(template, {"context_msg": whole}, [slot], [before], when)


def plan_compact(
    synthesizer: CompactAndRefine, draft: Draft, query: str, texts: Sequence[str]
) -> list[str]:
    """The same on chunks that fill the window, on which it calls its base class."""
    plain(draft.llm, synthesizer._text_qa_template)
    plain(draft.llm, synthesizer._refine_template)
    chunks = synthesizer._make_compact_text_chunks(query, texts)
    plan_refine(synthesizer, draft, query, chunks)
    return chunks


def plan_accumulate(
    synthesizer: Accumulate, draft: Draft, query: str, texts: Sequence[str]
) -> None:
    """One call per chunk."""
    plain(draft.llm, synthesizer._text_qa_template)
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    for text in texts:
        chunks = synthesizer._prompt_helper.repack(template, [text], llm=draft.llm)
        list(_each(draft, template, "context_str", chunks))


def plan_compact_accumulate(
    synthesizer: CompactAndAccumulate, draft: Draft, query: str, texts: Sequence[str]
) -> list[str]:
    """The same on chunks that fill the window, on which it calls its base class."""
    plain(draft.llm, synthesizer._text_qa_template)
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    chunks = helper.repack(template, texts, llm=draft.llm)
    plan_accumulate(synthesizer, draft, query, chunks)
    return chunks


def plan_simple(
    synthesizer: SimpleSummarize, draft: Draft, query: str, texts: Sequence[str]
) -> None:
    """One call on as much text as fits."""
    plain(draft.llm, synthesizer._text_qa_template)
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    # LlamaIndex prints this list into the prompt as it is.
    texts = helper.truncate(prompt=template, text_chunks=["\n".join(texts)], llm=draft.llm)
    draft.add(template, {"context_str": texts})


def plan_generation(
    synthesizer: Generation, draft: Draft, query: str, texts: Sequence[str]
) -> None:
    """One call on the query alone."""
    draft.add(synthesizer._input_prompt, {"query_str": query})


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
    Generation: plan_generation,
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
    if getattr(synthesizer, "_structured_answer_filtering", False):
        raise NotPlanned("its answers are filtered (structured_answer_filtering)")
    if synthesizer._streaming and issubclass(kind, Accumulate):
        raise NotPlanned("it cannot stream")
    draft.output_cls = synthesizer._output_cls
    if draft.output_cls is not None and (synthesizer._streaming or issubclass(kind, Refine)):
        raise NotPlanned("what it makes of structured answers (output_cls) is not known")
    if arguments.get("prev_response") is not None:
        raise NotPlanned("it goes on from an earlier response")
    own = {"query_str", "text_chunks", "prev_response"}
    own |= {"separator"} if issubclass(kind, Accumulate) else set()
    draft.prompt_args = {name: arguments[name] for name in arguments.keys() - own}
    if not all(isinstance(each, str | int | float) for each in draft.prompt_args.values()):
        raise NotPlanned(f"it is called with {sorted(draft.prompt_args)}")
    texts = list(arguments["text_chunks"])
    return list(planner(synthesizer, draft, arguments["query_str"], texts) or [])


def _each(
    draft: Draft, template: BasePromptTemplate, name: str, chunks: Sequence[str]
) -> Iterator[Planned]:
    for chunk in chunks:
        planned = draft.add(template, {name: chunk})
        assert planned is not None  # it has no slots
        yield planned
