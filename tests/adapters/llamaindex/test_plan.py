"""A planned call is given out once, to its own call, and only if its condition holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.utils import get_tokenizer

from conure.adapters.llamaindex.call import Call, Text
from conure.adapters.llamaindex.plan import (
    SLOT,
    Plan,
    Planned,
    Slot,
    fits,
    holds,
    text_read,
    with_slots,
)


def chat(content: Any, **output: Any) -> Call:
    return Call("default", output, messages=[{"role": "user", "content": content}])


def message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def reading(variable: str, template: str = "Of {}.") -> Call:
    mark = SLOT.format(0)
    made = with_slots(chat(template.format(mark)), [Slot(mark, text_read(variable))])
    assert made is not None
    return made


def test_a_known_call_is_given_out_once() -> None:
    plan = Plan()
    plan.add([Planned("a", chat("x"), frozenset())])
    assert plan.has(chat("x"))
    assert plan.claim(chat("y")) is None
    assert plan.claim(chat("x", temperature=0)) is None
    claimed = plan.claim(chat("x"))
    assert claimed is not None
    assert claimed.variable == "a"
    assert plan.claim(chat("x")) is None
    assert plan.unclaimed() == []


def test_equal_calls_are_given_out_in_their_order() -> None:
    plan = Plan()
    plan.add([Planned(name, chat("x"), frozenset()) for name in "abc"])
    claimed = [plan.claim(chat("x")) for _ in range(4)]
    assert [each and each.variable for each in claimed] == ["a", "b", "c", None]


def test_a_call_that_reads_an_answer_waits_for_it() -> None:
    plan = Plan()
    plan.add([Planned("b", reading("a"), frozenset("a"))])
    assert plan.claim(chat("Of tea.")) is None
    plan.learn("a", message("tea"))
    assert plan.claim(chat("Of milk.")) is None
    assert plan.claim(chat("Of tea.")) is not None


def test_a_call_whose_condition_is_false_is_dropped_and_not_wasted() -> None:
    plan = Plan()
    when = {"ne": [text_read("a"), ""]}
    plan.add([Planned("b", reading("a"), frozenset("a"), when)])
    assert len(plan.unclaimed()) == 1
    plan.learn("a", message(""))
    assert plan.unclaimed() == []
    assert plan.claim(chat("Of .")) is None


def test_a_call_that_has_failed_is_forgotten() -> None:
    plan = Plan()
    plan.add([Planned("a", chat("x"), frozenset()), Planned("b", reading("a"), frozenset("a"))])
    plan.forget("a")
    plan.forget("b")
    assert plan.claim(chat("x")) is None
    assert plan.unclaimed() == []


@given(st.lists(st.text(max_size=8), max_size=4), st.text(max_size=8))
def test_a_prompt_with_slots_has_the_key_of_the_prompt_that_comes_of_it(
    pieces: list[str], answer: str
) -> None:
    mark = SLOT.format(0)
    if any("\ue000" in text for text in [*pieces, answer]):
        return
    call = with_slots(chat(mark.join(["", *pieces, ""])), [Slot(mark, text_read("a"))])
    assert call is not None
    known = chat(answer.join(["", *pieces, ""]))
    assert call.key({"a": message(answer)}) == known.key()


def test_a_call_that_cannot_be_put_together_is_nobodys() -> None:
    plan = Plan()
    plan.add([Planned("a", chat("\ud800"), frozenset()), Planned("b", chat("x"), frozenset())])
    plan.add([Planned("c", reading("a"), frozenset("a"))])
    plan.learn("a", message("\ud800"))
    claimed = plan.claim(chat("x"))
    assert claimed is not None
    assert claimed.variable == "b"
    assert plan.unclaimed() == []


def test_a_call_with_slots_is_the_call_in_all_else() -> None:
    mark = SLOT.format(0)
    call = Call("m", {"seed": 1}, prompt=[{"text": mark}], extra={"tools": []}, timeout_s=3)
    made = with_slots(call, [Slot(mark, text_read("a"))])
    assert made == replace(call, prompt=[{"input": text_read("a")}])


def test_a_mark_that_is_nowhere_is_noticed() -> None:
    assert with_slots(chat("x"), [Slot(SLOT.format(0), "a")]) is None


@settings(deadline=None)  # the first one loads the tokenizer
@given(st.text(max_size=60), st.integers(0, 60))
def test_a_text_that_fits_has_at_most_so_many_tokens(text: str, num_tokens: int) -> None:
    if holds(fits({"lit": text}, num_tokens), {}):
        assert len(get_tokenizer()(text)) <= num_tokens


@pytest.mark.parametrize(("text", "limit"), [("tea " * 10, 40), ("ä" * 10, 40)])
def test_plain_text_fits_by_its_letters_and_other_text_by_a_fourth(text: str, limit: int) -> None:
    assert holds(fits({"lit": text}, limit), {})
    assert not holds(fits({"lit": text}, limit - 1), {})


@given(st.text(min_size=1, max_size=20), st.data())
def test_pieces_joined_are_the_text_whatever_is_said_again(text: str, data: Any) -> None:
    reader, made = Text(), ""
    for _ in range(data.draw(st.integers(0, 6))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, len(text)))
        made += reader.more(text[start:end], start)
        assert text.startswith(made)
    assert made + reader.more(text, 0) == text
