"""Programs of one session stand in line as one, as long as they follow each other."""

from __future__ import annotations

import pytest

from conure.server.scheduling import sessions
from conure.server.scheduling.sessions import GAP_S, Sessions


def test_a_program_of_a_session_keeps_the_place_and_the_service_of_the_first() -> None:
    known = Sessions()
    first = known.join("t", "agent", 100.0)
    first.attained_s += 3.0
    second = known.join("t", "agent", 110.0)
    second.attained_s += 1.0
    assert second.began_s == 100.0
    assert first.attained_s == 4.0


def test_a_session_that_was_silent_for_long_is_new() -> None:
    known = Sessions()
    first = known.join("t", "agent", 100.0)
    first.begin()
    first.attained_s += 3.0
    first.end(150.0)
    assert known.join("t", "agent", 150.0 + GAP_S).began_s == 100.0
    late = known.join("t", "agent", 151.0 + 2 * GAP_S)
    assert (late.began_s, late.attained_s) == (151.0 + 2 * GAP_S, 0.0)


def test_a_call_that_ran_for_long_was_no_silence() -> None:
    known = Sessions()
    first = known.join("t", "agent", 0.0)
    first.begin()
    first.begin()
    first.end(1.0)
    assert known.join("t", "agent", 5 * GAP_S).began_s == 0.0, "one of them still runs"
    first.end(10 * GAP_S)
    assert known.join("t", "agent", 11 * GAP_S).began_s == 0.0
    assert known.join("t", "agent", 13 * GAP_S).began_s == 13 * GAP_S


@pytest.mark.parametrize("other", [("t", "another"), ("u", "agent"), ("t", None)])
def test_others_have_their_own_place(other: tuple[str, str | None]) -> None:
    known = Sessions()
    known.join("t", "agent", 100.0)
    assert known.join(*other, began_s=101.0).began_s == 101.0


def test_what_is_forgotten_first_was_silent_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    known = Sessions()
    for at_s, name in enumerate(["a", "b", "a", "c"]):
        known.join("t", name, float(at_s))
    assert known.join("t", "a", 4.0).began_s == 0.0
    assert known.join("t", "b", 5.0).began_s == 5.0
