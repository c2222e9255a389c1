"""Nodes with bodies: checks, visibility of names, and instances."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.errors import ProgramError
from conure.server.program.expressions.evaluate import evaluate, variables
from conure.server.program.graph import extension
from conure.server.program.graph.graph import Graph
from conure.server.program.graph.instances import (
    BodyTemplate,
    DefinedNames,
    Renaming,
    item_expression,
)
from conure.server.program.ir import AnyNode, Append, GenerateNode, Submission

from ...inprocess import client, expr, generate, insert, var

Json = Any


def build(*nodes: Json, **fields: Any) -> Graph:
    is_open = fields.pop("open", False)
    program = {"variables": {"docs": {}, "q": {}}, "nodes": list(nodes), **fields}
    submission = msgspec.convert({"program": program, "open": is_open}, Submission)
    return Graph.build(submission.program, submission.inputs, open=submission.open)


def refusal(*nodes: Json, **fields: Any) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        build(*nodes, **fields)
    return caught.value


def map_(*body: Json, **fields: Json) -> Json:
    return {"id": "m", "op": "map", "items": "docs", "as": "x", "body": list(body), **fields}


def loop(*body: Json, **fields: Json) -> Json:
    return {"id": "l", "op": "loop", "body": list(body), **fields}


def if_(then: list[Json], otherwise: list[Json], **fields: Json) -> Json:
    return {"id": "c", "op": "if", "cond": "q", "then": then, "else": otherwise, **fields}


def try_(*body: Json, **fields: Json) -> Json:
    return {"id": "t", "op": "try", "body": list(body), **fields}


MADE = expr("e", var("q"), "v")
REFUSED: list[tuple[str, list[Json], str, str, str]] = [
    (
        "what a map makes is read outside",
        [map_(MADE), expr("out", var("v"))],
        "program.unknown_variable",
        "program.nodes[1].expr",
        "only in the body that writes it",
    ),
    (
        "what a branch makes is read outside",
        [if_([MADE], []), expr("out", var("v"))],
        "program.unknown_variable",
        "program.nodes[1].expr",
        "only in the body that writes it",
    ),
    (
        "what a branch makes is read in the other",
        [if_([MADE], [expr("out", var("v"))])],
        "program.unknown_variable",
        "program.nodes[0].else[0].expr",
        "only in the body that writes it",
    ),
    (
        "an unknown name in a body",
        [map_(expr("e", var("quick"), "v"))],
        "program.unknown_variable",
        "program.nodes[0].body[0].expr",
        "unknown variable `quick`",
    ),
    (
        "an item outside of its body",
        [map_(MADE), expr("out", var("x"))],
        "program.unknown_variable",
        "program.nodes[1].expr",
        "unknown variable `x`",
    ),
    (
        "a name that is collected and not made",
        [map_(MADE, collect={"all": "w"})],
        "program.unknown_variable",
        "program.nodes[0].collect.all",
        "unknown variable `w`",
    ),
    (
        "a side of a merge that is made on the other side",
        [if_([MADE], [], merge={"out": ["q", "v"]})],
        "program.unknown_variable",
        "program.nodes[0].merge.out[1]",
        "`v` is visible only in the body",
    ),
    (
        "an item that hides a variable",
        [map_(MADE, **{"as": "q"})],
        "program.hidden_name",
        "program.nodes[0].as",
        "would hide",
    ),
    (
        "an index that hides an outer item",
        [map_({**map_(MADE, items="x", index="x"), "id": "n", "as": "y"})],
        "program.hidden_name",
        "program.nodes[0].body[0].index",
        "would hide",
    ),
    (
        "an item that hides what the body makes",
        [map_(MADE, **{"as": "v"})],
        "program.hidden_name",
        "program.nodes[0].as",
        "would hide",
    ),
    (
        "one variable in two bodies",
        [map_(MADE), {**map_(expr("f", 1, "v")), "id": "n"}],
        "program.two_producers",
        "program.nodes[1]",
        "node `n` cannot write variable `v`: a node in a body already writes it; names of",
    ),
    (
        "one variable in a body and outside",
        [map_(MADE), expr("f", 1, "v")],
        "program.two_producers",
        "program.nodes[0]",
        "cannot write variable `v`: node `f` already writes it",
    ),
    (
        "one node in two bodies",
        [map_(MADE), if_([expr("e", 1, "w")], [])],
        "program.duplicate_node",
        "program.nodes[0].id",
        "two nodes have the id `e`",
    ),
    (
        "a cycle inside of a body",
        [map_(expr("a", var("w"), "v"), expr("b", var("v"), "w"))],
        "program.cycle",
        "program.nodes[0].body[0]",
        "a -> b -> a",
    ),
    (
        "a cycle through a body",
        [
            map_(expr("e", var("later"), "v"), collect={"all": "v"}),
            expr("late", var("all"), "later"),
        ],
        "program.cycle",
        "program.nodes[0]",
        "m -> late -> m",
    ),
    (
        "a body that comes after its own node",
        [map_(expr("e", 1, "v", after=["m"]))],
        "program.cycle",
        "program.nodes[0]",
        "m -> m",
    ),
    (
        "a body that reads what its node gives",
        [map_(expr("e", var("all"), "v"), collect={"all": "v"})],
        "program.cycle",
        "program.nodes[0]",
        "m -> m",
    ),
    (
        "a branch that its condition waits for",
        [if_([expr("e", 1, "v")], [], cond="w", merge={"o": ["v", "q"]}), expr("f", var("o"), "w")],
        "program.cycle",
        "program.nodes[0]",
        "c -> f -> c",
    ),
    (
        "a loop without an end",
        [loop(MADE)],
        "program.control",
        "program.nodes[0]",
        "needs `items`, `count` or `until`",
    ),
    (
        "a loop with two ends",
        [loop(MADE, items="docs", count=2)],
        "program.control",
        "program.nodes[0].count",
        "remove one of them",
    ),
    (
        "a count of nothing known",
        [loop(MADE, count="qq")],
        "program.unknown_variable",
        "program.nodes[0].count",
        "did you mean `q`?",
    ),
    (
        "an end of nothing known",
        [loop(MADE, until="w")],
        "program.unknown_variable",
        "program.nodes[0].until",
        "unknown variable `w`",
    ),
    (
        "a merge without a name for each handler",
        [try_(MADE, handlers=[{"body": [expr("h", 1)]}], merge={"o": ["v"]})],
        "program.control",
        "program.nodes[0].merge.o",
        "needs 2 names",
    ),
    (
        "a merge of an expression",
        [if_([MADE], [], merge={"o": [{"lit": 1}, "q"]})],
        "program.name",
        "program.nodes[0].merge.o[0]",
        "must be the name",
    ),
    (
        "a splice of an expression",
        [
            {
                "id": "g",
                "op": "generate",
                "messages": [{"splice": {"var": "docs"}}],
                "output": {"variable": "o"},
            }
        ],
        "program.name",
        "program.nodes[0].messages[0].splice",
        "must be the name",
    ),
    (
        "a kill that waits for nothing",
        [generate("a", "A"), {"id": "k", "op": "kill", "targets": ["a"]}],
        "program.control",
        "program.nodes[1]",
        "add `after` or `when`",
    ),
    (
        "a kill of nothing known",
        [{"id": "k", "op": "kill", "targets": ["nope"], "when": True}],
        "program.unknown_variable",
        "program.nodes[0].targets[0]",
        "`nope`",
    ),
    (
        "a kill of an input",
        [{"id": "k", "op": "kill", "targets": ["q"], "when": True}],
        "program.control",
        "program.nodes[0].targets[0]",
        "no node writes this variable",
    ),
    (
        "a quorum of more than there are",
        [{"id": "w", "op": "wait", "variables": ["q", "q"], "mode": 2}],
        "program.control",
        "program.nodes[0].mode",
        "only 1 variables",
    ),
    (
        "a wait for an item",
        [map_({"id": "w", "op": "wait", "variables": ["x"]})],
        "program.control",
        "program.nodes[0].body[0].variables[0]",
        "has its value when the body starts",
    ),
    (
        "retries of a map",
        [map_(MADE, retries=1)],
        "program.control",
        "program.nodes[0].retries",
        "put it into a `try`",
    ),
    (
        "an output that stays inside",
        [map_(MADE)],
        "program.unknown_output",
        "program.outputs[0]",
        "visible only in a body",
    ),
]


@pytest.mark.parametrize(
    ("nodes", "code", "path", "words"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_invalid_bodies_are_refused(nodes: list[Json], code: str, path: str, words: str) -> None:
    outputs = ["v"] if code == "program.unknown_output" else []
    error = refusal(*nodes, outputs=outputs)
    assert (error.code, error.path) == (code, path)
    assert words in error.message


def test_a_kill_of_a_job_with_the_name_of_a_variable_is_refused() -> None:
    kill = {"id": "k", "op": "kill", "targets": ["q"], "when": True}
    for nodes, path in (([kill], "nodes[0]"), ([map_(kill)], "nodes[0].body[0]")):
        error = refusal(*nodes, jobs={"q": {}})
        assert (error.code, error.path) == ("program.control", f"program.{path}.targets[0]")
        assert "`q` is a job and a variable" in error.message
    build(if_([expr("e", 1, "side")], []), {**kill, "targets": ["side"]}, jobs={"side": {}})


def test_sibling_bodies_share_item_names() -> None:
    graph = build(map_(MADE), {**map_(expr("f", var("x"), "w")), "id": "n"})
    assert graph.nodes.keys() == {"m", "n"}
    assert graph.inputs == {"docs", "q"}


def test_instances_inherit_declared_types() -> None:
    graph = build(map_(MADE), variables={"docs": {}, "q": {}, "v": {"type": "int"}})
    assert "v" not in graph.variables
    node = graph.nodes["m"]
    graph.add_instances(BodyTemplate("m", node.body).instantiate("0", ".0", {"x": 1}))  # type: ignore[union-attr]
    assert graph.variables["v.0"].type == "int"


def test_body_depth_is_limited() -> None:
    def nested(depth: int) -> Json:
        node: Json = expr("e", 1, "v")
        for level in range(depth):
            node = {**map_(node, items=[1]), "id": f"m{level}", "as": f"x{level}"}
        return node

    build(nested(extension.MAX_TEMPLATE_DEPTH))
    error = refusal(nested(extension.MAX_TEMPLATE_DEPTH + 1))
    assert (error.code, error.status) == ("program.too_large", 413)
    assert error.path == f"program.nodes[0]{'.body[0]' * extension.MAX_TEMPLATE_DEPTH}"
    assert error.message.endswith("at most 16 levels deep, and node `m0` is deeper")


@pytest.mark.parametrize("part", ["then", "handlers[0].body"])
def test_the_depth_of_branches_is_limited(part: str) -> None:
    def nested(depth: int) -> Json:
        node: Json = expr("e", 1, "v")
        for level in range(depth):
            around = if_([node], []) if part == "then" else try_(handlers=[{"body": [node]}])
            node = {**around, "id": f"c{level}"}
        return node

    build(nested(extension.MAX_BODY_DEPTH))
    error = refusal(nested(extension.MAX_BODY_DEPTH + 1))
    assert error.path == f"program.nodes[0]{f'.{part}[0]' * (extension.MAX_BODY_DEPTH + 1)}"
    assert error.message.endswith("at most 32 levels deep, and node `e` is deeper")


def test_nodes_in_bodies_count_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "MAX_NODES", 3)
    build(if_([MADE], [expr("f", 1)]))
    assert refusal(if_([MADE], [map_(expr("f", 1))])).code == "program.too_large"


def test_the_number_of_instances_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build(map_(MADE))
    monkeypatch.setattr(extension, "MAX_EXPANDED_NODES", 2)
    template = BodyTemplate("m", graph.nodes["m"].body)  # type: ignore[union-attr]
    graph.add_instances(template.instantiate("0", ".0", {}))
    with pytest.raises(ProgramError, match="can expand to at most 2 nodes"):
        graph.add_instances(template.instantiate("1", ".1", {}))
    assert "e.1" not in graph.nodes


def test_appended_nodes_cannot_see_into_bodies() -> None:
    graph = build(map_(MADE, collect={"all": "v"}), open=True)
    append = msgspec.convert({"nodes": [expr("f", var("all"))]}, Append)
    assert graph.append(append) == ("f",)
    with pytest.raises(ProgramError, match="visible only in the body"):
        graph.append(msgspec.convert({"nodes": [expr("g", var("v"))]}, Append))
    with pytest.raises(ProgramError, match="two nodes have the id `e`"):
        graph.append(msgspec.convert({"nodes": [expr("e", 1, "w")]}, Append))


def test_two_maps_over_one_list_share_prefixes() -> None:
    first = map_(generate("a", "Same. ", insert("x"), "one", writes="va"))
    second = {
        **map_(generate("b", "Same. ", insert("y"), "two", writes="vb")),
        "id": "n",
        "as": "y",
    }
    graph = build(first, second)
    texts = []
    for control, name in (("m", "x"), ("n", "y")):
        body = graph.nodes[control].body  # type: ignore[union-attr]
        bound = {name: item_expression("docs", 3)}
        (instance,) = BodyTemplate(control, body).instantiate("3", ".3", bound)
        assert isinstance(instance.node, GenerateNode)
        assert isinstance(instance.node.prompt, list)
        texts.append(instance.node.prompt[1].input)
    assert texts[0] == texts[1] == {"get": [{"var": "docs"}, 3]}


# --- renaming -------------------------------------------------------------------------------

NAMES = st.sampled_from(["made", "item", "docs", "free"])
EXPRESSIONS = st.recursive(
    NAMES.map(var) | st.integers(0, 3) | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(lambda name, body: {"each": [[1, 2], name, body]}, NAMES, inner)
        | st.builds(lambda a, b: {"if": [a, b, a]}, inner, inner)
        | st.builds(lambda key, value: {"object": {key: value}}, NAMES, inner)
        | st.builds(lambda value: {"lit": {"var": value}}, NAMES)
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_an_instance_computes_the_template_expression(expression: Json) -> None:
    """With `made` renamed and `item` replaced, the value in the renamed scope is the same."""
    docs = ["d0", "d1"]
    meant = evaluate(expression, {"made": "M", "item": "d1", "docs": docs, "free": "F"})
    renaming = Renaming(
        DefinedNames(variables=frozenset({"made"})), ".1", {"item": item_expression("docs", 1)}
    )
    renamed = renaming.expression(expression)
    assert evaluate(renamed, {"made.1": "M", "docs": docs, "free": "F"}) == meant
    assert not variables(renamed) & {"made", "item"}


def test_a_node_and_an_outer_variable_may_have_one_name() -> None:
    graph = build(map_(expr("q", {"concat": [var("q"), var("x")]}, "made")))
    template = BodyTemplate("m", graph.nodes["m"].body)  # type: ignore[union-attr]
    (instance,) = template.instantiate("1", ".1", {"x": item_expression("docs", 1)})
    (slot,) = instance.slots
    assert (instance.node.id, slot.writes) == ("q.1", ("made.1",))
    assert slot.reads == {"q", "docs"}


def test_an_instance_renames_every_field() -> None:
    """A body with all kinds of nodes: no name of the template is left in an instance."""
    body: list[Json] = [
        generate("call", insert("x"), insert("v1"), writes="v2", when="v1", after=["ask"]),
        {
            "id": "chat",
            "op": "generate",
            "messages": [
                {"splice": "v1"},
                {"role": "user", "content": [{"input": {"var": "v2"}}]},
            ],
            "output": {"variable": "v3"},
        },
        client("ask", "v1", args={"a": var("x")}),
        {"id": "fun", "op": "call", "function": "f", "args": {"a": var("v3")}, "output": "v4"},
        {"id": "wait", "op": "wait", "variables": ["v2"]},
        {"id": "kill", "op": "kill", "targets": ["v3"]},
        {"id": "tell", "op": "yield", "value": var("v4")},
        {
            **if_([expr("i1", var("v1"), "w1")], [expr("i2", 1, "w2")], merge={"w": ["w1", "x"]}),
            "cond": "v2",
        },
        try_(
            expr("t1", var("v1"), "u1"),
            handlers=[{"body": [expr("t2", 1, "u2")]}],
            merge={"u": ["u1", "u2"]},
        ),
        {**map_(expr("n1", var("y"), "o1"), items="v1", collect={"o": "o1"}), "id": "n", "as": "y"},
        loop(
            expr("l1", var("r"), "p1"),
            count=2,
            carry={"r": [var("w"), var("p1")]},
            until={"eq": [var("p1"), var("x")]},
        ),
    ]
    graph = build(map_(*body))
    template = BodyTemplate("m", graph.nodes["m"].body)  # type: ignore[union-attr]
    instances = template.instantiate("7", ".7", {"x": item_expression("docs", 7)})
    text = msgspec.json.encode([instance.node for instance in instances]).decode()
    made = {"call", "chat", "ask", "fun", "wait", "kill", "tell", "c", "t", "n", "l"}
    made |= {"i1", "i2", "t1", "t2", "n1", "l1", "w", "u", "o", "r"}
    made |= {f"{kind}{i}" for kind in "vwuop" for i in range(1, 5)}
    assert not [
        name
        for name in made
        if f'"{name}"'
        in text.replace('"op":"call"', "").replace('"op":"wait"', "").replace('"op":"kill"', "")
    ]
    assert '"x"' not in text.replace('"as":"x"', "")
    for _, slots, _ in instances:
        for slot in slots:
            assert all("." in name for name in slot.writes)
            assert {"x", "y"}.isdisjoint(slot.reads | slot.may_read)
    again: list[AnyNode] = [i.node for i in instances]  # type: ignore[misc]
    assert len({node.id for node in again}) == len(again)
