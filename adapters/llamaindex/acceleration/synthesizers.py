"""Plans of LlamaIndex's response synthesizers.

A planner repeats the work of the synthesizer, with its prompts and its `PromptHelper`, until an
answer decides: how the answers of a tree level are packed, or whether a chunk fits next to the
answer that it refines. Such a call is planned with a condition that the server checks once it has
the answers. If the condition is false, the app makes its calls itself.

Only the exact classes in `PLANNERS` are planned, because a subclass may behave differently.

Invariant: the planned calls are the calls that the synthesizer makes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.node_parser import TokenTextSplitter
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
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText

from ...speculation.planned_call import PlannedCall
from .plan_builder import NotPlanned, PlanBuilder, checked_template
from .prompt_inputs import fits, text_read


class SpanlessTextPacker(PromptHelper):
    """Packs texts as `PromptHelper` does, without LlamaIndex's span and event of every split."""

    def get_text_splitter_given_prompt(self, *args: Any, **kwargs: Any) -> TokenTextSplitter:
        """Return the splitter without callbacks; its `split_text` is the method within the span."""
        splitter = super().get_text_splitter_given_prompt(*args, **kwargs)
        method = splitter.split_text
        # This replaces the method of this splitter only. `setattr` would not do: pydantic refuses
        # unknown attributes.
        object.__setattr__(splitter, "split_text", getattr(method, "__wrapped__", method))
        silent = CallbackManager()  # takes over handlers of the app
        silent.set_handlers([])
        splitter.callback_manager = silent
        return splitter


def without_spans(part: Any) -> Any:
    """Return a copy of a part with a prompt helper, which packs texts without spans.

    Raises:
        NotPlanned: if the prompt helper is not LlamaIndex's own.
    """
    if type(part._prompt_helper) is not PromptHelper:
        raise NotPlanned("its prompt helper is not LlamaIndex's own")
    part = copy.copy(part)
    part._prompt_helper = part._prompt_helper.model_copy()
    part._prompt_helper.__class__ = SpanlessTextPacker
    return part


MARGIN = 8
"""How many tokens joining two texts may add."""


