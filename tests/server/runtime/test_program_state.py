"""Tests of ProgramState: when slots are ready, and how missing values propagate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.program.errors import NotFoundError, ProgramError
from conure.server.program.graph.graph import Graph, Slot
from conure.server.program.ir import Append, Submission
from conure.server.program.nodes.bodies import BodyRef
from conure.server.program.status import Problem
from conure.server.runtime.node_state import MissingValue, Ready
from conure.server.runtime.program_state import ProgramState
from conure.server.runtime.slot_readiness import SlotReadiness

from ..inprocess import client, expr, generate, insert, var

NO = Problem(code="test.no", message="no")


def execution_of(body: dict[str, Any]) -> ProgramState:
    """Return the state of a submission that is not started."""
    submission = msgspec.convert(body, Submission)
    graph = Graph.build(submission.program, submission.inputs, open=submission.open)
    return ProgramState(
        "p",
        "t",
        graph,
        submission.inputs,
        submission.options,
        name="",
        is_open=submission.open,
        created_at=0.0,
    )


def execute(
    nodes: list[Any],
    *,
    variables: tuple[str, ...] = (),
    inputs: dict[str, Any] | None = None,
    outputs: tuple[str, ...] = (),
    jobs: dict[str, Any] | None = None,
    is_open: bool = False,
    **options: Any,
) -> ProgramState:
    declared: dict[str, Any] = {name: {} for name in (*variables, *(inputs or {}))}
    program = {"variables": declared, "nodes": nodes, "outputs": outputs, "jobs": jobs or {}}
    body = {"program": program, "inputs": inputs or {}, "options": options, "open": is_open}
    return execution_of(body)


def finish(execution: ProgramState, node: str, slot: int = 0) -> list[Ready]:
    """Finish a slot and commit its variables."""
    ready: list[Ready] = []
    for variable in execution.graph.slots[node][slot].writes:
        ready += execution.commit(variable, f"value of {variable}")
    return ready + execution.finish_slot(node, slot, at=1.0)


GROWING = [
    {
        "id": "p",
        "op": "generate",
        "prompt": [{"output": "a"}, {"input": "x"}, {"output": "b"}, {"output": "c"}],
    },
    client("ask", "x", args={"a": var("a")}),
    expr("end", [var("c"), var("a")]),
]


def test_prompt_slots_run_one_at_a_time() -> None:
    execution = execute(GROWING)
    assert execution.start() == [("p", 0)]
    assert finish(execution, "p", 0) == [("ask", 0)]
    assert execution.phase_of("a") == "done"
    assert finish(execution, "ask") == [("p", 1)]
    assert finish(execution, "p", 1) == [("p", 2)]
    assert not execution.nodes["p"].has_ended
    assert finish(execution, "p", 2) == [("end", 0)]
    assert not execution.is_complete
    assert finish(execution, "end") == []
    assert execution.is_complete


def test_nothing_is_reported_before_the_start() -> None:
    execution = execute([expr("a", {"lit": 1}), expr("b", var("x"))], variables=("x",))
    assert execution.commit("x", 1) == []
    assert sorted(execution.start()) == [("a", 0), ("b", 0)]


def test_after_accepts_any_final_phase() -> None:
    for phase in ("done", "failed", "skipped", "killed"):
        execution = execute([expr("a", {"lit": 1}), expr("b", {"lit": 2}, after=["a"])])
        assert execution.start() == [("a", 0)]
        if phase == "done":
            assert finish(execution, "a") == [("b", 0)]
        else:
            assert execution.end("a", phase, NO, at=1.0) == [("b", 0)]
        assert execution.missing_input(execution.graph.slots["b"][0]) is None


def test_ended_node_never_changes() -> None:
    execution = execute([expr("a", {"lit": 1}), expr("b", var("a"))])
    execution.start()
    assert execution.end("a", "failed", NO, at=1.0) == [("b", 0)]
    assert execution.end("a", "killed", None, at=2.0) == []
    state = execution.nodes["a"]
    assert (state.phase, state.problem, state.finished_at) == ("failed", NO, 1.0)


def test_prompt_ended_early_keeps_committed_outputs() -> None:
    execution = execute(GROWING)
    execution.start()
    finish(execution, "p", 0)
    assert execution.end("p", "failed", NO, at=1.0) == [("end", 0)]
    assert execution.values == {"a": "value of a"}
    assert execution.missing_values == {v: MissingValue("failed", NO) for v in ("b", "c")}
    # The step in the middle still runs; the end of its only reader does not report it again.
    assert finish(execution, "ask") == []


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({}, None),
        ({"x": "skipped"}, "skipped"),
        ({"x": "killed"}, "skipped"),
        ({"x": "skipped", "y": "failed"}, "failed"),
        ({"x": "deadline_exceeded"}, "deadline_exceeded"),
    ],
)
def test_reader_of_missing_variables_ends_accordingly(
    phases: dict[str, Any], expected: str | None
) -> None:
    nodes = [expr("x", {"lit": 1}), expr("y", {"lit": 1}), expr("r", [var("x"), var("y")])]
    execution = execute(nodes)
    execution.start()
    for node in ("x", "y"):
        if node in phases:
            execution.end(node, phases[node], Problem(code=f"of.{node}"), at=1.0)
        else:
            finish(execution, node)
    absence = execution.missing_input(execution.graph.slots["r"][0])
    assert (absence and absence.phase) == expected
    if expected == "failed":
        assert absence
        assert absence.problem.code == "of.y", "a failure is the reason, whatever else is missing"


def test_isolation_follows_on_error() -> None:
    nodes = [
        expr("plain", {"lit": 1}),
        expr("own", {"lit": 1}, on_error="isolate"),
        expr("risky", {"lit": 1}, job="risky"),
        expr("strict", {"lit": 1}, job="risky", on_error="fail"),
        expr("named", {"lit": 1}, job="undeclared"),
    ]
    jobs = {"risky": {"on_error": "isolate"}}
    closed = execute(nodes, jobs=jobs)
    assert [closed.isolates(node["id"]) for node in nodes] == [False, True, True, False, False]
    session = execute(nodes, jobs=jobs, is_open=True)
    expected = [True, True, True, False, True]
    assert [session.isolates(node["id"]) for node in nodes] == expected
    session.append(Append(close=True))
    assert [session.isolates(node["id"]) for node in nodes] == expected, "closing changes no rule"


def test_jobs_may_be_nested() -> None:
    jobs = {"inner": {"parent": "outer"}, "outer": {}, "other": {}}
    execution = execute([expr("a", {"lit": 1}, job="loose")], jobs=jobs)
    inside = {
        (job, outer)
        for job in ("inner", "outer", "other", "loose", "main")
        for outer in ("inner", "outer", "other", "main")
        if execution.is_within(job, outer)
    }
    alone = {(job, job) for job in ("inner", "outer", "other", "main")}
    below_main = {(job, "main") for job in ("inner", "outer", "other", "loose")}
    assert inside == alone | below_main | {("inner", "outer")}


def test_session_counts_all_nodes_against_the_limit() -> None:
    execution = execute([expr("a", var("x"))], variables=("x",), is_open=True)
    assert execution.start() == []
    with pytest.raises(ProgramError):
        execution.append(msgspec.convert({"nodes": [expr("b", var("nobody"))]}, Append))
    more = {"nodes": [expr("b", [var("x"), var("y")]), expr("c", {"lit": 1}, "x")]}
    append = msgspec.convert({**more, "variables": {"y": {}}, "inputs": {"y": 1}}, Append)
    added, ready = execution.append(append)
    assert (added, ready) == (("b", "c"), [("c", 0)])
    assert sorted(finish(execution, "c")) == [("a", 0), ("b", 0)]
    assert not execution.is_complete
    finish(execution, "a")
    finish(execution, "b")
    execution.append(Append(close=True))
    assert execution.is_complete


def test_an_unknown_variable_is_rejected() -> None:
    execution = execute([expr("a", var("x"))], variables=("x",))
    assert execution.variable_names() == ["x", "a"]
    with pytest.raises(NotFoundError):
        execution.check_variable("b")


def test_long_chain_of_demands_does_not_recurse() -> None:
    nodes = [expr("n0", {"lit": 0})]
    nodes += [expr(f"n{i}", {"lit": 0}, after=[f"n{i - 1}"]) for i in range(1, 5_000)]
    execution = execute(nodes, outputs=("n4999",), start="demand")
    assert execution.start() == []
    assert execution.demand("n4999") == [("n0", 0)]
    assert execution.demand("n4999") == [], "demanded before"


# --- against a model ------------------------------------------------------------------------


@dataclass
class Plan:
    """A random program: slots in an order in which they can run."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def body(self) -> dict[str, Any]:
        declared: dict[str, Any] = {name: {} for name in self.inputs}
        return {"program": {"variables": declared, "nodes": list(self.nodes.values())}}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    plan = Plan(inputs=[f"i{i}" for i in range(draw(st.integers(0, 2)))])
    prompts: list[str] = []
    for number in range(draw(st.integers(1, 12))):
        known = plan.inputs + plan.written
        reads = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
        variable = f"v{number}"
        grows = draw(st.sampled_from([None, "new", "old"]))
        if grows is None:
            # Only nodes that are whole can be waited for without a circle.
            whole = [name for name in plan.nodes if name not in prompts]
            after = draw(st.lists(st.sampled_from(whole), max_size=2, unique=True)) if whole else []
            node = expr(f"n{number}", [var(name) for name in reads], variable, after=after)
            plan.nodes[node["id"]] = node
        elif grows == "old" and prompts:
            prompt = plan.nodes[draw(st.sampled_from(prompts))]["prompt"]
            prompt += [*({"input": name} for name in reads), {"output": variable}]
        else:
            prompts.append(f"n{number}")
            plan.nodes[f"n{number}"] = generate(f"n{number}", *map(insert, reads), writes=variable)
        plan.written.append(variable)
    return plan


