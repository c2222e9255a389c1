"""The server's end of an engine's heartbeat: notices a process that is stopped.

A process counts as frozen if it wrote no beat for some seconds and used no processor time either:
native code that holds the interpreter, such as a compiler, delays beats while it computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_INTERVALS = 7
"""Intervals that the wait for a beat is divided into."""
MIN_CPU_SHARE = 0.1
"""Processor time per second of a process that computes."""


class HeartbeatMonitor:
    """Reads the beats of one engine process."""

    def __init__(self, on_beat: Callable[[], None]) -> None:
        self.num_beats = 0
        self._on_beat = on_beat
        self._pipe: int | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Open the pipe; its writing end is for the engine and is closed here afterwards."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._pipe = ours
        asyncio.get_running_loop().add_reader(ours, self._read)
        try:
            yield theirs
        except BaseException:
            self.close()  # the process was not started
            raise
        finally:
            os.close(theirs)

    def close(self) -> None:
        """Close the pipe; safe to repeat."""
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            asyncio.get_running_loop().remove_reader(pipe)
            os.close(pipe)

    def _read(self) -> None:
        assert self._pipe is not None
        try:
            beats = os.read(self._pipe, 4_096)
        except BlockingIOError:
            return
        if not beats:
            self.close()  # the process has ended; its socket reports that
            return
        self.num_beats += len(beats)
        self._on_beat()

    async def wait_frozen(self, pid: int, freeze_s: float) -> None:
        """Return when the process is frozen.

        The wait is divided into intervals. If one takes more than twice its time, this server was
        stopped itself, and the engine gets its full time again.
        """
        interval_s = freeze_s / NUM_INTERVALS
        now = asyncio.get_running_loop().time
        while True:
            num_beats, cpu_s, num_left = self.num_beats, _cpu_s(pid), NUM_INTERVALS
            while num_left:
                started_s = now()
                await asyncio.sleep(interval_s)
                if self.num_beats != num_beats or now() - started_s > 2 * interval_s:
                    break
                num_left -= 1
            else:
                if _cpu_s(pid) - cpu_s < MIN_CPU_SHARE * freeze_s:
                    return


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process; 0 if that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
