"""Performance objectives of calls, derived from those of outputs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conure.server.program.graph.graph import Graph
from conure.server.program.graph.objectives import (
    PerformanceObjective,
    get_perf_objective,
    is_background,
)
from conure.server.program.graph.slot_graph import SlotGraph
from conure.server.program.ir import Append, Program


def call(name: str, *reads: str, **fields: Any) -> dict[str, Any]:
    """A call that writes a variable with the name of the call."""
    prompt = [*({"input": read} for read in reads), {"output": name}]
    return {"id": name, "op": "generate", "prompt": prompt, **fields}


def expr(name: str, *reads: str) -> dict[str, Any]:
    code = [{"var": read} for read in reads]
    return {"id": name, "op": "expr", "expr": code, "output": name}


def graph_of(nodes: list[dict[str, Any]], **objectives: Any) -> Graph:
    program = msgspec.convert({"nodes": nodes, "outputs": list(objectives)}, Program)
    return Graph.build(program, {}, open=True, objectives=objectives)


def deduce(nodes: list[dict[str, Any]], **objectives: Any) -> dict[str, str]:
    """Each call as `latency`, `throughput` or the name of its group, with its depth."""
    found = get_perf_objective(graph_of(nodes, **objectives))
    for performance in found.values():
        assert performance.group is None or performance.kind == "latency"
    return {name: f"{p.group or p.kind} {p.depth}" for name, p in found.items()}


def test_figure_9_of_the_paper() -> None:
    # Two latency outputs x and y, one call before both, and two parallel stages before that.
    nodes = [
        *(call(f"b{i}") for i in range(3)),
        *(call(f"a{i}", "b0", "b1", "b2") for i in range(4)),
        call("c", "a0", "a1", "a2", "a3"),
        call("x", "c"),
        call("y", "c"),
    ]
    assert deduce(nodes, x="latency", y="latency") == {
        "x": "latency 0",
        "y": "latency 0",
        "c": "latency 1",
        **{f"a{i}": "a0 2" for i in range(4)},
        **{f"b{i}": "b0 3" for i in range(3)},
    }


LATENCY = {"out": "latency"}
TABLE: dict[str, tuple[list[str], dict[str, str], dict[str, str]]] = {
    # The calls with the calls they read after `<`; the objectives; the expected kind or task
    # group and depth of each call.
    "one call": (["out"], LATENCY, {"out": "latency 0"}),
    "a chain summary": (
        ["s0", "s1 < s0", "s2 < s1", "out < s2"],
        LATENCY,
        {"s0": "latency 3", "s1": "latency 2", "s2": "latency 1", "out": "latency 0"},
    ),
    "a map and its reduce": (
        ["m0", "m1", "m2", "out < m0 m1 m2"],
        LATENCY,
        {"m0": "m0 1", "m1": "m0 1", "m2": "m0 1", "out": "latency 0"},
    ),
    "a map and its reduce, in bulk": (
        ["m0", "m1", "m2", "out < m0 m1 m2"],
        {"out": "throughput"},
        {**{f"m{i}": "throughput 1" for i in range(3)}, "out": "throughput 0"},
    ),
    "a tree of summaries": (
        ["a", "b", "c", "d", "ab < a b", "cd < c d", "out < ab cd"],
        LATENCY,
        # The middle calls are a group, and so are the calls they depend on.
        {
            **dict.fromkeys("abcd", "a 2"),
            **dict.fromkeys(("ab", "cd"), "ab 1"),
            "out": "latency 0",
        },
    ),
    "a diamond": (
        ["a", "b < a", "c < a", "out < b c"],
        LATENCY,
        {"a": "latency 2", "b": "b 1", "c": "b 1", "out": "latency 0"},
    ),
    "a system prompt's users": (
        ["u0", "u1", "u2"],
        {f"u{i}": "latency" for i in range(3)},
        {f"u{i}": "latency 0" for i in range(3)},
    ),
    "agents that write and review": (
        ["plan", "c0 < plan", "c1 < plan", "r0 < c0 c1", "r1 < c0 c1", "out < r0 r1"],
        LATENCY,
        {
            "plan": "latency 3",
            "c0": "c0 2",
            "c1": "c0 2",
            "r0": "r0 1",
            "r1": "r0 1",
            "out": "latency 0",
        },
    ),
    "a debate of two in two rounds": (
        ["a0", "b0", "a1 < a0 b0", "b1 < a0 b0", "out < a1 b1"],
        LATENCY,
        {"a0": "a0 2", "b0": "a0 2", "a1": "a1 1", "b1": "a1 1", "out": "latency 0"},
    ),
    "a chat beside bulk over one document": (
        ["doc", "out < doc", "i0 < doc", "i1 < doc", "index < i0 i1"],
        {"out": "latency", "index": "throughput"},
        {
            "doc": "latency 2",
            "out": "latency 0",
            "i0": "throughput 1",
            "i1": "throughput 1",
            "index": "throughput 0",
        },
    ),
    "two maps of one reduce, one of them deeper": (
        ["a0", "a1", "b0 < a0", "b1 < a1", "c0", "c1", "out < b0 b1 c0 c1"],
        LATENCY,
        {
            "a0": "a0 2",
            "a1": "a0 2",
            **dict.fromkeys(("b0", "b1", "c0", "c1"), "b0 1"),
            "out": "latency 0",
        },
    ),
    "an output on the way to another": (
        ["draft", "out < draft"],
        {"draft": "latency", "out": "latency"},
        {"draft": "latency 1", "out": "latency 0"},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_performance_follows_from_output_objectives(name: str) -> None:
    lines, objectives, expected = TABLE[name]
    nodes = []
    for line in lines:
        written, _, reads = line.partition(" < ")
        nodes.append(call(written, *reads.split()))
    assert deduce(nodes, **objectives) == expected


def test_a_growing_group_keeps_its_name() -> None:
    """Instances are appended while the list grows; their consumer exists from the start."""
    parts = [f"m{i}" for i in range(3)]
    program = {"nodes": [call("out", *parts)], "outputs": ["out"], "variables": {}}
    program["variables"] = {part: {} for part in parts}
    graph = Graph.build(msgspec.convert(program, Program), {}, open=True)
    groups: list[dict[str, str | None]] = []
    for part in parts:
        graph.append(msgspec.convert({"nodes": [call(part)]}, Append))
        found = get_perf_objective(graph)
        assert {p.kind for p in found.values()} == {"latency"}
        groups.append({name: p.group for name, p in found.items() if name != "out"})
    assert groups == [
        {"m0": None},
        {"m0": "m0", "m1": "m0"},
        {"m0": "m0", "m1": "m0", "m2": "m0"},
    ]


def test_the_maps_of_a_map_reduce_form_a_group() -> None:
    maps = [call(f"m{i}") for i in range(3)]
    assert deduce([*maps, call("r", "m0", "m1", "m2")], r="latency") == {
        "m0": "m0 1",
        "m1": "m0 1",
        "m2": "m0 1",
        "r": "latency 0",
    }


def test_expressions_and_client_steps_are_transparent() -> None:
    client = {"id": "e", "op": "client", "name": "f", "args": {"x": {"var": "j"}}, "output": "e"}
    nodes = [call("m"), call("n"), expr("j", "m", "n"), client, call("r", "e"), expr("out", "r")]
    assert deduce(nodes, out="latency") == {"m": "m 1", "n": "m 1", "r": "latency 0"}


def test_every_call_of_a_chain_is_latency() -> None:
    nodes = [call("a"), call("b", "a"), call("c", "b")]
    assert deduce(nodes, c="latency") == {"a": "latency 2", "b": "latency 1", "c": "latency 0"}


def test_throughput_applies_to_all_ancestors() -> None:
    nodes = [call("a"), call("b", "a"), call("c", "b"), call("aside", "a")]
    assert deduce(nodes, c="throughput") == {
        "a": "throughput 2",
        "b": "throughput 1",
        "c": "throughput 0",
        "aside": "throughput 0",
    }


@pytest.mark.parametrize("strict", ["latency", "ttft", "tpot", {"deadline_s": 3}])
def test_the_stricter_objective_wins(strict: Any) -> None:
    nodes = [call("a"), call("b", "a"), call("c", "a")]
    assert deduce(nodes, b="throughput", c=strict) == {
        "a": "latency 1",
        "b": "throughput 0",
        "c": "latency 0",
    }


def test_a_later_output_tightens_earlier_calls() -> None:
    graph = graph_of([call("a"), call("b", "a")], b="throughput")
    assert {p.kind for p in get_perf_objective(graph).values()} == {"throughput"}
    nodes = [call("c", "a", "d"), call("d")]
    graph.append(msgspec.convert({"nodes": nodes, "outputs": ["c"]}, Append))
    assert get_perf_objective(graph) == {
        "a": PerformanceObjective("latency", "a", 1),
        "b": PerformanceObjective("throughput", None, 0),
        "c": PerformanceObjective("latency", None, 0),
        "d": PerformanceObjective("latency", "a", 1),
    }


def test_a_variable_that_a_client_waits_for_counts_as_an_output() -> None:
    graph = graph_of([call("a"), call("b", "a"), call("c", "b")])
    assert {p.kind for p in get_perf_objective(graph).values()} == {"throughput"}
    graph.tighten_objective("b", "latency")
    assert get_perf_objective(graph) == {
        "a": PerformanceObjective("latency", None, 1),
        "b": PerformanceObjective("latency", None, 0),
        "c": PerformanceObjective("throughput", None, 0),
    }


def test_a_group_counts_as_one_consumer() -> None:
    nodes = [
        *(call(f"p{i}") for i in range(2)),
        *(call(f"m{i}", f"p{i}") for i in range(2)),
        *(call(f"n{i}") for i in range(2)),
        call("r", "m0", "m1"),
        call("s", "n0", "n1"),
    ]
    # m0 and m1 are a group, so p0 and p1 are one too; n0 and n1 are a separate group.
    assert deduce(nodes, r="latency", s="latency") == {
        "p0": "p0 2",
        "p1": "p0 2",
        "m0": "m0 1",
        "m1": "m0 1",
        "n0": "n0 1",
        "n1": "n0 1",
        "r": "latency 0",
        "s": "latency 0",
    }


def test_parallel_outputs_form_no_group() -> None:
    names = {f"c{i}": "latency" for i in range(3)}
    assert deduce([call(name) for name in names], **names) == dict.fromkeys(names, "latency 0")


def test_the_producer_of_an_output_is_ungrouped() -> None:
    nodes = [call("a"), call("b"), call("c"), call("r", "a", "b", "c")]
    assert deduce(nodes, r="latency", a="latency") == {
        "a": "latency 1",
        "b": "b 1",
        "c": "b 1",
        "r": "latency 0",
    }


def test_a_stage_is_the_longest_distance() -> None:
    # `a` feeds the last call directly too, but is needed two stages earlier.
    nodes = [call("a"), call("b", "a"), call("c"), call("r", "a", "b", "c")]
    assert deduce(nodes, r="latency") == {
        "a": "latency 2",
        "b": "b 1",
        "c": "b 1",
        "r": "latency 0",
    }


def test_after_counts_as_a_dependency() -> None:
    nodes = [call("a"), call("b", after=["a"])]
    assert deduce(nodes, b="latency")["a"] == "latency 1"


def test_a_growing_prompt_follows_its_strictest_output() -> None:
    def two(name: str) -> dict[str, Any]:
        prompt = [{"output": f"{name}_first"}, {"output": name}]
        return {"id": name, "op": "generate", "prompt": prompt}

    nodes = [two("m"), two("n"), call("r", "m", "n")]
    assert deduce(nodes, r="latency") == {"m": "m 2", "n": "m 2", "r": "latency 0"}
    assert deduce(nodes, r="throughput", m_first="latency") == {
        "m": "latency 2",
        "n": "throughput 2",
        "r": "throughput 0",
    }


def test_alternating_prompts_are_analysed_by_slot() -> None:
    def growing(name: str, other: str) -> dict[str, Any]:
        prompt = [{"output": f"{name}1"}, {"input": f"{other}1"}, {"output": f"{name}2"}]
        return {"id": name, "op": "generate", "prompt": prompt}

    assert deduce([growing("a", "b"), growing("b", "a")], a2="latency") == {
        "a": "latency 1",
        "b": "a 1",
    }


def test_ended_nodes_can_be_omitted() -> None:
    nodes = [call("a"), call("b"), call("c", "a", "b"), expr("e", "c"), call("d", "e"), call("f")]
    graph = graph_of(nodes, d="latency", f="throughput")
    whole = get_perf_objective(graph)
    assert get_perf_objective(graph, SlotGraph.of(graph, graph.nodes)) == whole
    for ended in ({"a", "b"}, {"a", "b", "c"}, {"a", "b", "c", "e", "d"}):
        left = [name for name in graph.nodes if name not in ended]
        expected = {name: whole[name] for name in left if name in whole}
        assert get_perf_objective(graph, SlotGraph.of(graph, left)) == expected


def test_program_with_one_reader_is_no_background_program() -> None:
    assert is_background({"a": "throughput", "b": "throughput"})
    assert not is_background({"a": "throughput", "b": "latency"})
