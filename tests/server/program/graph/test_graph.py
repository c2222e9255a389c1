"""The graph of a program: checks with paths, order, and appends."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.errors import ConflictError, ProgramError
from conure.server.program.graph.graph import Graph, Slot
from conure.server.program.graph.inputs import check_inputs, missing_inputs
from conure.server.program.ir import (
    Append,
    ClientNode,
    Deadline,
    GenerateNode,
    Job,
    Objective,
    Program,
    Segment,
    Submission,
)


def expr(name: str, *reads: str, **fields: Any) -> dict[str, Any]:
    """A node `name` that computes variable `v_name` from variables."""
    code = [{"var": read} for read in reads]
    return {"id": name, "op": "expr", "expr": code, "output": f"v_{name}", **fields}


def prompt(name: str, *segments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": name, "op": "generate", "prompt": list(segments), **fields}


def chat(name: str, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    node: dict[str, Any] = {"id": name, "op": "generate", "messages": list(messages)}
    return {**node, "output": {"variable": f"v_{name}"}, **fields}


def text(name: str, prompt: str, **output: Any) -> dict[str, Any]:
    """A call whose prompt is one text."""
    return {
        "id": name,
        "op": "generate",
        "prompt": prompt,
        "output": {"variable": f"v_{name}", **output},
    }


def build(*nodes: dict[str, Any], **fields: Any) -> Graph:
    """The graph of a program; `inputs`, `objectives`, `open` go to the submission."""
    outer: dict[str, Any] = {
        key: fields.pop(key) for key in ("inputs", "objectives", "open") if key in fields
    }
    program: dict[str, Any] = {"nodes": nodes, **fields}
    submission = msgspec.convert({"program": program, **outer}, Submission)
    return Graph.build(
        submission.program,
        submission.inputs,
        open=submission.open,
        objectives=submission.objectives,
    )


def append(graph: Graph, *nodes: dict[str, Any], **fields: Any) -> tuple[str, ...]:
    return graph.append(msgspec.convert({"nodes": nodes, **fields}, Append))


def order(graph: Graph) -> list[str]:
    return [f"{slot.node}.{slot.index}" for slot in graph.topological()]


OUT = {"output": "out"}
BAD_NODES: list[tuple[dict[str, Any], str, str, str]] = [
    (
        expr("a", "nope"),
        "program.unknown_variable",
        "expr",
        "unknown variable `nope`: no node writes it",
    ),
    (expr("a", "inputt"), "program.unknown_variable", "expr", "did you mean `input`?"),
    (expr("a", when="nope"), "program.unknown_variable", "when", "`nope`"),
    (
        prompt("a", {"text": "x"}, {"input": {"strip": {"var": "nope"}}}, OUT),
        "program.unknown_variable",
        "prompt[1].input",
        "`nope`",
    ),
    (prompt("a", OUT, {"input": "nope"}), "program.unknown_variable", "prompt[1].input", "`nope`"),
    (
        chat("a", {"role": "user", "content": [{"text": "x"}, {"input": "nope"}]}),
        "program.unknown_variable",
        "messages[0].content[1].input",
        "`nope`",
    ),
    (chat("a", {"splice": "nope"}), "program.unknown_variable", "messages[0].splice", "`nope`"),
    (
        {"id": "a", "op": "client", "name": "f", "args": {"k": [{"var": "nope"}]}, "output": "y"},
        "program.unknown_variable",
        "args.k",
        "`nope`",
    ),
    (expr("a", after=["b", "zz"]), "program.unknown_after", "after[1]", "unknown node `zz`"),
    (expr("b"), "program.duplicate_node", "id", "two nodes have the id `b`"),
    (
        prompt("a", {"text": "x"}, {"output": "v_b"}),
        "program.two_producers",
        "prompt[1].output",
        "node `b` already writes it",
    ),
    (
        prompt("a", {"output": "y"}, {"output": "y"}),
        "program.two_producers",
        "prompt[1].output",
        "writes variable `y` twice",
    ),
    (chat("a", output={"variable": "v_b"}), "program.segment", "messages", "empty"),
    (
        prompt("a", {"text": "x", "input": "input"}, OUT),
        "program.segment",
        "prompt[0]",
        "`text`, `input`",
    ),
    (prompt("a", {"special": True}, OUT), "program.segment", "prompt[0]", "one of `text`"),
    (prompt("a", {"output": "y", "text": "x"}), "program.segment", "prompt[0]", "split it"),
    (
        prompt("a", {"text": "x", "temperature": 0.5}, OUT),
        "program.segment",
        "prompt[0].temperature",
        "`temperature` belongs to an output, not to `text`",
    ),
    (
        prompt("a", {"input": "input", "as": "value"}, OUT),
        "program.segment",
        "prompt[0].as",
        "`as` belongs",
    ),
    (
        prompt("a", {"input": "input", "special": True}, OUT),
        "program.segment",
        "prompt[0].special",
        "belongs to a text",
    ),
    (prompt("a", {"text": "x"}), "program.segment", "prompt", "at least one output"),
    (prompt("a", OUT, messages=[]), "program.segment", "messages", "cannot have `messages`"),
    (
        prompt("a", OUT, output={"variable": "y"}),
        "program.segment",
        "output",
        "cannot have `output`",
    ),
    (prompt("a", OUT, tools=[]), "program.segment", "tools", "use `messages`"),
    ({"id": "a", "op": "generate"}, "program.segment", "", "`prompt`, or `messages`"),
    (
        {"id": "a", "op": "generate", "messages": [{"role": "user"}]},
        "program.segment",
        "output",
        "needs an `output`",
    ),
    (chat("a", {"content": "x"}), "program.segment", "messages[0]", "needs a `role`"),
    (
        chat("a", {"splice": "input", "role": "user"}),
        "program.segment",
        "messages[0]",
        "`splice` cannot be combined",
    ),
    (
        chat("a", {"role": "user", "content": [OUT]}),
        "program.segment",
        "messages[0].content[0].output",
        "put `output` inside `prompt`",
    ),
    (
        chat("a", {"role": "user", "content": [{"text": "x", "special": True}]}),
        "program.segment",
        "messages[0].content[0].special",
        "cannot have special tokens",
    ),
    (
        prompt("a", {"output": "y", "constraint": {"regex": "a", "type": "int"}}),
        "program.constraint",
        "prompt[0].constraint",
        "got `regex`, `type`",
    ),
    (
        chat("a", {"role": "user", "content": ""}, output={"variable": "y", "constraint": {}}),
        "program.constraint",
        "output.constraint",
        "got none",
    ),
    (
        prompt("a", {"output": "y", "max_tokens": 2, "min_tokens": 3}),
        "program.sampling",
        "prompt[0].min_tokens",
        "greater than max_tokens 2",
    ),
    (
        text("a", "{{input}}", max_tokens=2, min_tokens=3),
        "program.sampling",
        "output.min_tokens",
        "greater than max_tokens 2",
    ),
    (
        text("a", "{{input}}", constraint={}),
        "program.constraint",
        "output.constraint",
        "got none",
    ),
    (text("a", "Read {{inputt}}"), "program.unknown_variable", "prompt", "did you mean `input`?"),
    (
        {**text("a", "{{input}}"), "output": {"variable": "v_b"}},
        "program.two_producers",
        "output.variable",
        "node `b` already writes it",
    ),
    (
        {"id": "a", "op": "expr", "expr": {"join": [1, {"nope": 1}]}, "output": "y"},
        "program.expression",
        "expr.join[1].nope",
        "unknown operator `nope`",
    ),
    (expr("a", when={"var": 1}), "program.expression", "when.var", "name of a variable"),
    (prompt("a", {"input": "a b"}, OUT), "program.name", "prompt[0].input", "invalid name 'a b'"),
]


@pytest.mark.parametrize(("node", "code", "path", "words"), BAD_NODES)
def test_invalid_nodes_are_refused_with_path(
    node: dict[str, Any], code: str, path: str, words: str
) -> None:
    declared: dict[str, Any] = {"variables": {"input": {}}}
    with pytest.raises(ProgramError) as caught:
        build(expr("b"), node, **declared)
    dotted = f".{path}" if path else ""
    assert (caught.value.code, caught.value.path) == (code, f"program.nodes[1]{dotted}")
    assert words in caught.value.message
    graph = build(expr("b"), open=True, **declared)
    before = picture(graph)
    with pytest.raises(ProgramError) as caught:
        append(graph, node)
    assert (caught.value.code, caught.value.path) == (code, f"nodes[0]{dotted}")
    assert picture(graph) == before


BAD_PROGRAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"outputs": ["v_a", "nope"]}, "program.unknown_output", "program.outputs[1]"),
    ({"inputs": {"nope": 1}}, "program.unknown_input", "inputs.nope"),
    ({"inputs": {"v_a": 1}}, "program.unknown_input", "inputs.v_a"),
    ({"inputs": {"x": 1}}, "program.input_type", "inputs.x"),
    ({"inputs": {"flag": 1}}, "program.input_type", "inputs.flag"),
    ({"objectives": {"x": "latency"}}, "program.objective", "objectives.x"),
    ({"jobs": {"j": {"parent": "nope"}}}, "program.unknown_job", "program.jobs.j.parent"),
    (
        {"jobs": {"i": {"parent": "j"}, "j": {"parent": "i"}}},
        "program.cycle",
        "program.jobs.i.parent",
    ),
]


def test_inputs_that_are_read_without_a_value_are_missing() -> None:
    declared: dict[str, Any] = {
        "variables": {
            "given": {},
            "usual": {"default": 1},
            "unread": {},
            "late": {},
            "returned": {},
        }
    }
    nodes = [expr(name, name) for name in ("given", "usual", "late")]
    graph = build(*nodes, inputs={"given": 1}, outputs=["returned"], **declared)
    assert missing_inputs(graph) == ["late", "returned"]
    with pytest.raises(ProgramError, match="no value for input `late`, `returned`") as caught:
        check_inputs(graph)
    assert (caught.value.code, caught.value.path) == ("program.missing_input", "inputs.late")
    graph.mark_provided("late")
    graph.mark_provided("returned")
    check_inputs(graph)


def test_the_error_of_a_long_cycle_is_short() -> None:
    nodes = [expr(f"n{i}", f"v_n{(i + 1) % 3_000}") for i in range(3_000)]
    with pytest.raises(ProgramError, match=r"n\d+ -> .* -> \.\.\. \(3,000 nodes\)$") as caught:
        build(*nodes)
    assert caught.value.code == "program.cycle"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "fields",
    [{"outputs": ["v_frist"]}, {"inputs": {"v_frist": 1}}, {"nodes": [expr("b", after=["frist"])]}],
)
def test_what_was_probably_meant_is_suggested(fields: dict[str, Any]) -> None:
    nodes = [expr("first"), *fields.pop("nodes", [])]
    with pytest.raises(ProgramError, match=r"; did you mean `(v_)?first`\?$"):
        build(*nodes, **fields)


@pytest.mark.parametrize(("fields", "code", "path"), BAD_PROGRAMS)
def test_invalid_programs_are_refused_with_path(
    fields: dict[str, Any], code: str, path: str
) -> None:
    declared = {"x": {"type": "string"}, "flag": {"type": "bool"}, "r": {"type": "float"}}
    with pytest.raises(ProgramError) as caught:
        build(expr("a"), variables=declared, **{"outputs": ["v_a"], **fields})
    assert (caught.value.code, caught.value.path) == (code, path)
    assert build(
        expr("a"), variables=declared, inputs={"x": "", "flag": False, "r": 1}
    ).provided_inputs == {
        "x",
        "flag",
        "r",
    }


def test_names_of_undecoded_records_are_checked() -> None:
    node = ClientNode(id="a", name="f", output="not a name")
    with pytest.raises(ProgramError) as caught:
        Graph.build(Program(nodes=[node]), {}, open=False)
    assert (caught.value.code, caught.value.path) == ("program.name", "program.nodes[0].output")
    segment = Segment(output="x\n")
    with pytest.raises(ProgramError):
        Graph.build(Program(nodes=[GenerateNode(id="a", prompt=[segment])]), {}, open=False)


CYCLES: list[tuple[list[dict[str, Any]], str]] = [
    ([expr("a", "v_a")], "a -> a"),
    ([expr("a", "v_c"), expr("z"), expr("b", "v_a"), expr("c", "v_b")], "a -> b -> c -> a"),
    ([expr("a", after=["b"]), expr("b", "v_a")], "a -> b -> a"),
    ([expr("a", when="v_b"), expr("b", after=["a"])], "a -> b -> a"),
    ([prompt("a", {"input": "y"}, {"output": "y"})], "a -> a"),
    ([prompt("a", {"input": "y"}, {"output": "x"}, {"output": "y"})], "a -> a"),
    (
        [prompt("a", {"input": "v_b"}, {"output": "x"}, {"output": "y"}), expr("b", "x")],
        "a -> b -> a",
    ),
]


@pytest.mark.parametrize(("nodes", "cycle"), CYCLES)
def test_a_cycle_is_reported_in_order(nodes: list[dict[str, Any]], cycle: str) -> None:
    with pytest.raises(ProgramError) as caught:
        build(expr("first"), *nodes, expr("last", "v_first"))
    assert (caught.value.code, caught.value.path) == ("program.cycle", "program.nodes[1]")
    assert caught.value.message.endswith(f": {cycle}")


def test_a_growing_prompt_reads_by_slot() -> None:
    graph = build(
        prompt("t", {"input": "q"}, {"output": "s"}, {"input": "found"}, {"output": "answer"}),
        {"id": "find", "op": "client", "name": "r", "args": {"k": {"var": "s"}}, "output": "found"},
        expr("end", after=["t"]),
        variables={"q": {}},
        outputs=["answer"],
    )
    first = Slot("t", 0, frozenset({"q"}), ("s",))
    last = Slot("t", 1, frozenset({"found"}), ("answer",))
    assert graph.slots["t"] == (first, last)
    assert order(graph) == ["t.0", "find.0", "t.1", "end.0"]
    assert graph.get_producer("answer") == last
    assert graph.get_producer("q") is None
    assert graph.get_consumers("q") == (first,)
    assert graph.predecessors(last) == (first, graph.slots["find"][0])
    assert graph.successors(last) == graph.slots["end"]
    assert graph.nodes_after("t") == ("end",)
    assert graph.inputs == {"q"}
    assert graph.objectives == {"answer": "latency"}


def test_only_a_stricter_objective_replaces_an_earlier_one() -> None:
    graph = build(expr("a"), outputs=["v_a"], objectives={"v_a": "throughput"})
    strict: list[Objective] = ["latency", Deadline(9), Deadline(5)]
    for objective in strict:
        assert graph.tighten_objective("v_a", objective)
        assert graph.objectives == {"v_a": objective}
    lax: list[Objective] = [Deadline(5), Deadline(6), "ttft", "throughput"]
    for objective in lax:
        assert not graph.tighten_objective("v_a", objective)
    assert graph.objectives == {"v_a": Deadline(5)}


def test_a_variable_that_is_no_output_can_have_an_objective() -> None:
    graph = build(expr("a"), expr("b"), open=True, variables={"late": {}})
    for name in ("v_a", "late"):
        assert graph.tighten_objective(name, "throughput")
        assert graph.tighten_objective(name, "latency")
        assert not graph.tighten_objective(name, "throughput")
    assert graph.tighten_objective("v_b", Deadline(5))
    append(graph, outputs=["v_a", "v_b"], objectives={"v_a": "throughput"})
    assert graph.objectives == {"v_a": "latency", "late": "latency", "v_b": Deadline(5)}
    assert graph.deadlines == {"v_b": 5}


def test_an_append_has_objectives_for_any_variable() -> None:
    graph = build(expr("a"), open=True)
    append(graph, expr("b"), objectives={"v_a": "latency", "v_b": "latency"})
    assert graph.objectives == {"v_a": "latency", "v_b": "latency"}
    assert graph.outputs == []
    with pytest.raises(ProgramError) as caught:
        append(graph, objectives={"v_c": "latency"})
    assert (caught.value.code, caught.value.path) == ("program.objective", "objectives.v_c")


def test_an_output_has_at_least_the_default_objective() -> None:
    graph = build(expr("a"), open=True)
    graph.tighten_objective("v_a", "throughput")
    append(graph, outputs=["v_a"])
    assert graph.objectives == {"v_a": "latency"}


def test_only_the_first_slot_reads_when() -> None:
    graph = build(
        prompt("t", {"output": "x"}, {"output": "y"}, when={"eq": [{"var": "c"}, 1]}),
        variables={"c": {}},
    )
    assert [slot.reads for slot in graph.slots["t"]] == [{"c"}, set()]


def test_jobs_named_by_nodes_exist() -> None:
    graph = build(expr("a", job="critic"), expr("b"), jobs={"main": {"timeout_s": 5}})
    assert graph.jobs == {"main": Job(timeout_s=5), "critic": Job()}


def test_lint_reports_unused_variables() -> None:
    graph = build(
        expr("a"),
        prompt("p", {"output": "y"}, {"text": "tail"}),
        variables={"x": {}},
        outputs=["y"],
    )
    assert [fault.message.split(" ")[:2] for fault in graph.lint()] == [
        ["variable", "`v_a`"],
        ["input", "`x`"],
        ["node", "`p`"],
    ]
    assert build(expr("a"), outputs=["v_a"]).lint() == []
    assert build(expr("a")).lint()[-1].message == "the program has no outputs"


def picture(graph: Graph) -> object:
    """Everything that can be seen of a graph."""
    tables = (
        graph.nodes,
        graph.slots,
        graph.variables,
        graph.outputs,
        graph.jobs,
        graph.provided_inputs,
    )
    edges = [graph.predecessors(slot) for slot in graph.topological()]
    return copy.deepcopy((*tables, graph.objectives, graph.topological(), edges, graph.lint()))


def test_a_session_accepts_late_producers_until_closed() -> None:
    graph = build(expr("use", "late"), open=True, variables={"late": {}, "in": {}})
    assert graph.inputs == {"late", "in"}
    made = append(
        graph,
        {**expr("make", "in"), "output": "late"},
        expr("after", after=["use"]),
        outputs=["v_use"],
        objectives={"v_use": "throughput"},
        inputs={"in": 1},
    )
    assert made == ("make", "after")
    assert order(graph) == ["make.0", "use.0", "after.0"]
    assert graph.get_producer("late") == graph.slots["make"][0]
    assert graph.inputs == {"in"}
    assert graph.objectives == {"v_use": "throughput"}
    assert append(graph, close=True) == ()
    with pytest.raises(ConflictError) as caught:
        append(graph, expr("more"))
    assert caught.value.code == "session.closed"
    with pytest.raises(ConflictError):
        append(build(expr("a")), expr("b"))


def test_an_appended_producer_cannot_close_a_cycle() -> None:
    graph = build(expr("a", "late"), expr("b", "v_a"), open=True, variables={"late": {}})
    before = picture(graph)
    with pytest.raises(ProgramError) as caught:
        append(graph, expr("x"), {**expr("c", "v_b"), "output": "late"})
    assert (caught.value.code, caught.value.path) == ("program.cycle", "nodes[1]")
    assert caught.value.message.endswith("a -> b -> c -> a")
    assert picture(graph) == before


def test_an_input_with_a_value_accepts_no_producer() -> None:
    graph = build(open=True, variables={"x": {}, "y": {}}, inputs={"x": 1})
    graph.mark_provided("y")
    for name in ("x", "y"):
        with pytest.raises(ProgramError) as caught:
            append(graph, {**expr("a"), "output": name})
        assert (caught.value.code, caught.value.path) == (
            "program.two_producers",
            "nodes[0].output",
        )
        with pytest.raises(ProgramError) as caught:
            append(graph, inputs={name: 2})
        assert (caught.value.code, caught.value.path) == ("program.unknown_input", f"inputs.{name}")
    append(graph, expr("a"))
    with pytest.raises(ProgramError):
        graph.mark_provided("v_a")


def test_a_second_declaration_must_equal_the_first() -> None:
    graph = build(open=True, variables={"x": {"type": "int"}})
    append(graph, variables={"x": {"type": "int"}})
    with pytest.raises(ProgramError) as caught:
        append(graph, variables={"x": {"type": "string"}})
    assert (caught.value.code, caught.value.path) == ("program.variable", "variables.x")


def test_a_declaration_without_a_type_refers_to_an_earlier_one() -> None:
    declared = {"x": {"type": "int"}, "y": {"schema": {"type": "string"}}}
    graph = build(open=True, variables=declared)
    before = dict(graph.variables)
    append(graph, expr("a", "x", "y"), variables={"x": {}, "y": {}})
    assert {name: graph.variables[name] for name in declared} == before
    with pytest.raises(ProgramError) as caught:
        append(graph, variables={"x": {}}, inputs={"x": "one"})
    assert caught.value.code == "program.input_type"


def test_later_objectives_only_tighten_earlier_ones() -> None:
    graph = build(expr("a"), open=True, outputs=["v_a"])
    assert graph.objectives == {"v_a": "latency"}
    for update, expected in [
        ("throughput", "throughput"),
        ("ttft", "ttft"),
        ("throughput", "ttft"),
        ("latency", "ttft"),
    ]:
        append(graph, objectives={"v_a": update})
        assert graph.objectives == {"v_a": expected}


def test_too_many_nodes_or_edges_are_refused() -> None:
    graph = build(*(expr(f"n{i}") for i in range(9_999)), open=True)
    append(graph, expr("last"))
    with pytest.raises(ProgramError) as caught:
        append(graph, expr("more"))
    assert caught.value.code == "program.too_large"
    wide = [expr(f"w{i}", *(f"i{k}" for k in range(110))) for i in range(1_000)]
    makers = [{**expr(f"m{k}"), "output": f"i{k}"} for k in range(110)]
    with pytest.raises(ProgramError) as caught:
        build(*makers, *wide)
    assert caught.value.code == "program.too_large"


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    """Nodes without a cycle in a random order, and how many of them to submit at first."""
    size = draw(st.integers(1, 12))
    nodes = []
    for i in range(size):
        earlier = draw(st.lists(st.integers(0, max(i - 1, 0)), max_size=3)) if i else []
        kind = draw(st.sampled_from(["data", "after", "when", "prompt"]))
        reads = [f"v_n{k}" for k in earlier]
        if kind == "data":
            nodes.append(expr(f"n{i}", *reads))
        elif kind == "after":
            nodes.append(expr(f"n{i}", after=[f"n{k}" for k in earlier]))
        elif kind == "when":
            nodes.append(expr(f"n{i}", when=[{"var": read} for read in reads]))
        else:
            inputs = [{"input": read} for read in reads]
            nodes.append(prompt(f"n{i}", {"output": f"x{i}"}, *inputs, {"output": f"v_n{i}"}))
    random.Random(draw(st.integers(0, 999))).shuffle(nodes)
    return nodes, draw(st.integers(0, size))


def edges_of(graph: Graph) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """Edges, from the definition and not from the tables."""
    edges = set()
    for node_id, slots in graph.slots.items():
        for slot in slots:
            here = (node_id, slot.index)
            edges |= {
                ((other.node, other.index), here)
                for others in graph.slots.values()
                for other in others
                if set(other.writes) & slot.reads
            }
            if slot.index:
                edges.add(((node_id, slot.index - 1), here))
            else:
                for earlier in graph.nodes[node_id].after:
                    edges.add(((earlier, len(graph.slots[earlier]) - 1), here))
    return edges


@given(programs())
def test_slots_are_in_topological_order(
    program: tuple[list[dict[str, Any]], int],
) -> None:
    nodes, cut = program
    names: dict[str, Any] = {f"v_{node['id']}": {} for node in nodes}
    graph = build(*nodes[:cut], open=True, variables=names) if _is_valid_start(nodes, cut) else None
    if graph is None:
        graph = build(*nodes)
    else:
        graph.topological()
        append(graph, *nodes[cut:])
    place = {(slot.node, slot.index): i for i, slot in enumerate(graph.topological())}
    edges = edges_of(graph)
    assert len(place) == sum(map(len, graph.slots.values()))
    assert all(place[source] < place[target] for source, target in edges)
    found = {
        ((before.node, before.index), (slot.node, slot.index))
        for slot in graph.topological()
        for before in graph.predecessors(slot)
    }
    assert found == edges


def _is_valid_start(nodes: list[dict[str, Any]], cut: int) -> bool:
    """Whether no submitted node runs after an appended one."""
    first = {node["id"] for node in nodes[:cut]}
    return all(earlier in first for node in nodes[:cut] for earlier in node.get("after", ()))


@given(programs(), st.data())
def test_every_backward_edge_is_reported_as_cycle(
    program: tuple[list[dict[str, Any]], int], data: st.DataObject
) -> None:
    nodes, _ = program
    graph = build(*nodes)
    slots = graph.topological()
    start = data.draw(st.sampled_from(slots))
    reached = {start.node}
    for slot in slots:
        if any(before.node in reached for before in graph.predecessors(slot)):
            reached.add(slot.node)
    # A node that runs after a reached node cannot precede the first.
    end = data.draw(st.sampled_from(sorted(reached)))
    looped = [
        {**node, "after": [*node.get("after", ()), end]} if node["id"] == start.node else node
        for node in nodes
    ]
    with pytest.raises(ProgramError) as caught:
        build(*looped)
    assert caught.value.code == "program.cycle"
    cycle = caught.value.message.split(": ")[1].split(" -> ")
    assert cycle[0] == cycle[-1]
    known = {(a[0], b[0]) for a, b in edges_of(graph)} | {(end, start.node)}
    assert all(pair in known or pair[0] == pair[1] for pair in itertools.pairwise(cycle))