class Player:
    """Runs a program state like a server, and checks every ready slot against the graph."""

    def __init__(self, plan: Plan, draw: Any) -> None:
        self.state = execution_of(plan.body)
        self.plan = plan
        self.open: list[Ready] = []
        self.reported: set[Ready] = set()
        self.past: list[tuple[Any, ...]] = []
        self._draw = draw

    def report(self, ready: list[Ready]) -> None:
        for key in ready:
            assert key not in self.reported, f"{key} was reported twice"
            self.check(self.state.graph.slots[key.node][key.slot])
            self.reported.add(key)
            self.open.append(key)

    def check(self, slot: Slot) -> None:
        execution = self.state
        assert all(map(execution.is_resolved, slot.reads))
        assert execution.nodes[slot.node].slots_done == slot.index
        if slot.index == 0:
            after = execution.graph.nodes[slot.node].after
            assert all(execution.nodes[other].has_ended for other in after)

    def step(self) -> None:
        """Resolve an input or end an open slot."""
        execution = self.state
        waiting = [name for name in self.plan.inputs if not execution.is_resolved(name)]
        moves: list[Any] = [*waiting, *self.open]
        move = self._draw(st.sampled_from(moves))
        if isinstance(move, str):
            self.past.append(("value", move))
            self.report(execution.commit(move, 0))
            return
        self.open.remove(move)
        if execution.nodes[move.node].has_ended:
            return
        slot = execution.graph.slots[move.node][move.slot]
        absence = execution.missing_input(slot)
        fate = self._draw(st.sampled_from(["done", "done", "done", "failed", "skipped"]))
        if absence is None and fate == "done":
            self.past += [("value", variable) for variable in slot.writes]
            self.past.append(("slot", *move))
            self.report(finish(execution, *move))
            return
        phase, problem = absence or MissingValue(fate if fate != "done" else "failed", NO)
        if absence is not None:
            assert problem == NO, "the reason is the one at the beginning"
        self.past.append(("end", move.node, phase, problem))
        self.report(execution.end(move.node, phase, problem, at=1.0))

    def restored(self) -> ProgramState:
        """Return the same program after a restart, with its history replayed."""
        execution = execution_of(self.plan.body)
        for what, *rest in self.past:
            match what:
                case "value":
                    assert execution.commit(rest[0], self.state.values[rest[0]]) == []
                case "slot":
                    assert execution.finish_slot(rest[0], rest[1], at=1.0) == []
                case "end":
                    assert execution.end(rest[0], rest[1], rest[2], at=1.0) == []
        return execution


