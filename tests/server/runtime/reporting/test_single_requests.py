"""Tests of the counterfactual of a receipt, against an engine that runs step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.engines.step_costs import StepCosts
from conure.server.program.ir import ExprNode, GenerateNode
from conure.server.runtime.node_state import NodeState, NodeUsage
from conure.server.runtime.reporting.request_times import RequestTimes
from conure.server.runtime.reporting.single_requests import EngineSpeed, ServerSpeed, estimate_s

COSTS = StepCosts(step_s=0.005, token_s=0.0001, held_token_s=1e-6)
STEP_TOKENS = 64
SPEED = EngineSpeed(COSTS, STEP_TOKENS, max_sequences=4)


def call(name: str, num_prompt: int, num_output: int, engine: str = "engine-0") -> NodeState:
    """Return a call that has run."""
    state = NodeState(GenerateNode(id=name, prompt=[]))
    state.usage = NodeUsage(logical=num_prompt, decoded=num_output)
    state.engine = engine
    state.started_at, state.finished_at = 0.0, 1.0
    return state


def expression(name: str, started_at: float, finished_at: float) -> NodeState:
    """Return a node without a model that has run."""
    state = NodeState(ExprNode(id=name, expr={"lit": 1}, output=name))
    state.started_at, state.finished_at = started_at, finished_at
    return state


def estimated(
    states: list[NodeState],
    waited_for: Mapping[str, list[str]] | None = None,
    engines: Mapping[str, EngineSpeed] | None = None,
    request_times: RequestTimes | None = None,
) -> float:
    """Estimate the nodes; `waited_for` has names."""
    by_name = {state.node.id: state for state in states}

    def before(state: NodeState) -> Iterable[NodeState]:
        return [by_name[name] for name in (waited_for or {}).get(state.node.id, [])]

    known = {"engine-0": SPEED} if engines is None else engines
    return estimate_s(states, before, ServerSpeed(known, request_times or RequestTimes()))


def step_by_step_s(calls: list[tuple[int, int]], speed: EngineSpeed) -> float:
    """Return the seconds of calls that are all ready at once, by whole steps of an engine.

    A step computes at most `step_tokens` tokens, first those of outputs.
    """
    now = 0.0
    waiting = list(calls)
    filling: list[list[int]] = []
    """Tokens that are left, of the prompt and of its output."""
    held = 0
    running: list[list[int]] = []
    """Tokens that are left, and of the context."""
    while waiting or filling or running:
        budget = speed.step_tokens - len(running)
        num_tokens = len(running)
        for output in running:
            output[0] -= 1
            output[1] += 1
        started: list[list[int]] = []
        while budget > 0:
            if not filling:
                if not waiting or len(running) + len(started) >= speed.max_sequences:
                    break
                num_prompt, num_output = waiting.pop(0)
                filling.append([num_prompt, num_output, num_prompt])
            prompt = filling[0]
            num_new = min(budget, prompt[0])
            prompt[0] -= num_new
            budget -= num_new
            num_tokens += num_new
            if not prompt[0]:
                started.append([prompt[1] - 1, prompt[2] + 1])
                filling.clear()
        held = sum(output[1] for output in running + started)
        held += sum(prompt[2] - prompt[0] for prompt in filling)
        costs = speed.costs
        now += costs.step_s + num_tokens * costs.token_s + held * costs.held_token_s
        running = [output for output in running + started if output[0] > 0]
    return now


@given(
    st.lists(st.tuples(st.integers(64, 600), st.integers(10, 80)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.sampled_from([0.0, 1e-6, 2e-5]),
)
def test_the_estimate_is_that_of_an_engine_that_runs_step_by_step(
    calls: list[tuple[int, int]], max_sequences: int, held_token_s: float
) -> None:
    costs = COSTS._replace(held_token_s=held_token_s)
    speed = EngineSpeed(costs, STEP_TOKENS, max_sequences)
    states = [call(f"c{i}", *each) for i, each in enumerate(calls)]
    expected_s = step_by_step_s(calls, speed)
    assert estimated(states, engines={"engine-0": speed}) == pytest.approx(expected_s, rel=0.12)


def test_outputs_of_a_stage_share_their_steps() -> None:
    costs = StepCosts(step_s=1.0, token_s=0.0, held_token_s=0.0)
    speed = EngineSpeed(costs, step_tokens=10, max_sequences=8)
    stage = [call(f"m{i}", 10, 30) for i in range(4)]
    assert estimated(stage, engines={"engine-0": speed}) == pytest.approx(4 + 30)
    apart = [call(f"m{i}", 10, 30, engine=f"engine-{i}") for i in range(4)]
    engines = {f"engine-{i}": speed for i in range(4)}
    assert estimated(apart, engines=engines) == pytest.approx(1 + 30)


def test_a_call_waits_for_a_row_of_the_engine() -> None:
    costs = StepCosts(step_s=1.0, token_s=0.0, held_token_s=0.0)
    stage = [call(f"m{i}", 10, 30) for i in range(5)]
    speed = EngineSpeed(costs, step_tokens=10, max_sequences=1)
    assert estimated(stage, engines={"engine-0": speed}) == pytest.approx(5 * (1 + 30))


def test_a_chain_takes_the_sum_of_its_calls() -> None:
    names = [f"c{i}" for i in range(4)]
    one_s = estimated([call("c", 100, 50)])
    chain = {later: [earlier] for earlier, later in pairwise(names)}
    assert estimated([call(name, 100, 50) for name in names], chain) == pytest.approx(4 * one_s)


def test_the_kv_tokens_of_an_output_cost_time_in_each_step() -> None:
    costs = StepCosts(step_s=0.0, token_s=0.0, held_token_s=1.0)
    speed = EngineSpeed(costs, step_tokens=1_000, max_sequences=1)
    # In a tenth of a step the context grows from 0 to 100 tokens, then by one per step.
    assert estimated([call("c", 100, 50)], engines={"engine-0": speed}) == pytest.approx(
        0.1 * 50 + 50 * 125
    )


def test_nodes_without_a_model_take_as_long_as_they_took() -> None:
    one_s = estimated([call("a", 100, 50)])
    states = [call("a", 100, 50), expression("e", 4.5, 6.5)]
    states[0].finished_at = 4.0
    # It began when its input was there, and its time includes what the server needed.
    assert estimated(states, {"e": ["a"]}) == pytest.approx(one_s + 2.0)


def test_calls_on_an_unknown_engine_take_as_long_as_they_took() -> None:
    states = [call("a", 100, 50), call("b", 100, 50, engine="lost")]
    states[1].started_at, states[1].finished_at = 1.0, 4.0
    one_s = estimated(states[:1])
    assert estimated(states) == pytest.approx(max(one_s, 3.0))
    assert estimated(states, engines={}) == pytest.approx(3.0)


def test_nodes_that_wait_for_each_other_are_estimated_once() -> None:
    states = [call("a", 100, 50), call("b", 100, 50)]
    assert estimated(states, {"a": ["b"], "b": ["a"]}) == pytest.approx(2 * estimated(states[:1]))


def test_a_call_that_starts_while_others_run_does_not_change_what_they_did_before() -> None:
    costs = StepCosts(step_s=1.0, token_s=0.0, held_token_s=0.0)
    speed = EngineSpeed(costs, step_tokens=10, max_sequences=8)
    states = [call("a", 10, 30), expression("e", 0.0, 11.5), call("b", 10, 10)]
    # The prompt of `b` and its output fall into the steps of `a`.
    assert estimated(states, {"b": ["e"]}, engines={"engine-0": speed}) == pytest.approx(1 + 30)
    states[2] = call("b", 10, 40)
    later_s = estimated(states, {"b": ["e"]}, engines={"engine-0": speed})
    assert later_s == pytest.approx(11.5 + 1 + 40)


REQUEST = RequestTimes(busy_s=2.0, wait_s=1.0)
ONE_STEP = EngineSpeed(StepCosts(step_s=1.0, token_s=0.0, held_token_s=0.0), 10, max_sequences=8)


def test_every_call_of_a_chain_takes_the_time_of_a_request() -> None:
    chain = [call(f"c{i}", 10, 30) for i in range(3)]
    waits = {"c1": ["c0"], "c2": ["c1"]}
    found = estimated(chain, waits, {"engine-0": ONE_STEP}, REQUEST)
    assert found == pytest.approx(3 * (2 + 1 + 1 + 30))


def test_the_server_receives_one_request_after_another() -> None:
    stage = [call(f"m{i}", 10, 30) for i in range(4)]
    found = estimated(stage, engines={"engine-0": ONE_STEP}, request_times=REQUEST)
    assert found == pytest.approx(4 * 2 + 1 + 1 + 30)


@pytest.mark.parametrize("busy_s", [0.0, 1e-9])
def test_calls_that_are_ready_together_keep_the_order_of_the_program(busy_s: float) -> None:
    speed = ONE_STEP._replace(max_sequences=1)
    calls = [call("m0", 10, 5), call("m2", 10, 5), call("m10", 10, 50)]
    after = expression("e", 1.0, 101.0)
    times = RequestTimes(busy_s, 0.0)
    found = estimated([*calls, after], {"e": ["m2"]}, {"engine-0": speed}, times)
    assert found == pytest.approx(2 * (1 + 5) + 100)
