"""Session inference: calls that continue a recorded history share its session."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conure.adapters.langchain.chat import sessions
from conure.adapters.langchain.chat.sessions import SessionInference


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def session(known: SessionInference, *messages: dict[str, Any]) -> str | None:
    resumed = known.resume(messages)
    return None if resumed is None else resumed.session


SYSTEM = {"role": "system", "content": "You plan."}
OTHER = {"role": "system", "content": "You write."}


def test_call_with_recorded_history_continues_session() -> None:
    known = SessionInference()
    assert session(known, user("hi")) is None
    known.record([user("hi")], answer("ho"), "one")
    assert session(known, user("hi"), answer("ho"), user("and?")) == "one"


def test_recorded_answer_is_continued_once() -> None:
    known = SessionInference()
    known.record([user("hi")], answer("ho"), "one")
    assert session(known, user("hi"), answer("ho"), user("a")) == "one"
    assert session(known, user("hi"), answer("ho"), user("b")) is None


def test_equal_histories_continue_two_sessions() -> None:
    known = SessionInference()
    known.record([user("hi")], answer("ho"), "one")
    known.record([user("hi")], answer("ho"), "two")
    found = {session(known, user("hi"), answer("ho"), user(text)) for text in "ab"}
    assert found == {"one", "two"}
    assert session(known, user("hi"), answer("ho"), user("c")) is None


def test_garbage_collector_may_record_and_restore_sessions_while_a_call_resumes_one() -> None:
    class CollectedInference(SessionInference):
        def _take(self, end: bytes) -> str:
            """Call methods like the garbage collector, under the lock."""
            while lost:
                lost.pop()()
            return super()._take(end)

    known = CollectedInference()
    lost: list[Callable[[], None]] = []
    known.record([user("hi")], answer("ho"), "one")
    resumed = known.resume([user("hi"), answer("ho")])
    assert resumed is not None
    known.record([user("hey")], answer("ho"), "two")
    lost.append(partial(known.restore, resumed))
    lost.append(partial(known.record, [user("hello")], answer("ho"), "three"))
    resume = partial(known.resume, [user("hey"), answer("ho")])
    thread = threading.Thread(target=resume, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert session(known, user("hi"), answer("ho")) == "one"
    assert session(known, user("hello"), answer("ho")) == "three"


def test_failed_call_restores_its_session() -> None:
    known = SessionInference()
    known.record([user("hi")], answer("ho"), "one")
    again = [user("hi"), answer("ho"), user("and?")]
    first = known.resume(again)
    assert first is not None
    known.restore(first)
    assert session(known, *again) == "one"
    assert known.resume(again) is None


def test_copy_starts_empty() -> None:
    known = SessionInference()
    known.record([user("hi")], answer("ho"), "one")
    for other in (copy.deepcopy(known), pickle.loads(pickle.dumps(known))):
        assert other.resume([user("hi"), answer("ho")]) is None
    assert session(known, user("hi"), answer("ho")) == "one"


def test_different_history_is_a_new_session() -> None:
    known = SessionInference()
    known.record([user("hi")], answer("ho"), "one")
    assert session(known, user("hi"), answer("hm"), user("and?")) is None
    assert session(known, user("he"), answer("ho"), user("and?")) is None
    assert session(known, user("hi"), user("and?")) is None
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert session(known, user("hi"), answer("ho", tool_calls=[call]), user("and?")) is None
    assert session(known, user("hi"), answer("ho")) == "one"


def test_team_members_share_a_session() -> None:
    known = SessionInference()
    known.record([SYSTEM, user("hi")], answer("ho"), "one")
    assert session(known, OTHER, user("hi"), answer("ho", name="planner")) == "one"


def test_number_of_recorded_answers_is_bounded() -> None:
    known = SessionInference()
    for i in range(sessions.MAX_RECORDED_ANSWERS + 1):
        known.record([user(str(i))], answer("ho"), str(i))
    assert session(known, user("0"), answer("ho")) is None
    assert session(known, user("1"), answer("ho")) == "1"


def test_equal_histories_count_toward_the_bound() -> None:
    known = SessionInference()
    for i in range(sessions.MAX_RECORDED_ANSWERS + 5):
        known.record([user("hi")], answer("ho"), str(i))
    found = [session(known, user("hi"), answer("ho")) for _ in range(5)]
    assert found == [str(sessions.MAX_RECORDED_ANSWERS + 4 - i) for i in range(5)]
    rest = [session(known, user("hi"), answer("ho")) for _ in range(1_000)]
    assert rest.count(None) == 5


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=30))
def test_interleaved_turns_keep_their_sessions(turns: list[tuple[int, str]]) -> None:
    known = SessionInference()
    chats: dict[int, list[dict[str, Any]]] = {i: [user(f"I am {i}")] for i in range(4)}
    for who, text in turns:
        found = session(known, *chats[who])
        assert found == (str(who) if len(chats[who]) > 1 else None)
        known.record(chats[who], answer(text), str(who))
        chats[who] += [answer(text), user("go on")]