def plan_tree(
    synthesizer: TreeSummarize, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> None:
    """Plan one level of the tree, and the root if the answers fit into one prompt.

    With structured answers the root is not planned.
    """
    checked_template(builder.llm, synthesizer._summary_template)
    template = synthesizer._summary_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    chunks = helper.repack(template, text_chunks=texts, llm=builder.llm)
    level = list(_each(builder, template, "context_str", chunks))
    if len(level) < 2 or synthesizer._output_cls is not None:
        return
    stripped = [{"strip": text_read(each.variable)} for each in level]
    inputs = [builder.placeholder(text) for text in stripped]
    size = helper._get_available_chunk_size(template, padding=DEFAULT_PADDING, llm=builder.llm)
    conditions = [{"ne": [text, ""]} for text in stripped]
    conditions.append(fits({"join": [stripped, "\n\n"]}, size - MARGIN))
    joined = "\n\n".join(each.placeholder for each in inputs)
    builder.add(template, {"context_str": joined}, inputs, level, {"and": conditions})


def plan_refine(
    synthesizer: Refine, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> None:
    """Plan a chain of answers, each refining the one before, as long as no chunk must be split."""
    helper = synthesizer._prompt_helper
    first, refine = synthesizer._text_qa_template, synthesizer._refine_template
    checked_template(builder.llm, first)
    checked_template(builder.llm, refine)
    chunks = _refine_chunks(synthesizer, builder, query, texts)
    template = first.partial_format(query_str=query)
    before = next(_each(builder, template, "context_str", chunks[:1]), None)
    empty = refine.partial_format(query_str=query, existing_answer="")
    size = helper._get_available_chunk_size(empty, padding=DEFAULT_PADDING, llm=builder.llm)
    for chunk in chunks[1:]:
        whole = chunk.strip()
        left = size - helper._token_counter.get_string_tokens(whole) - MARGIN
        if before is None or left <= 0:
            return
        answer = text_read(before.variable)
        existing = builder.placeholder(answer)
        template = refine.partial_format(query_str=query, existing_answer=existing.placeholder)
        when = {"and": [{"ne": [answer, ""]}, fits(answer, left)]}
        before = builder.add(template, {"context_msg": whole}, [existing], [before], when)


def _refine_chunks(
    synthesizer: Refine, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> list[str]:
    """Return the chunks that `Refine` starts with, as far as they are known before an answer."""
    helper = synthesizer._prompt_helper
    first = synthesizer._text_qa_template
    padding = vars(synthesizer).get("_response_padding_size")
    if padding is not None:  # since core 0.14.22
        biggest = get_biggest_prompt([first, synthesizer._refine_template])
        return [
            chunk
            for text in texts
            for chunk in helper.repack(biggest, [text], llm=builder.llm, padding=padding)
        ]
    if not texts:
        return []
    # Before, the first text alone was split ahead, and without room for an answer.
    template = first.partial_format(query_str=query)
    return [*helper.repack(template, texts[:1], llm=builder.llm), *texts[1:]]


def plan_compact(
    synthesizer: CompactAndRefine, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> list[str]:
    """Plan `Refine` on chunks that fill the window; return the chunks."""
    checked_template(builder.llm, synthesizer._text_qa_template)
    checked_template(builder.llm, synthesizer._refine_template)
    chunks = synthesizer._make_compact_text_chunks(query, texts)
    plan_refine(synthesizer, builder, query, chunks)
    return chunks


def plan_accumulate(
    synthesizer: Accumulate, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> None:
    """Plan one call per chunk."""
    checked_template(builder.llm, synthesizer._text_qa_template)
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    for text in texts:
        chunks = synthesizer._prompt_helper.repack(template, [text], llm=builder.llm)
        list(_each(builder, template, "context_str", chunks))


def plan_compact_accumulate(
    synthesizer: CompactAndAccumulate, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> list[str]:
    """Plan `Accumulate` on chunks that fill the window; return the chunks."""
    checked_template(builder.llm, synthesizer._text_qa_template)
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    chunks = helper.repack(template, texts, llm=builder.llm)
    plan_accumulate(synthesizer, builder, query, chunks)
    return chunks


def plan_simple(
    synthesizer: SimpleSummarize, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> None:
    """Plan one call on as much text as fits."""
    checked_template(builder.llm, synthesizer._text_qa_template)
    template = synthesizer._text_qa_template.partial_format(query_str=query)
    helper = synthesizer._prompt_helper
    # LlamaIndex formats this list into the prompt without joining it.
    texts = helper.truncate(prompt=template, text_chunks=["\n".join(texts)], llm=builder.llm)
    builder.add(template, {"context_str": texts})


def plan_generation(
    synthesizer: Generation, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> None:
    """Plan one call on the query alone."""
    builder.add(synthesizer._input_prompt, {"query_str": query})


def plan_nothing(
    synthesizer: BaseSynthesizer, builder: PlanBuilder, query: str, texts: Sequence[str]
) -> None:
    """Plan nothing: the synthesizer makes no calls."""


SynthesizerPlanner: TypeAlias = Callable[
    [Any, PlanBuilder, str, Sequence[str]], Sequence[str] | None
]
"""Plans the calls of a synthesizer for a query and texts. Returns the texts with which the
synthesizer calls `get_response` of its base class, if it does."""

PLANNERS: dict[type[BaseSynthesizer], SynthesizerPlanner] = {
    TreeSummarize: plan_tree,
    Refine: plan_refine,
    CompactAndRefine: plan_compact,
    Accumulate: plan_accumulate,
    CompactAndAccumulate: plan_compact_accumulate,
    SimpleSummarize: plan_simple,
    Generation: plan_generation,
    NoText: plan_nothing,
    ContextOnly: plan_nothing,
}
"""The planner of each class; subclasses have none."""


def plan(
    synthesizer: Any, kind: type[Any], builder: PlanBuilder, arguments: dict[str, Any]
) -> list[str]:
    """Plan the calls of a synthesizer in `get_response`.

    Args:
        synthesizer: before its first call.
        kind: its class.
        builder: receives the calls.
        arguments: of `get_response`.

    Returns:
        The texts that it passes to `get_response` of its base class; empty without such a call.

    Raises:
        NotPlanned: if its calls cannot be planned, with the reason.
    """
    planner = PLANNERS.get(kind)
    if planner is None:
        raise NotPlanned(f"class {kind.__name__} is not supported")
    if planner is plan_nothing:
        return []
    synthesizer = without_spans(synthesizer)
    if getattr(synthesizer, "_structured_answer_filtering", False):
        raise NotPlanned("its answers are filtered (structured_answer_filtering)")
    if synthesizer._streaming and issubclass(kind, Accumulate):
        raise NotPlanned("it cannot stream")
    builder.output_cls = synthesizer._output_cls
    if builder.output_cls is not None and (synthesizer._streaming or issubclass(kind, Refine)):
        raise NotPlanned("it streams or refines structured answers (output_cls)")
    if arguments.get("prev_response") is not None:
        raise NotPlanned("it continues an earlier response (prev_response)")
    own = {"query_str", "text_chunks", "prev_response"}
    own |= {"separator"} if issubclass(kind, Accumulate) else set()
    builder.prompt_args = {name: arguments[name] for name in arguments.keys() - own}
    if not all(isinstance(each, str | int | float) for each in builder.prompt_args.values()):
        raise NotPlanned(f"it is called with {sorted(builder.prompt_args)}")
    texts = list(arguments["text_chunks"])
    return list(planner(synthesizer, builder, arguments["query_str"], texts) or [])


def _each(
    builder: PlanBuilder, template: BasePromptTemplate, name: str, chunks: Sequence[str]
) -> Iterator[PlannedCall]:
    for chunk in chunks:
        planned = builder.add(template, {name: chunk})
        assert planned is not None  # it has no inputs
        yield planned
