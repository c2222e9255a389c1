"""Programs in virtual time: durations that follow from costs, and effects of policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from conure.server.program.ir import Program
from conure.server.scheduling.policy import POLICIES
from simulation.engine import LinearCosts
from simulation.simulation import Simulation, SimulationConfig
from simulation.workload_profile import WorkloadProfile

COST = LinearCosts(prompt_s=0.0, prompt_token_s=1e-3, step_s=0.02, sequence_s=0.0, held_token_s=0.0)
WHOLE = SimulationConfig(policy="conure", cost=COST, round_trip_s=lambda: 0.2)
REQUESTS = replace(
    WHOLE,
    policy="fcfs",
    whole_programs=False,
    has_prefix_cache=False,
    reads_shared_once=False,
)


def call(name: str, *prompt: Any, max_tokens: int = 10) -> dict[str, Any]:
    """Return a call: strings are texts, `(name,)` reads a variable."""
    segments = [
        {"input": part[0]} if isinstance(part, tuple) else {"text": part} for part in prompt
    ]
    segments.append({"output": name, "max_tokens": max_tokens})
    return {"id": name, "op": "generate", "prompt": segments}


def blueprint(nodes: list[dict[str, Any]], *outputs: str, **lengths: int) -> WorkloadProfile:
    program = msgspec.convert({"nodes": nodes, "outputs": list(outputs)}, Program)
    return WorkloadProfile.of(program, lengths)


CHAIN = blueprint(
    [call("a", "head"), call("b", "head", ("a",)), call("c", "head", ("b",))], "c", head=100
)
MAPS = [call(f"m{i}", "head", f"t{i}") for i in range(4)]
MAP = blueprint(
    [*MAPS, call("r", *((f"m{i}",) for i in range(4)))],
    "r",
    head=100,
    **{f"t{i}": 50 for i in range(4)},
)


def took(setting: SimulationConfig, *programs: WorkloadProfile) -> list[float]:
    simulation = Simulation(setting)
    outcomes = [simulation.submit(program, 0.0) for program in programs]
    simulation.run()
    return [outcome.took_s for outcome in outcomes]


def test_chain_takes_its_calls_and_one_round_trip() -> None:
    # 100 tokens of head once, two values of ten tokens; three times ten steps.
    assert took(WHOLE, CHAIN) == [pytest.approx(0.2 + 0.120 + 3 * 0.2)]


def test_separate_requests_add_round_trips_and_prefills() -> None:
    assert took(REQUESTS, CHAIN) == [pytest.approx(3 * 0.2 + 0.320 + 3 * 0.2)]


def test_calls_of_a_stage_run_together() -> None:
    (whole,) = took(WHOLE, MAP)
    # Prefills run one after another, and outputs end ten steps after the last prefill.
    assert whole == pytest.approx(0.2 + 0.100 + 4 * 0.050 + 0.2 + 0.040 + 0.2, rel=0.01)


def test_program_with_little_work_left_goes_first() -> None:
    wide = blueprint([call(f"w{i}", "body", max_tokens=50) for i in range(3)], "w0", body=100)
    narrow = blueprint([call("n", "other", max_tokens=50)], "n", other=100)
    setting = replace(WHOLE, capacity=150)
    by_work, by_arrival = (
        took(replace(setting, has_remaining_work=each), wide, wide, narrow)[2]
        for each in (True, False)
    )
    assert by_work < by_arrival


def test_program_is_held_while_its_prefill_would_delay_more_programs() -> None:
    slow = replace(WHOLE, cost=COST._replace(prompt_token_s=1.0), capacity=10_000)
    chats = [blueprint([call("out", f"t{i}")], "out", **{f"t{i}": 1}) for i in range(6)]
    wide = blueprint([call(f"w{i}", f"b{i}") for i in range(2)], "w0", "w1", b0=100, b1=100)
    held, begun = (
        took(replace(slow, holds_programs=each), *chats, wide)[0] for each in (True, False)
    )
    assert held < begun / 10


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_complete_and_deterministic(policy: str) -> None:
    setting = replace(WHOLE, policy=policy, num_engines=3, capacity=500, latency_tokens=300)
    programs = [CHAIN, MAP] * 10
    first = took(setting, *programs)
    assert first == took(setting, *programs)
    assert all(0 < seconds < 100 for seconds in first)


def test_program_order_reduces_mean_time() -> None:
    """One call fits at a time: round-robin ends all programs late, program order ends half
    early.
    """
    tight = replace(WHOLE, capacity=130)
    chains = [CHAIN] * 8
    in_order = took(tight, *chains)
    in_turns = took(replace(tight, policy="fcfs"), *chains)
    assert sum(in_order) < 0.75 * sum(in_turns)
    assert max(in_order) <= max(in_turns) + 1e-6


def test_then_is_called_with_the_result() -> None:
    simulation = Simulation(WHOLE)
    answered: list[float] = []
    simulation.submit(CHAIN, 1.0, lambda: answered.append(simulation.clock.now))
    simulation.run()
    assert answered == [simulation.outcomes[0].ended_s]
    assert simulation.outcomes[0].num_output == 30
