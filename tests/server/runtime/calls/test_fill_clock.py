"""Tests of the division of an engine's fill time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.runtime.calls.fill_clock import FillClock, FillMark

from ...inprocess import generate, server_harness


def test_prompts_that_are_filled_together_share_the_time() -> None:
    clock = FillClock()
    first = clock.begin(0.0)
    second = clock.begin(1.0)
    assert clock.end(3.0, first) == pytest.approx(1.0 + 1.0)
    assert clock.end(4.0, second) == pytest.approx(1.0 + 1.0)
    assert clock.read(9.0).busy_s == pytest.approx(4.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=12))
def test_parts_add_up_to_the_time_in_which_any_prompt_is_filled(
    fills: list[tuple[float, float]],
) -> None:
    times = sorted(
        event
        for number, (began, took) in enumerate(fills)
        for event in ((began, 0, number), (began + took, 1, number))
    )
    clock, parts = FillClock(), 0.0
    marks: dict[int, FillMark] = {}
    union, num_open, last = 0.0, 0, 0.0
    for at_s, is_end, number in times:
        union += (at_s - last) if num_open else 0.0
        num_open += -1 if is_end else 1
        last = at_s
        if is_end:
            parts += clock.end(at_s, marks[number])
        else:
            marks[number] = clock.begin(at_s)
    assert parts == pytest.approx(union)
    assert clock.read(last).busy_s == pytest.approx(union)


async def test_fills_of_a_program_take_no_longer_than_the_program(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(6)]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate(name, name * 40) for name in names], outputs=names)
        run = harness.executor.programs._live[program.id]
        await program.end()
        usages = [run.state.nodes[name].usage for name in names]
        assert all(0 < usage.fill_s <= usage.prefill_s + 1e-9 for usage in usages)
        assert all(0 <= usage.paused_s <= usage.decode_s + 1e-9 for usage in usages)
        assert run.state.finished_at is not None
        wall_s = run.state.finished_at - run.state.created_at
        assert sum(usage.fill_s for usage in usages) <= wall_s
