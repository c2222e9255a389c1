"""Programs of one session share one place in the queue as long as they follow each other."""

from __future__ import annotations

import pytest

from conure.server.scheduling import session_usage
from conure.server.scheduling.session_usage import MAX_SILENCE_S, SessionTable


def test_session_keeps_start_time_and_service() -> None:
    sessions = SessionTable()
    first = sessions.join("t", "agent", 100.0)
    first.attained_s += 3.0
    second = sessions.join("t", "agent", 110.0)
    second.attained_s += 1.0
    assert second.started_at_s == 100.0
    assert first.attained_s == 4.0


def test_silent_session_expires() -> None:
    sessions = SessionTable()
    first = sessions.join("t", "agent", 100.0)
    first.call_started()
    first.attained_s += 3.0
    first.call_ended(150.0)
    assert sessions.join("t", "agent", 150.0 + MAX_SILENCE_S).started_at_s == 100.0
    late = sessions.join("t", "agent", 151.0 + 2 * MAX_SILENCE_S)
    assert (late.started_at_s, late.attained_s) == (151.0 + 2 * MAX_SILENCE_S, 0.0)


def test_running_call_keeps_session_active() -> None:
    sessions = SessionTable()
    first = sessions.join("t", "agent", 0.0)
    first.call_started()
    first.call_started()
    first.call_ended(1.0)
    assert sessions.join("t", "agent", 5 * MAX_SILENCE_S).started_at_s == 0.0, (
        "one of them still runs"
    )
    first.call_ended(10 * MAX_SILENCE_S)
    assert sessions.join("t", "agent", 11 * MAX_SILENCE_S).started_at_s == 0.0
    assert sessions.join("t", "agent", 13 * MAX_SILENCE_S).started_at_s == 13 * MAX_SILENCE_S


@pytest.mark.parametrize("other", [("t", "another"), ("u", "agent"), ("t", None)])
def test_other_sessions_have_their_own_usage(other: tuple[str, str | None]) -> None:
    sessions = SessionTable()
    sessions.join("t", "agent", 100.0)
    assert sessions.join(*other, started_at_s=101.0).started_at_s == 101.0


def test_least_recently_used_session_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_usage, "MAX_SESSIONS", 2)
    sessions = SessionTable()
    for at_s, name in enumerate(["a", "b", "a", "c"]):
        sessions.join("t", name, float(at_s))
    assert sessions.join("t", "a", 4.0).started_at_s == 0.0
    assert sessions.join("t", "b", 5.0).started_at_s == 5.0
