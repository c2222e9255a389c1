"""The clock of programs."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from conure.server.runtime.clock import SteadyClock


@given(st.lists(st.floats(0, 4e9), min_size=1, max_size=4))
def test_timestamps_are_the_times_of_a_calendar(times: list[float]) -> None:
    clock = SteadyClock()
    for unix_s in times:
        written = datetime.fromisoformat(clock.timestamp(unix_s))
        assert abs((written - datetime.fromtimestamp(unix_s, UTC)).total_seconds()) <= 1e-6


def test_timestamp_always_has_microseconds() -> None:
    clock = SteadyClock()
    assert clock.timestamp(2.0) == "1970-01-01T00:00:02.000000Z"
    assert clock.timestamp(2.9999999) == "1970-01-01T00:00:03.000000Z"
