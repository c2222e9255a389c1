"""Planned calls of LlamaIndex: inputs in prompts, and keys of calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.utils import get_tokenizer

from conure.adapters.llamaindex import Conure
from conure.adapters.llamaindex.acceleration.plan_builder import PlanBuilder
from conure.adapters.llamaindex.acceleration.prompt_inputs import (
    PLACEHOLDER_FORMAT,
    PlaceholderInput,
    fits,
    planned_call,
    text_read,
    with_inputs,
)
from conure.adapters.llamaindex.llm.model_request import ModelRequest
from conure.adapters.speculation.answer_stream import AnswerTextStream
from conure.adapters.speculation.planned_call import PlannedCall, holds, request_key
from conure.adapters.speculation.registry import CallRecord, PlanFailedError, PlannedCallRegistry
from conure.server.program.ir import Json
from conure.server.program.status import Event

from .conformance import Person


def chat(content: Any, **output: Any) -> ModelRequest:
    return ModelRequest("default", output, messages=[{"role": "user", "content": content}])


def message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def reading(variable: str, template: str = "Of {}.") -> ModelRequest:
    mark = PLACEHOLDER_FORMAT.format(0)
    made = with_inputs(chat(template.format(mark)), [PlaceholderInput(mark, text_read(variable))])
    assert made is not None
    return made


def call_b(when: Any = None) -> PlannedCall:
    return planned_call("b", reading("a"), frozenset("a"), when)


def claim(registry: PlannedCallRegistry, call: ModelRequest) -> CallRecord | None:
    return registry.claim(call.node("", ""))


def commit(registry: PlannedCallRegistry, variable: str, value: Json) -> None:
    data = {"program": "p", "variable": variable, "value": value}
    registry.on_event(Event(1, "variable.committed", data))


def test_known_call_is_claimed_once() -> None:
    registry = PlannedCallRegistry()
    registry.plan([planned_call("a", chat("x"))])
    assert registry.has_planned(chat("x").node("", ""))
    assert claim(registry, chat("y")) is None
    assert claim(registry, chat("x", temperature=0)) is None
    claimed = claim(registry, chat("x"))
    assert claimed is not None
    assert claimed.variable == "a"
    assert claim(registry, chat("x")) is None
    assert registry.unclaimed() == []


def test_equal_calls_are_claimed_in_order() -> None:
    registry = PlannedCallRegistry()
    registry.plan([planned_call(name, chat("x")) for name in "abc"])
    claimed = [claim(registry, chat("x")) for _ in range(4)]
    assert [each and each.variable for each in claimed] == ["a", "b", "c", None]


def test_call_that_reads_an_answer_waits_for_it() -> None:
    registry = PlannedCallRegistry()
    registry.plan([planned_call("a", chat("x")), call_b()])
    assert claim(registry, chat("Of tea.")) is None
    commit(registry, "a", message("tea"))
    assert claim(registry, chat("Of milk.")) is None
    assert claim(registry, chat("Of tea.")) is not None


def test_call_with_false_condition_is_dropped_and_not_wasted() -> None:
    registry = PlannedCallRegistry()
    registry.plan([planned_call("a", chat("x")), call_b({"ne": [text_read("a"), ""]})])
    assert claim(registry, chat("x")) is not None
    assert len(registry.unclaimed()) == 1
    commit(registry, "a", message(""))
    assert registry.unclaimed() == []
    assert claim(registry, chat("Of .")) is None


def test_failed_calls_are_not_claimed() -> None:
    registry = PlannedCallRegistry()
    registry.plan([planned_call("a", chat("x")), call_b()])
    registry.reject([registry.records["a"]], PlanFailedError("x", "no"))
    assert claim(registry, chat("x")) is None
    assert registry.unclaimed() == []


@given(st.lists(st.text(max_size=8), max_size=4), st.text(max_size=8))
def test_prompt_with_inputs_has_the_key_of_the_final_prompt(pieces: list[str], answer: str) -> None:
    mark = PLACEHOLDER_FORMAT.format(0)
    if any("\ue000" in text for text in [*pieces, answer]):
        return
    call = with_inputs(chat(mark.join(["", *pieces, ""])), [PlaceholderInput(mark, text_read("a"))])
    assert call is not None
    known = chat(answer.join(["", *pieces, ""]))
    values = {"a": message(answer)}
    assert request_key(call.node("b", "c"), values) == request_key(known.node("", ""), {})


def test_call_that_cannot_be_encoded_is_not_claimed() -> None:
    registry = PlannedCallRegistry()
    registry.plan([planned_call("a", chat("\ud800")), planned_call("b", chat("x"))])
    registry.plan([planned_call("c", reading("a"), frozenset("a"))])
    commit(registry, "a", message("\ud800"))
    claimed = claim(registry, chat("x"))
    assert claimed is not None
    assert claimed.variable == "b"
    assert registry.unclaimed() == []


def test_inputs_change_the_prompt_only() -> None:
    mark = PLACEHOLDER_FORMAT.format(0)
    call = ModelRequest("m", {"seed": 1}, prompt=[{"text": mark}], extra={"tools": []}, timeout_s=3)
    made = with_inputs(call, [PlaceholderInput(mark, text_read("a"))])
    assert made == replace(call, prompt=[{"input": text_read("a")}])


def test_missing_mark_is_noticed() -> None:
    assert with_inputs(chat("x"), [PlaceholderInput(PLACEHOLDER_FORMAT.format(0), "a")]) is None


@given(st.text(max_size=60), st.integers(0, 60))
def test_text_that_fits_has_few_enough_tokens(text: str, num_tokens: int) -> None:
    if holds(fits({"lit": text}, num_tokens), {}):
        assert len(get_tokenizer()(text)) <= num_tokens


@pytest.mark.parametrize(("text", "limit"), [("tea " * 10, 40), ("ä" * 10, 40)])
def test_ascii_counts_one_token_and_others_four(text: str, limit: int) -> None:
    assert holds(fits({"lit": text}, limit), {})
    assert not holds(fits({"lit": text}, limit - 1), {})


@given(st.text(min_size=1, max_size=20), st.data())
def test_pieces_joined_are_the_text_despite_restarts(text: str, data: Any) -> None:
    reader, made = AnswerTextStream(), ""
    for _ in range(data.draw(st.integers(0, 6))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, len(text)))
        made += reader.more(text[start:end], start)
        assert text.startswith(made)
    assert made + reader.more(text, 0) == text


@pytest.mark.parametrize("num_inputs", [0, 1])
def test_parser_of_a_template_does_not_matter_if_the_call_replaces_it(num_inputs: int) -> None:
    builder = PlanBuilder(Conure(), "part", lambda hint: hint)
    builder.output_cls = Person
    template = PromptTemplate("{text}", output_parser=PydanticOutputParser(Person))
    text = builder.placeholder(text_read("a"))
    assert builder.add(template, {"text": text.placeholder}, [text][:num_inputs]) is not None
