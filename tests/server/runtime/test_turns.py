"""Turns of the event loop."""

from __future__ import annotations

import sys

import pytest

from conure.server.runtime.turns import SWITCH_INTERVAL_S, Turns


async def test_threads_switch_often_during_a_long_computation_only() -> None:
    usual = sys.getswitchinterval()
    turns = Turns()
    assert await turns.in_thread(sys.getswitchinterval) == pytest.approx(SWITCH_INTERVAL_S)
    assert sys.getswitchinterval() == usual
    turns.stop()


async def test_the_usual_interval_returns_after_an_error() -> None:
    usual = sys.getswitchinterval()
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        await turns.in_thread(lambda: 1 // 0)
    assert sys.getswitchinterval() == usual
    turns.stop()