@settings(max_examples=300)
@given(plans(), st.data())
def test_every_slot_is_ready_once(plan: Plan, data: st.DataObject) -> None:
    player = Player(plan, data.draw)
    execution = player.state
    player.report(execution.start())
    at = data.draw(st.integers(0, 12))
    while player.open or not all(map(execution.is_resolved, plan.inputs)):
        if at == 0:
            again = player.restored()
            still = {key for key in player.open if not execution.nodes[key.node].has_ended}
            assert set(again.start()) == still, "it goes on with what was open, and nothing else"
            assert (again.values, again.missing_values) == (
                execution.values,
                execution.missing_values,
            )
        at -= 1
        player.step()
    assert execution.is_complete
    assert all(state.has_ended for state in execution.nodes.values())
    assert all(map(execution.is_resolved, plan.written))
    for node_id, slots in execution.graph.slots.items():
        for slot in slots:
            was_over = execution.nodes[node_id].slots_done < slot.index
            assert (Ready(node_id, slot.index) in player.reported) != was_over


@settings(max_examples=200)
@given(plans(), st.data())
def test_demand_runs_only_ancestors(plan: Plan, data: st.DataObject) -> None:
    requested = data.draw(st.lists(st.sampled_from(plan.written), min_size=1, max_size=2))
    body = plan.body
    body["options"] = {"start": "demand"}
    body["program"]["outputs"] = requested
    execution = execution_of(body)
    for name in plan.inputs:
        execution.commit(name, 0)
    assert execution.start() == []
    queue = [key for variable in requested for key in execution.demand(variable)]
    while queue:
        assert not execution.is_complete
        key = queue.pop(data.draw(st.integers(0, len(queue) - 1)))
        queue += finish(execution, *key)
    assert execution.is_complete
    expected = ancestors(execution.graph, requested)
    assert {name for name, state in execution.nodes.items() if state.has_ended} == expected


