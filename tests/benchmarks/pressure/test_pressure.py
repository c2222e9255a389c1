"""Both ways of sending in the model, and what no order can beat."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.programs import chain, map_reduce, single
from apps.scaled_workloads import ScheduledProgram
from pressure.mixes import ROOMY, blocks_of, gain, random_mix
from pressure.search import Schedule, _ends_by_remaining_work, bound_s, search, took_s
from pressure.sides import SimulatedMachine, requests, whole
from simulation.engine import LinearCosts

MACHINE = SimulatedMachine(LinearCosts(0.0, 65e-6, 1.8e-3, 1e-4, 0.0), 60)
SENT = [
    ScheduledProgram(map_reduce(4, 100, 10), 0.0, "map-reduce"),
    ScheduledProgram(single("", 0, 50, 40, 0), 0.02, "chat"),
    ScheduledProgram(single("", 0, 80, 20, 1), 0.02, "chat"),
]


def test_single_calls_take_as_long_as_requests_without_a_network() -> None:
    near = MACHINE._replace(request_s=0.0)
    assert requests(SENT[1:], near).took_s == pytest.approx(whole(SENT[1:], near).took_s)


def test_a_request_waits_for_the_answers_that_it_reads() -> None:
    near = MACHINE._replace(request_s=0.0, num_blocks=ROOMY)
    sent = [ScheduledProgram(chain(3, 50, 5), 0.0)]
    late = near._replace(request_s=0.1)
    assert requests(sent, late).took_s[0] == pytest.approx(requests(sent, near).took_s[0] + 0.3)


def test_no_order_beats_the_bound_and_the_search_finds_one_that_is_no_worse() -> None:
    ours = statistics.fmean(whole(SENT, MACHINE).took_s)
    found = statistics.fmean(search(SENT, MACHINE, 20))
    assert bound_s(SENT, MACHINE) <= found <= ours


def test_a_pause_counts_in_the_duration() -> None:
    alone = SENT[1:2]
    times = [took_s(alone, MACHINE, Schedule([0], [pause], holds=False))[0] for pause in (0.0, 0.5)]
    assert times[1] == pytest.approx(times[0] + 0.5)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6),
)
def test_remaining_work_first_equals_a_machine_that_advances_by_units(
    jobs: list[tuple[int, int]],
) -> None:
    left = [work for _, work in jobs]
    ends = [0] * len(jobs)
    now = 0
    while any(left):
        ready = [n for n, (at, _) in enumerate(jobs) if at <= now and left[n]]
        now += 1
        if ready:
            first = min(ready, key=lambda n: left[n])
            left[first] -= 1
            ends[first] = ends[first] if left[first] else now
    found = _ends_by_remaining_work([float(at) for at, _ in jobs], [float(w) for _, w in jobs])
    assert sum(found) == sum(ends)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 500))
def test_little_memory_makes_no_mix_of_programs_slower_than_requests(seed: int) -> None:
    sent = random_mix(seed)
    blocks = blocks_of(sent, MACHINE.cost, 40)
    assert blocks < ROOMY
    assert gain(sent, MACHINE._replace(num_blocks=blocks)).mean > 0.95
