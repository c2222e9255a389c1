"""Calls that go on with what was said are of one session, and no others are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conure.adapters.langchain import conversations
from conure.adapters.langchain.conversations import Conversations


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "You plan."}
OTHER = {"role": "system", "content": "You write."}


def test_a_call_that_repeats_what_was_said_goes_on_with_it() -> None:
    known = Conversations()
    assert known.resumed([user("hi")]) is None
    known.said([user("hi")], answer("ho"), "one")
    assert known.resumed([user("hi"), answer("ho"), user("and?")]) == "one"


def test_what_was_said_is_gone_on_with_once() -> None:
    known = Conversations()
    known.said([user("hi")], answer("ho"), "one")
    assert known.resumed([user("hi"), answer("ho"), user("a")]) == "one"
    assert known.resumed([user("hi"), answer("ho"), user("b")]) is None


def test_another_answer_or_question_is_another_conversation() -> None:
    known = Conversations()
    known.said([user("hi")], answer("ho"), "one")
    assert known.resumed([user("hi"), answer("hm"), user("and?")]) is None
    assert known.resumed([user("he"), answer("ho"), user("and?")]) is None
    assert known.resumed([user("hi"), user("and?")]) is None
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert known.resumed([user("hi"), answer("ho", tool_calls=[call]), user("and?")]) is None
    assert known.resumed([user("hi"), answer("ho")]) == "one"


def test_the_parts_of_a_team_go_on_with_each_other() -> None:
    known = Conversations()
    known.said([SYSTEM, user("hi")], answer("ho"), "one")
    assert known.resumed([OTHER, user("hi"), answer("ho", name="planner")]) == "one"


def test_what_is_remembered_is_bounded() -> None:
    known = Conversations()
    for i in range(conversations.MAX_CONVERSATIONS + 1):
        known.said([user(str(i))], answer("ho"), str(i))
    assert known.resumed([user("0"), answer("ho")]) is None
    assert known.resumed([user("1"), answer("ho")]) == "1"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=30))
def test_however_turns_interleave_each_finds_its_own(turns: list[tuple[int, str]]) -> None:
    known = Conversations()
    said: dict[int, list[dict[str, Any]]] = {i: [user(f"I am {i}")] for i in range(4)}
    for who, text in turns:
        found = known.resumed(said[who])
        assert found == (str(who) if len(said[who]) > 1 else None)
        known.said(said[who], answer(text), str(who))
        said[who] += [answer(text), user("go on")]