def ancestors(graph: Graph, variables: Iterable[str]) -> set[str]:
    """Return the nodes without bodies that variables need."""
    found: set[str] = set()
    names = {producer.node for v in variables if (producer := graph.get_producer(v)) is not None}
    while names:
        name = names.pop()
        found.add(name)
        before = set(graph.nodes[name].after)
        for slot in graph.slots[name]:
            before |= {p.node for v in slot.reads if (p := graph.get_producer(v)) is not None}
        names |= before - found
    return found


@settings(max_examples=200)
@given(plans(), st.data())
def test_appended_nodes_run_once_a_demanded_variable_needs_them(
    plan: Plan, data: st.DataObject
) -> None:
    names = (*plan.inputs, *plan.written)
    execution = execute([], variables=names, is_open=True, start="demand")
    reported = set(execution.start())
    for name in plan.inputs:
        reported.update(execution.commit(name, 0))
    waiting = data.draw(st.permutations(list(plan.nodes.values())))
    while waiting:
        known = execution.nodes.keys()
        node = next(each for each in waiting if set(each.get("after", ())) <= known)
        waiting.remove(node)
        ready = execution.append(msgspec.convert({"nodes": [node]}, Append))[1]
        for name in data.draw(st.lists(st.sampled_from(names), max_size=1)):
            ready += execution.demand(name)
        assert reported.isdisjoint(ready)
        reported.update(ready)
        demanded = ancestors(execution.graph, execution.demanded)
        assert execution.readiness.demanded_nodes == demanded
        assert reported == {
            Ready(node_id, 0)
            for node_id in demanded
            if all(map(execution.is_resolved, execution.graph.slots[node_id][0].reads))
            and not execution.graph.nodes[node_id].after
        }


def test_an_objective_of_an_append_demands_its_variable() -> None:
    execution = execute([], is_open=True, start="demand")
    execution.start()
    first = msgspec.convert({"nodes": [expr("a", []), expr("b", [])]}, Append)
    assert execution.append(first)[1] == []
    second = {"nodes": [expr("c", [var("a")]), expr("d", [])], "objectives": {"c": "latency"}}
    assert execution.append(msgspec.convert(second, Append))[1] == [("a", 0)]
    third = msgspec.convert({"objectives": {"b": "latency"}}, Append)
    assert execution.append(third)[1] == [("b", 0)]


def test_demand_in_a_session_visits_only_new_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    execution = execute([], is_open=True, start="demand")
    execution.start()
    visited: list[str] = []
    body_of, report = Graph.body_of, SlotReadiness._report

    def visit(graph: Graph, node_id: str) -> BodyRef | None:
        visited.append(node_id)
        return body_of(graph, node_id)

    def consider(readiness: SlotReadiness, key: tuple[str, int]) -> bool:
        visited.append(key[0])
        return report(readiness, key)

    monkeypatch.setattr(Graph, "body_of", visit)
    monkeypatch.setattr(SlotReadiness, "_report", consider)
    for number in range(50):
        visited.clear()
        reads = [var(f"n{number - 1}")] if number else []
        node = expr(f"n{number}", reads)
        assert execution.append(msgspec.convert({"nodes": [node]}, Append))[1] == []
        assert execution.demand(f"n{number}") == [(f"n{number}", 0)]
        finish(execution, f"n{number}")
        assert set(visited) == {f"n{number}"}
