"""Tests of receipts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.engines.step_costs import StepCosts
from conure.server.runtime.node_state import NodeUsage
from conure.server.runtime.program_state import ProgramState
from conure.server.runtime.reporting.receipt import critical_path, explain, make_receipt
from conure.server.runtime.reporting.single_requests import EngineSpeed, ServerSpeed

from ....cpu_time import least_cpu_s
from ...inprocess import client, expr, generate, insert, var
from ..test_program_state import execute


def run(execution: ProgramState, times: dict[str, tuple[float, float]]) -> ProgramState:
    """Mark nodes as run at these times, and the others as skipped."""
    for node_id, state in execution.nodes.items():
        if node_id in times:
            state.phase = "done"
            state.started_at, state.finished_at = times[node_id]
        else:
            state.phase, state.finished_at = "skipped", 0.5
    execution.finished_at = max(end for _, end in times.values())
    return execution


def names(execution: ProgramState) -> list[str]:
    return [state.node.id for state in critical_path(execution)]


def test_critical_path_follows_the_last_predecessor() -> None:
    nodes = [
        expr("fast", {"lit": 1}),
        generate("slow", "s"),
        generate("join", insert("fast"), insert("slow")),
        generate("aside", "a"),
        expr("end", var("join"), after=["aside"]),
    ]
    execution = run(
        execute(nodes),
        {"fast": (0, 1), "slow": (0, 5), "join": (5, 6), "aside": (0, 5.5), "end": (6, 6.5)},
    )
    assert names(execution) == ["slow", "join", "end"]
    made = make_receipt(execution, blocks_held=0, speed=ServerSpeed({}))
    assert made.critical_path == ["slow", "join", "end"]
    assert made.critical_path_s == pytest.approx(6.5)
    # Had something else been waited for longer, that would be the path.
    execution.nodes["aside"].finished_at = 6.2
    assert names(execution) == ["aside", "end"]


def test_the_critical_path_goes_through_the_winner_of_a_race() -> None:
    nodes = [
        generate("a", "A"),
        generate("b", "B"),
        {"id": "race", "op": "wait", "variables": ["a", "b"], "mode": "any"},
        {"id": "losers", "op": "kill", "targets": ["a", "b"], "after": ["race"]},
        expr("winner", {"first": [var("a"), var("b")]}, after=["losers"]),
    ]
    times = {"a": (0, 5.1), "b": (0, 5), "race": (0, 5), "losers": (5, 5.2), "winner": (5.2, 5.3)}
    execution = run(execute(nodes), times)
    execution.nodes["a"].phase = "killed"
    assert names(execution) == ["b", "race", "losers", "winner"]


def test_the_critical_path_passes_over_skipped_nodes() -> None:
    nodes = [
        generate("a", "A"),
        {"id": "wait", "op": "wait", "variables": ["a"]},
        {"id": "wait_2", "op": "wait", "variables": ["a"], "after": ["wait"]},
        {"id": "kill", "op": "kill", "targets": ["b"], "after": ["wait_2", "wait"]},
        generate("b", "B"),
        expr("end", {"lit": 1}, after=["kill"]),
    ]
    times = {"a": (0.0, 5.0), "wait": (0.0, 5.0), "wait_2": (0.0, 5.0)}
    execution = run(execute(nodes), times | {"kill": (5.0, 6.0), "end": (6.0, 7.0)})
    execution.nodes["wait"].phase = execution.nodes["wait_2"].phase = "skipped"
    execution.nodes["a"].phase = "killed"
    assert names(execution) == ["a", "kill", "end"]


def test_overlapping_time_counts_once() -> None:
    prompt = [{"output": "a"}, {"input": "x"}, {"output": "b"}]
    nodes = [
        {"id": "p", "op": "generate", "prompt": prompt},
        client("ask", "x", args={"a": var("a")}),
    ]
    execution = run(execute(nodes), {"p": (1, 10), "ask": (3, 7)})
    made = make_receipt(execution, blocks_held=0, speed=ServerSpeed({}))
    assert made.critical_path == ["ask", "p"], "each waits for the other, and stands there once"
    assert made.critical_path_s == pytest.approx(9)
    execution = run(execute(nodes), {"p": (1, 4), "ask": (6, 7)})  # nothing ran in between
    assert make_receipt(
        execution, blocks_held=0, speed=ServerSpeed({})
    ).critical_path_s == pytest.approx(4)


def test_calls_that_were_cancelled_in_the_queue_are_not_counted() -> None:
    names = ("ran", "aborted_early", "queued")
    execution = run(execute([generate(name, name) for name in names]), dict.fromkeys(names, (1, 2)))
    execution.nodes["ran"].usage.logical = 5
    execution.nodes["aborted_early"].usage.prompt_discarded = 3
    made = make_receipt(execution, blocks_held=0, speed=ServerSpeed({}))
    assert (made.calls, made.round_trips_saved) == (2, 1)


def test_unstarted_nodes_are_not_in_the_receipt() -> None:
    nodes = [generate("off", "x", when={"lit": False}), generate("end", "y", after=["off"])]
    execution = run(execute(nodes), {"end": (1, 2)})
    execution.nodes["end"].usage.logical = 5
    made = make_receipt(execution, blocks_held=0, speed=ServerSpeed({}))
    assert (made.calls, made.critical_path, made.round_trips_saved) == (1, ["end"], 0)
    empty = execute([])
    empty.finished_at = 1.0
    made = make_receipt(empty, blocks_held=0, speed=ServerSpeed({}))
    assert (made.calls, made.critical_path, made.critical_path_s) == (0, [], 0)


def test_receipt_sums_tokens_and_single_requests() -> None:
    execution = run(
        execute([generate("a", "x"), generate("b", insert("a")), expr("e", var("b"))]),
        {"a": (0, 1), "b": (1, 2), "e": (2, 2)},
    )
    one = NodeUsage(logical=100, computed=100, decoded=5, discarded=2)
    other = NodeUsage(
        logical=100,
        computed=20,
        cached=10,
        constant=40,
        written=25,
        recomputed=7,
        decoded=5,
        retokenized=3,
        block_seconds=4,
    )
    execution.nodes["a"].usage, execution.nodes["b"].usage = one, other
    execution.nodes["a"].engine = execution.nodes["b"].engine = "engine-0"
    speed = EngineSpeed(StepCosts(0.1, 0.01, 0.0), step_tokens=50, max_sequences=8)
    made = make_receipt(execution, blocks_held=2, speed=ServerSpeed({"engine-0": speed}))
    tokens = made.prompt_tokens
    assert (tokens.logical, tokens.computed, tokens.recomputed) == (200, 120, 7)
    shared = tokens.shared
    assert (shared.cache, shared.static, shared.dynamic, shared.generated) == (10, 30, 15, 25)
    assert (made.output_tokens.decoded, made.output_tokens.discarded) == (10, 2)
    assert (made.retokenized, made.kv_block_seconds, made.blocks_held) == (3, 4, 2)
    assert (made.calls, made.round_trips_saved, made.wall_s) == (2, 1, 2)
    assert made.as_single_requests.prompt_tokens == 200
    # Per call two steps with 50 tokens of the prompt, and five with one of the output.
    assert made.as_single_requests.estimated_s == pytest.approx(2 * (2 * 0.6 + 5 * 0.11))


def test_receipt_of_a_long_chain_takes_little_cpu_time() -> None:
    nodes: list[Any] = [expr("n0", {"lit": 0})]
    nodes += [expr(f"n{i}", var(f"n{i - 1}")) for i in range(1, 5_000)]
    execution = run(execute(nodes), {f"n{i}": (i, i + 1) for i in range(5_000)})
    assert len(make_receipt(execution, blocks_held=0, speed=ServerSpeed({})).critical_path) == 5_000
    # Measured: 0.1 s. The bound only detects quadratic time.
    assert least_cpu_s(lambda: make_receipt(execution, blocks_held=0, speed=ServerSpeed({}))) < 1


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (NodeUsage(), (0, 0, 0, 0, 0, 0)),
        (NodeUsage(logical=50, computed=50, constant=40), (50, 0, 0, 0, 0, 0)),
        (NodeUsage(logical=50, computed=10, cached=5, constant=30), (10, 25, 10, 0, 5, 0)),
        (NodeUsage(logical=50, cached=90, constant=30), (0, 0, 0, 0, 50, 0)),
        (NodeUsage(logical=50, computed=20, constant=4, written=20), (20, 4, 6, 20, 0, 0)),
        # A prefix was filled for others, and then the prompt as a whole.
        (NodeUsage(logical=50, computed=80, recomputed=1), (50, 0, 0, 0, 0, 31)),
        (NodeUsage(computed=30), (0, 0, 0, 0, 0, 30)),
        # The second output of a prompt finds 30 tokens, 8 of them written, 12 of the program.
        (
            NodeUsage(
                logical=70, computed=40, constant=12, again=30, again_constant=12, again_written=8
            ),
            (40, 12, 10, 8, 0, 0),
        ),
    ],
)
def test_shared_tokens_have_one_cause(usage: NodeUsage, expected: tuple[int, ...]) -> None:
    made = explain(usage)
    assert made[1:] == expected
    assert made.logical == sum(made[1:6])


@given(st.builds(NodeUsage, *([st.integers(0, 100)] * 9)))
def test_the_causes_always_add_up(usage: NodeUsage) -> None:
    made = explain(usage)
    assert made.logical == sum(made[1:6])
    assert min(made) >= 0
    assert made.computed + made.recomputed == usage.computed + usage.recomputed
