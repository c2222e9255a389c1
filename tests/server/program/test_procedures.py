"""Signatures, versions and expanded calls of procedures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conure.server.program.errors import ProgramError
from conure.server.program.graph.graph import Graph
from conure.server.program.ir import Job, ProcedureNode, Program, Variable
from conure.server.program.nodes.bodies import walk
from conure.server.program.procedures import (
    ExpandedCalls,
    Procedure,
    calls_in,
    expand_calls,
    parse_reference,
    signature_of,
    version_of,
)

SUMMARISE = {
    "variables": {"text": {"type": "string"}, "style": {"default": "short"}},
    "nodes": [
        {
            "id": "ask",
            "op": "generate",
            "prompt": [{"input": "style"}, {"input": "text"}, {"output": "summary", "seed": 7}],
        },
        {
            "id": "words",
            "op": "map",
            "items": {"split": [{"var": "summary"}, " "]},
            "as": "word",
            "body": [
                {
                    "id": "mark",
                    "op": "expr",
                    "expr": {
                        "each": [[1], "word2", {"concat": [{"var": "word"}, {"var": "style"}]}]
                    },
                    "output": "marked",
                }
            ],
            "collect": {"all": "marked"},
        },
        {"id": "stop", "op": "kill", "targets": ["summary", "side"], "after": ["words"]},
        {"id": "aside", "op": "expr", "expr": 1, "output": "extra", "job": "side"},
    ],
    "outputs": ["summary", "all"],
}


def program(document: dict[str, Any]) -> Program:
    return msgspec.convert(document, Program)


def procedure(document: dict[str, Any], name: str = "summarise") -> Procedure:
    decoded = program(document)
    return Procedure(name=name, version=version_of(decoded), program=decoded)


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "op": "procedure", "procedure": "summarise", **fields}


def expand(nodes: list[dict[str, Any]], document: dict[str, Any] = SUMMARISE) -> ExpandedCalls:
    procedures = {"summarise": procedure(document)}
    return expand_calls(program({"nodes": nodes}).nodes, procedures, "program.nodes")


def build(nodes: list[dict[str, Any]], **fields: Any) -> Graph:
    """Return the graph of a program whose calls are expanded."""
    expanded = expand(nodes)
    base = program(fields)
    variables = base.variables | expanded.variables
    whole = msgspec.structs.replace(
        base, nodes=expanded.nodes, variables=variables, jobs=expanded.jobs
    )
    # As the journal stores it.
    return Graph.build(msgspec.json.decode(msgspec.json.encode(whole), type=Program), {})


def refusal(nodes: list[dict[str, Any]]) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        expand(nodes)
    return caught.value


def test_a_version_depends_on_the_record_and_not_on_its_json() -> None:
    reordered = dict(reversed(SUMMARISE.items()))
    assert version_of(program(reordered)) == version_of(program(SUMMARISE))
    changed = {**SUMMARISE, "outputs": ["summary"]}
    assert version_of(program(changed)) != version_of(program(SUMMARISE))


def test_inputs_are_parameters_and_outputs_are_results() -> None:
    signature = signature_of(program(SUMMARISE))
    assert list(signature.parameters) == ["text", "style"]
    assert signature.parameters["text"] == Variable(type="string")
    assert list(signature.results) == ["summary", "all"]


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("a.b", ("a.b", None, "default")),
        ("a:prod", ("a", None, "prod")),
        ("a@" + "0" * 32, ("a", "0" * 32, None)),
    ],
)
def test_a_reference_names_a_version_or_an_alias(reference: str, parts: tuple[Any, ...]) -> None:
    assert parse_reference(reference) == parts


def test_an_expanded_call_is_part_of_the_graph_under_new_names() -> None:
    graph = build(
        [call(args={"text": {"var": "page"}}, outputs={"short": "summary"})],
        variables={"page": {}, "text": {}, "word": {}},
        outputs=["short"],
    )
    assert {"c", "ask__c", "words__c", "aside__c"} <= graph.nodes.keys()
    assert graph.variables["text__c"].type == "string"
    assert graph.jobs["side__c"].parent == "main"
    assert graph.nodes["stop__c"].targets == ["summary__c", "side__c"]  # type: ignore[union-attr]  # a kill
    assert graph.definitions.get("short") == {"var": "summary__c"}


def test_a_given_seed_stays_the_same_in_an_expanded_call() -> None:
    expanded = expand([call(args={"text": "x"})])
    generate = next(node for _, node in walk(expanded.nodes, "") if node.id == "ask__c")
    assert generate.prompt[2].seed == 7  # type: ignore[attr-defined]  # a generate node


INNER = call(args={"text": {"var": "it"}}, output="both")


@pytest.mark.parametrize(
    "outer",
    [
        {"op": "map", "items": [1, 2], "as": "it", "body": [INNER], "collect": {"out": "both"}},
        {
            "op": "loop",
            "items": [1],
            "as": "it",
            "body": [INNER],
            "carry": {"out": [0, {"var": "both"}]},
        },
        {"op": "if", "cond": True, "else": [INNER], "merge": {"out": ["it", "both"]}},
        {
            "op": "try",
            "body": [],
            "handlers": [{"body": [INNER]}],
            "merge": {"out": ["it", "both"]},
        },
        {"op": "procedure", "procedure": "summarise", "args": {"text": "x"}, "output": "out"},
    ],
)
def test_a_call_in_a_body_is_expanded(outer: dict[str, Any]) -> None:
    variables: dict[str, Any] = {} if "as" in outer else {"it": {}}
    graph = build([{"id": "o", **outer}], variables=variables, outputs=["out"])
    assert "out" in graph.variables


def test_a_call_in_a_job_runs_its_nodes_in_this_job() -> None:
    expanded = expand([call(args={"text": "x"}, job="team")])
    jobs = {node.id: node.job for _, node in walk(expanded.nodes, "")}
    assert jobs["ask__c"] == "team"
    assert jobs["aside__c"] == "side__c"
    assert expanded.jobs["side__c"].parent == "team"


@pytest.mark.parametrize(
    "main",
    [
        {"jobs": {"main": {"timeout_s": 5, "on_error": "isolate"}}},
        {"nodes": [*SUMMARISE["nodes"], {"id": "k", "op": "kill", "targets": ["main"]}]},
    ],
    ids=["declared", "killed"],
)
def test_a_main_job_with_options_or_a_kill_belongs_to_the_call(main: dict[str, Any]) -> None:
    document = {**SUMMARISE, **main}
    expanded = expand([call(args={"text": "x"}, job="outer")], document)
    nodes = {node.id: node for _, node in walk(expanded.nodes, "")}
    assert (nodes["c"].job, nodes["ask__c"].job) == ("outer", "main__c")
    declared = msgspec.convert(document.get("jobs", {}).get("main", {}), Job)
    assert expanded.jobs["main__c"] == msgspec.structs.replace(declared, parent="outer")
    assert expanded.jobs["side__c"].parent == "main__c"


def test_an_omitted_argument_has_its_default() -> None:
    (node,) = expand([call(args={"text": "x"})]).nodes
    assert isinstance(node, ProcedureNode)
    assert node.bound[1].value == {"lit": "short"}


def test_several_results_in_one_output_are_an_object() -> None:
    (node,) = expand([call(args={"text": "x"}, output="both")]).nodes
    assert isinstance(node, ProcedureNode)
    inner = {"summary": {"var": "summary__c"}, "all": {"var": "all__c"}}
    assert node.returns == {"both": {"object": inner}}


@pytest.mark.parametrize(
    ("fields", "code", "path"),
    [
        ({}, "procedure.argument", "program.nodes[0].args"),
        ({"args": {"text": 1, "tone": 2}}, "procedure.argument", "program.nodes[0].args.tone"),
        (
            {"args": {"text": 1}, "outputs": {"x": "sumary"}},
            "procedure.result",
            "program.nodes[0].outputs.x",
        ),
        ({"output": "x", "outputs": {"y": "all"}}, "program.control", "program.nodes[0].outputs"),
        ({"body": [call()]}, "program.control", "program.nodes[0].body"),
        ({"returns": {"x": 1}}, "program.control", "program.nodes[0].body"),
    ],
)
def test_a_call_that_does_not_fit_its_procedure_is_refused(
    fields: dict[str, Any], code: str, path: str
) -> None:
    error = refusal([call(**fields)])
    assert (error.code, error.path) == (code, path)


def test_a_call_that_makes_a_name_too_long_is_refused() -> None:
    long = {"variables": {"a" * 100: {}}, "outputs": ["a" * 100]}
    with pytest.raises(ProgramError, match="give the call a shorter id") as caught:
        expand([call(id="c" * 27, args={"a" * 100: 1})], long)
    assert (caught.value.code, caught.value.path) == ("program.name", "program.nodes[0].id")
    assert expand([call(id="c" * 26, args={"a" * 100: 1}, output="b")], long).nodes


def test_a_procedure_without_nodes_is_expanded() -> None:
    expanded = expand([call(args={"x": 1}, output="y")], {"variables": {"x": {}}, "outputs": ["x"]})
    [node] = expanded.nodes
    assert isinstance(node, ProcedureNode)
    assert node.is_expanded


def test_a_call_inside_a_body_is_refused_with_its_path() -> None:
    outer = {"id": "o", "op": "if", "cond": True, "then": [], "else": [call()]}
    assert refusal([outer]).path == "program.nodes[0].else[0].args"


def test_many_calls_of_a_large_procedure_are_refused_before_they_are_built() -> None:
    calls = [{**call(args={"text": "x"}), "id": f"c{index}"} for index in range(2_001)]
    error = refusal(calls)
    assert (error.code, error.status) == ("program.too_large", 413)


def test_a_call_that_was_not_expanded_is_refused() -> None:
    with pytest.raises(ProgramError) as caught:
        Graph.build(program({"nodes": [call()]}), {})
    assert caught.value.code == "procedure.unexpanded"


def test_calls_are_found_with_their_paths() -> None:
    nodes = program({"nodes": [call(), {"id": "i", "op": "if", "cond": 1, "then": [call()]}]}).nodes
    assert [path for path, _ in calls_in(nodes, "nodes")] == ["nodes[0]", "nodes[1].then[0]"]
