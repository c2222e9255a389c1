"""An engine that works in steps: what shares a step, and the steps of the recorded real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apps.scaled_workloads import workload
from conure.server.scheduling.request import PromptPrefix, ResourceRequest
from pressure.sides import SimulatedMachine, requests, whole
from simulation.clock import SimulationClock
from simulation.engine import LinearCosts, SimulatedCall
from simulation.stepwise_engine import StepLimits, StepwiseEngine

COST = LinearCosts(prompt_s=0.0, prompt_token_s=1.0, step_s=100.0, sequence_s=0.0, held_token_s=0.0)
LIKE_THE_REAL = LinearCosts(0.0, 65e-6, 1.8e-3, 1e-4, 0.0)
RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "matrix"


class World:
    """An engine, and when its calls were prefilled and ended."""

    def __init__(self, limits: StepLimits) -> None:
        self.clock = SimulationClock()
        self.engine = StepwiseEngine("e", self.clock, COST, limits)
        self.prefilled: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def start(
        self,
        name: str,
        num_prompt: int,
        num_output: int,
        rank: float = 0.0,
        boundaries: tuple[PromptPrefix, ...] = (),
    ) -> SimulatedCall:
        request = ResourceRequest(program=name, num_prompt=num_prompt, num_output=num_output)
        call = SimulatedCall(
            request,
            num_prompt,
            num_output,
            rank,
            on_prefilled=lambda: self.prefilled.update({name: self.clock.now}),
            on_finished=lambda: self.ended.update({name: self.clock.now}),
            boundaries=boundaries,
        )
        self.engine.start(call)
        return call


def test_a_prompt_is_computed_in_chunks_and_its_last_step_generates() -> None:
    world = World(StepLimits(num_tokens=10))
    world.start("a", num_prompt=25, num_output=3)
    world.clock.run()
    assert world.prefilled == {"a": 3 * 100 + 25}
    assert world.ended == {"a": 5 * 100 + 25}
    assert world.engine.num_steps == 5


def test_outputs_continue_beside_a_prompt_of_better_rank() -> None:
    world = World(StepLimits(num_tokens=10))
    world.start("a", num_prompt=1, num_output=4, rank=2.0)

    def start_other() -> None:
        world.start("b", num_prompt=18, num_output=1, rank=1.0)

    world.clock.at(50, start_other)
    world.clock.run()
    # Its nine tokens per step leave one for the output.
    assert world.ended == {"a": 401 + 18, "b": 301 + 18}


def test_rows_beyond_the_limit_wait_for_calls_of_better_rank() -> None:
    world = World(StepLimits(num_tokens=10, num_sequences=1))
    world.start("late", num_prompt=1, num_output=1, rank=2.0)
    world.start("soon", num_prompt=1, num_output=2, rank=1.0)
    world.clock.run()
    assert world.ended == {"soon": 201, "late": 302}


def test_a_prefix_is_computed_once_also_within_a_step() -> None:
    world = World(StepLimits(num_tokens=100))
    shared = (PromptPrefix(b"head", 20),)
    world.start("a", num_prompt=25, num_output=1, boundaries=shared)
    world.start("b", num_prompt=30, num_output=1, boundaries=shared)
    world.clock.run()
    assert world.ended == {"a": 135, "b": 135}


def test_a_cancelled_call_ends_without_a_report() -> None:
    world = World(StepLimits())
    call = world.start("a", num_prompt=1, num_output=9)
    world.clock.at(150, lambda: world.engine.cancel(call))
    world.clock.run()
    assert not world.ended
    assert world.engine.num_steps == 2


def recorded() -> list[Any]:
    cells = [
        cell
        for path in sorted(RECORDS.glob("own-engine*.json"))
        for cell in json.loads(path.read_text("utf-8"))["cells"]
        if cell["programs"] == 1 and cell["round_trip_ms"] == 0
    ]
    names = ("chain summary", "map-reduce summary", "multi-agent coding")
    return [
        pytest.param(cell, id=f"{cell['workload']}, {cell['blocks']}")
        for cell in cells
        if cell["workload"] in names
    ]


@pytest.mark.parametrize("cell", recorded())
def test_the_real_engine_took_as_many_steps(cell: dict[str, Any]) -> None:
    sent = workload(cell["workload"], 1)
    machine = SimulatedMachine(LIKE_THE_REAL, cell["blocks"])
    for side, run in (("requests", requests), ("whole", whole)):
        if side in cell["systems"]:
            steps = run(sent, machine).num_steps
            assert steps == pytest.approx(cell["systems"][side]["steps"], rel=0.02), side
