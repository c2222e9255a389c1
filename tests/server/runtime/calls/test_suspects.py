"""The gate for calls that were on an engine when it died."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.runtime.calls import suspects
from conure.server.runtime.calls.suspects import SuspectGate, is_cause


@pytest.mark.parametrize(
    ("num_deaths", "others", "expected"),
    [
        (2, [], False),
        (3, [], True),
        (3, [1], False),
        (4, [1, 1], True),
        (4, [1, 2], False),
        (7, [7], False),
        (8, [8], True),
    ],
)
def test_cause_of_a_death(num_deaths: int, others: list[int], expected: bool) -> None:
    assert is_cause(num_deaths, others) == expected


async def test_half_of_the_calls_run_again_fewest_deaths_first() -> None:
    gate, started = SuspectGate(), []
    gate.engine_died([1, 1, 1, 1, 2, 2])
    for name, num_deaths in (("a", 1), ("b", 1), ("c", 2), ("d", 1), ("e", 2), ("f", 1)):
        gate.enter(name, num_deaths, lambda name=name: started.append(name))  # type: ignore[misc]
    assert started == ["a", "b"]
    assert not gate.leave("a")
    await asyncio.sleep(0)
    assert started == ["a", "b", "d"]
    assert gate.leave("e")
    assert not gate.leave("b")
    await asyncio.sleep(0)
    assert started == ["a", "b", "d", "f"]
    gate.leave("d")
    await asyncio.sleep(0)
    assert "c" not in started, "one call at a time among those with two deaths"
    gate.leave("f")
    await asyncio.sleep(0)
    assert started[-1] == "c"
    gate.leave("c")
    await asyncio.sleep(0)
    assert gate.is_open


async def test_probation_opens_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "PROBATION_S", 0.0)
    gate, started = SuspectGate(), asyncio.Event()
    gate.engine_died([1])
    gate.enter("long", 1, lambda: None)
    gate.enter("next", 1, started.set)
    await asyncio.sleep(0.01)
    assert not started.is_set(), "no engine runs the call yet: an engine may load for long"
    gate.started("long")
    await asyncio.wait_for(started.wait(), 60)


async def test_calls_that_have_passed_are_not_limited_again() -> None:
    gate = SuspectGate()
    started: list[str] = []
    gate.engine_died([1, 1])
    for call in "ab":
        gate.enter(call, 1, partial(started.append, call))
    assert started == ["a"]
    for call in "ab":
        gate.leave(call)
        await asyncio.sleep(0)
    assert gate.is_open
    for call in "ab":
        gate.enter(call, 1, partial(started.append, call))
    assert started == ["a", "b", "a", "b"]


@given(st.integers(1, 40), st.integers(0, 39))
def test_guilty_call_is_found_and_no_other_fails(num_calls: int, guilty: int) -> None:
    """Play deaths until all calls have ended: the engine dies whenever the guilty call runs."""
    guilty %= num_calls

    async def play() -> None:
        gate = SuspectGate()
        deaths = dict.fromkeys(range(num_calls), 0)
        open_calls, failed = set(range(num_calls)), set()
        running = set(range(num_calls))

        def start(call: int) -> None:
            running.add(call)

        while open_calls:
            if guilty in running:
                for call in running:
                    gate.leave(call)
                    deaths[call] += 1
                lost = sorted(running)
                running.clear()
                gate.engine_died([deaths[call] for call in lost])
                for call in lost:
                    others = [deaths[other] for other in lost if other != call]
                    if is_cause(deaths[call], others):
                        failed.add(call)
                        open_calls.discard(call)
                    else:
                        gate.enter(call, deaths[call], partial(start, call))
            else:
                for call in running:
                    gate.leave(call)
                open_calls -= running
                running.clear()
            await asyncio.sleep(0)
        assert failed == {guilty}

    asyncio.run(play())
