"""The heartbeat of an engine process: one byte every half second, from a separate thread.

It shows the server that the process is running, also during a step that takes many seconds. Its end
shows that the process is stopped. The thread needs the interpreter for microseconds; torch releases
it while it computes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final

BEAT_EVERY_S: Final = 0.5


def start_heartbeat(descriptor: int) -> None:
    """Write to a pipe until the process or the reader ends. A full pipe is skipped."""
    os.set_blocking(descriptor, False)

    def beat() -> None:
        while True:
            try:
                with contextlib.suppress(BlockingIOError):
                    os.write(descriptor, b".")
            except OSError:
                return
            time.sleep(BEAT_EVERY_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
