"""Latest starts and remaining times of calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.graph.critical_path import (
    get_latest_starts,
    get_remaining,
    longest_chain,
)
from conure.server.program.graph.graph import Graph, Slot
from conure.server.program.graph.slot_graph import SlotGraph
from conure.server.program.ir import Deadline, Program

SECONDS = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 3.0}


def graph_of(edges: dict[str, list[str]], **objectives: Any) -> Graph:
    nodes = [
        {
            "id": name,
            "op": "generate",
            "prompt": [*({"input": read} for read in reads), {"output": name}],
        }
        for name, reads in edges.items()
    ]
    program = msgspec.convert({"nodes": nodes, "outputs": list(objectives)}, Program)
    return Graph.build(program, {}, objectives=objectives)


def seconds(slot: Slot) -> float:
    return SECONDS.get(slot.node, 1.0)


DIAMOND: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


def starts(graph: Graph, **fields: Any) -> dict[str, float]:
    return get_latest_starts(graph, seconds, **fields)


def diamond(**objectives: Any) -> Graph:
    return graph_of(
        DIAMOND,
        **{
            name: Deadline(value) if isinstance(value, float) else value
            for name, value in objectives.items()
        },
    )


def test_slack_is_smallest_on_the_critical_path() -> None:
    found = starts(diamond(d=20.0))
    assert found == {"d": 17.0, "c": 12.0, "b": 15.0, "a": 11.0}
    # Started as early as can be: a at 0, b and c at 1, d at 6.
    slack = {name: found[name] - early for name, early in zip("abcd", (0, 1, 1, 6), strict=True)}
    assert slack == {"a": 11.0, "c": 11.0, "d": 11.0, "b": 14.0}


def test_the_earlier_deadline_wins() -> None:
    assert starts(diamond(b=5.0, d=20.0)) == {"d": 17.0, "c": 12.0, "b": 3.0, "a": 2.0}


def test_a_program_deadline_applies_to_all_calls() -> None:
    assert starts(diamond(d="latency"), deadline_s=20.0) == starts(diamond(d=20.0))
    assert starts(diamond(d=20.0, b="latency"), deadline_s=10.0)["b"] == 5.0
    assert starts(graph_of({"a": []}), deadline_s=10.0) == {"a": 9.0}, "nobody reads it"


def test_without_deadline_there_are_no_latest_starts() -> None:
    graph = diamond(d="latency", b="throughput")
    assert starts(graph) == {}
    assert not graph.deadlines
    assert diamond(d=20.0).deadlines == {"d": 20.0}


def test_an_impossible_deadline_gives_negative_starts() -> None:
    assert starts(diamond(d=5.0))["a"] == -4.0


def test_ended_nodes_can_be_omitted() -> None:
    graph = diamond(d=20.0)
    assert starts(graph, slot_graph=SlotGraph.of(graph, ["b", "c", "d"])) == {
        "d": 17.0,
        "c": 12.0,
        "b": 15.0,
    }


def test_remaining_time_includes_the_longest_chain() -> None:
    graph = diamond(d="latency")
    assert get_remaining(graph, seconds) == {"a": 9.0, "b": 5.0, "c": 8.0, "d": 3.0}
    part = SlotGraph.of(graph, ["b", "d"])
    assert get_remaining(graph, seconds, slot_graph=part) == {"b": 5.0, "d": 3.0}


def test_a_growing_prompt_starts_with_its_first_output() -> None:
    prompt = [{"text": "x"}, {"output": "one"}, {"output": "two"}]
    nodes = [{"id": "n", "op": "generate", "prompt": prompt}]
    program = msgspec.convert({"nodes": nodes, "outputs": ["two"]}, Program)
    assert starts(Graph.build(program, {}), deadline_s=10.0) == {"n": 8.0}


@given(st.data())
def test_latest_starts_leave_time_for_successors(data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(data.draw(st.integers(1, 8)))]
    edges = {
        name: data.draw(st.lists(st.sampled_from(names[:i]), unique=True)) if i else []
        for i, name in enumerate(names)
    }
    graph = graph_of(edges, **{names[-1]: "latency"})
    found = starts(graph, deadline_s=100.0)
    assert found[names[-1]] == pytest.approx(99.0)
    for name, reads in edges.items():
        for read in reads:
            if name in found:
                assert found[read] <= found[name] - 1.0
    remaining = get_remaining(graph, seconds)
    for name, start in found.items():
        assert remaining[name] >= 100.0 - start - 1e-9


def test_longest_chain_counts_calls_and_those_in_a_template_once() -> None:
    assert longest_chain(graph_of(DIAMOND)) == 3
    assert longest_chain(graph_of({"a": [], "b": []})) == 1
    assert longest_chain(graph_of({})) == 0
    call = {"id": "c", "op": "generate", "prompt": [{"input": "a"}, {"output": "c"}]}
    loop = {
        "id": "l",
        "op": "loop",
        "carry": {"a": ["x", {"var": "c"}]},
        "body": [call],
        "count": 9,
    }
    last = {"id": "d", "op": "generate", "prompt": [{"input": "a"}, {"output": "d"}]}
    graph = Graph.build(msgspec.convert({"nodes": [loop, last]}, Program), {})
    assert longest_chain(graph) == 2
