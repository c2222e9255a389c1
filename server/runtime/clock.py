"""The clock of programs: times of day whose differences are durations.

The wall clock can be set while a program runs; a duration must not change with it. The clock reads
the wall clock once, when the server starts, and adds the time since then by the monotonic clock.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

MIN_SHIFT_S = 2.0
"""Smaller differences between the clocks are measurement errors or gradual corrections."""


class SteadyClock:
    """Unix time in seconds that only moves forward, at the pace of the monotonic clock."""

    def __init__(self) -> None:
        self.shift_s = 0.0
        """How far the wall clock was set forward since the last start: what times of earlier
        server processes must be moved by to be compared with this clock."""
        self._offset_s = time.time() - time.monotonic()
        self._second, self._second_text = -1, ""
        """The last second that was written, and its text."""

    def now(self) -> float:
        """Return the time."""
        return self._offset_s + time.monotonic()

    def timestamp(self, unix_s: float) -> str:
        """Return Unix seconds as ISO 8601 in UTC, with microseconds.

        The text of a second is made once: a program writes dozens of events in a millisecond.
        """
        second, micros = divmod(round(unix_s * 1e6), 1_000_000)
        if second != self._second:
            self._second = second
            self._second_text = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
        return f"{self._second_text}.{micros:06d}Z"

    def continue_after(self, shift_s: float) -> None:
        """Set the shift since the last start."""
        self.shift_s = shift_s if abs(shift_s) >= MIN_SHIFT_S else 0.0


def format_timestamp(unix_s: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC, with microseconds."""
    at = datetime.fromtimestamp(unix_s, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
