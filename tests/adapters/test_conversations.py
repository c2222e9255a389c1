"""Calls that go on with what was said are of one session, and no others are."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conure.adapters.langchain import conversations
from conure.adapters.langchain.conversations import Conversations


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def session(known: Conversations, *messages: dict[str, Any]) -> str | None:
    resumed = known.resumed(messages)
    return None if resumed is None else resumed.session


SYSTEM = {"role": "system", "content": "You plan."}
OTHER = {"role": "system", "content": "You write."}


def test_a_call_that_repeats_what_was_said_goes_on_with_it() -> None:
    known = Conversations()
    assert session(known, user("hi")) is None
    known.said([user("hi")], answer("ho"), "one")
    assert session(known, user("hi"), answer("ho"), user("and?")) == "one"


def test_what_was_said_is_gone_on_with_once() -> None:
    known = Conversations()
    known.said([user("hi")], answer("ho"), "one")
    assert session(known, user("hi"), answer("ho"), user("a")) == "one"
    assert session(known, user("hi"), answer("ho"), user("b")) is None


def test_what_was_said_in_two_sessions_is_gone_on_with_in_both() -> None:
    known = Conversations()
    known.said([user("hi")], answer("ho"), "one")
    known.said([user("hi")], answer("ho"), "two")
    found = {session(known, user("hi"), answer("ho"), user(said)) for said in "ab"}
    assert found == {"one", "two"}
    assert session(known, user("hi"), answer("ho"), user("c")) is None


def test_a_call_that_comes_to_nothing_is_tried_again_in_its_session() -> None:
    known = Conversations()
    known.said([user("hi")], answer("ho"), "one")
    again = [user("hi"), answer("ho"), user("and?")]
    first = known.resumed(again)
    assert first is not None
    known.give_back(first)
    assert session(known, *again) == "one"
    assert known.resumed(again) is None


def test_a_copy_knows_of_nothing() -> None:
    known = Conversations()
    known.said([user("hi")], answer("ho"), "one")
    for other in (copy.deepcopy(known), pickle.loads(pickle.dumps(known))):
        assert other.resumed([user("hi"), answer("ho")]) is None
    assert session(known, user("hi"), answer("ho")) == "one"


def test_another_answer_or_question_is_another_conversation() -> None:
    known = Conversations()
    known.said([user("hi")], answer("ho"), "one")
    assert session(known, user("hi"), answer("hm"), user("and?")) is None
    assert session(known, user("he"), answer("ho"), user("and?")) is None
    assert session(known, user("hi"), user("and?")) is None
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert session(known, user("hi"), answer("ho", tool_calls=[call]), user("and?")) is None
    assert session(known, user("hi"), answer("ho")) == "one"


def test_the_parts_of_a_team_go_on_with_each_other() -> None:
    known = Conversations()
    known.said([SYSTEM, user("hi")], answer("ho"), "one")
    assert session(known, OTHER, user("hi"), answer("ho", name="planner")) == "one"


def test_what_is_remembered_is_bounded() -> None:
    known = Conversations()
    for i in range(conversations.MAX_CONVERSATIONS + 1):
        known.said([user(str(i))], answer("ho"), str(i))
    assert session(known, user("0"), answer("ho")) is None
    assert session(known, user("1"), answer("ho")) == "1"


def test_what_many_say_is_remembered_within_the_same_bounds() -> None:
    known = Conversations()
    for i in range(conversations.MAX_CONVERSATIONS + 5):
        known.said([user("hi")], answer("ho"), str(i))
    found = [session(known, user("hi"), answer("ho")) for _ in range(5)]
    assert found == [str(conversations.MAX_CONVERSATIONS + 4 - i) for i in range(5)]
    rest = [session(known, user("hi"), answer("ho")) for _ in range(1_000)]
    assert rest.count(None) == 5


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=30))
def test_however_turns_interleave_each_finds_its_own(turns: list[tuple[int, str]]) -> None:
    known = Conversations()
    said: dict[int, list[dict[str, Any]]] = {i: [user(f"I am {i}")] for i in range(4)}
    for who, text in turns:
        found = session(known, *said[who])
        assert found == (str(who) if len(said[who]) > 1 else None)
        known.said(said[who], answer(text), str(who))
        said[who] += [answer(text), user("go on")]
