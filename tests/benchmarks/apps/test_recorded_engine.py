"""The names of the blocks that a recorded engine uses and computes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.oracle import StepTrace, last_use_block_seconds
from apps.recorded_engine import BlockNames
from conure.engine.runner.base import ScheduledSequence


def trace_of(*rows: tuple[int, int, int] | None) -> list[StepTrace]:
    """Return steps of one second each, with one row each: its context, first and end position."""
    names = BlockNames(4)
    steps = []
    for number, row in enumerate(rows):
        uses: frozenset[object] = frozenset()
        computed = uses
        if row is not None:
            context, start, end = row
            sequence = ScheduledSequence(context, list(range(end)), start, end - start, [])
            uses, computed = frozenset(names.uses(sequence)), frozenset(names.computed(sequence))
        steps.append(StepTrace(float(number), number + 1.0, uses, computed, 0))
    return [names.complete(step) for step in steps]


def test_partial_block_is_held_until_it_continues() -> None:
    assert last_use_block_seconds(trace_of((1, 0, 2), None, (1, 2, 3))) == 3
    assert last_use_block_seconds(trace_of((1, 0, 2), None, (1, 2, 4))) == 3
    assert last_use_block_seconds(trace_of((1, 0, 2), None, (1, 0, 3))) == 2


def test_full_blocks_of_equal_tokens_have_one_name() -> None:
    one, other = trace_of((1, 0, 4), (2, 0, 5))
    assert one.uses < other.uses
    assert other.uses - one.uses == {(2, 1)}
