"""Processor time of a function, for tests that detect quadratic time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def least_cpu_s(function: Callable[[], object], rounds: int = 3) -> float:
    """Return the least processor time of a few calls, in seconds.

    Only this thread counts, and the collector is off: it would traverse the objects of all tests
    before this one.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return min(_cpu_s(function) for _ in range(rounds))
    finally:
        if is_collecting:
            gc.enable()


def _cpu_s(function: Callable[[], object]) -> float:
    began_s = time.thread_time()
    function()
    return time.thread_time() - began_s
