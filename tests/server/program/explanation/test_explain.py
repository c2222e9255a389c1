"""Explanations: sharing, worst case, advice, and their renderings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conure.server.program.explanation import prompts, worst_case
from conure.server.program.explanation.explain import ModelLimits, explain
from conure.server.program.explanation.records import KnownTokens, ProgramExplanation
from conure.server.program.explanation.rendering import to_mermaid, to_text
from conure.server.program.expressions.budget import WorkBudget
from conure.server.program.expressions.evaluate import evaluate
from conure.server.program.graph.graph import Graph
from conure.server.program.ir import Submission

MODEL = ModelLimits(lambda text: len(text.split()), 1_000)
"""A token is a word."""
LONG = "this long instruction has many words so that it is worth to be moved to the front here "


def generate(node: str, prompt: str, **fields: Any) -> dict[str, Any]:
    output = {"variable": f"v_{node}", "max_tokens": 10}
    return {"id": node, "op": "generate", "prompt": prompt, "output": output, **fields}


def explained(nodes: list[dict[str, Any]], outputs: list[str], **inputs: Any) -> ProgramExplanation:
    variables: dict[str, Any] = {name: {} for name in ["x", "xs", "flag"]}
    document = {
        "program": {"variables": variables, "nodes": nodes, "outputs": outputs},
        "inputs": inputs,
    }
    submission = msgspec.convert(document, Submission)
    return explain(submission, Graph.build(submission.program, submission.inputs), MODEL)


def codes(explanation: ProgramExplanation) -> dict[str, str | None]:
    unread = ("input.unread", "variable.unread")
    return {each.code: each.node for each in explanation.advice if each.code not in unread}


def test_calls_that_begin_alike_share_also_values_that_do_not_exist() -> None:
    explanation = explained(
        [
            generate("a", "one two three"),
            generate("b", "four five {{v_a}} six"),
            generate("c", "four five {{v_a}} seven"),
        ],
        ["v_b", "v_c"],
    )
    (span,) = explanation.shared
    assert span.calls == ["b", "c"]
    assert (span.prefix.tokens, span.prefix.values, span.saved_tokens) == (2, ["v_a"], 2)


def test_each_prefix_is_counted_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[object] = []

    def known_tokens(segments: Any) -> KnownTokens:
        counted.append(segments)
        return original(segments)

    original = prompts.known_tokens
    monkeypatch.setattr(prompts, "known_tokens", known_tokens)
    prompt = "".join(f"word {{{{v{number}}}}} " for number in range(50))
    values = [
        {"id": f"v{number}", "op": "client", "name": "s", "output": f"v{number}"}
        for number in range(50)
    ]
    nodes = [generate("a", f"{prompt}one"), generate("b", f"{prompt}two")]
    (span,) = explained([*values, *nodes], ["v_a", "v_b"]).shared
    assert (span.prefix.tokens, len(span.prefix.values)) == (50, 50)
    assert len(counted) <= 5


def test_a_body_shares_with_itself_what_does_not_change() -> None:
    node = generate("n", "the same words {{x}} then {{it}} last")
    each = {"id": "m", "op": "map", "items": "xs", "as": "it", "max_width": 7, "body": [node]}
    (span,) = explained([each], [], x="known").shared
    assert (span.times, span.prefix.tokens) == (7, 5)  # "the same words", "known", "then"
    assert span.saved_tokens == 30


def test_the_worst_case_of_a_constant_list_has_its_length() -> None:
    items = {"id": "xs", "op": "expr", "expr": {"lit": [1, 2, 3]}, "output": "xs"}
    each = {"id": "m", "op": "map", "items": "xs", "as": "i", "body": [generate("n", "x")]}
    assert explained([items, each], []).worst_case.calls == 3


@pytest.mark.parametrize(
    ("node", "calls"),
    [
        ({"op": "map", "items": "xs", "as": "i", "max_width": 9}, 9),
        ({"op": "map", "items": {"lit": [1, 2]}, "as": "i"}, 2),
        ({"op": "loop", "count": 4}, 4),
        ({"op": "loop", "until": {"var": "flag"}, "max_iter": 6}, 6),
        ({"op": "try", "retries": 2, "handlers": [{"body": [generate("h", "x")]}]}, 4),
    ],
)
def test_the_worst_case_counts_repetitions(node: dict[str, Any], calls: int) -> None:
    body = [generate("n", "x")]
    worst = explained([{"id": "c", "body": body, **node}], []).worst_case
    assert (worst.calls, worst.output_tokens) == (calls, calls * 10)


def test_lists_of_the_submission_are_read_without_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worst_case, "MAX_STEPS", 1)
    maps = [
        {"id": f"m{i}", "op": "map", "items": "xs", "as": "i", "body": [generate(f"n{i}", "x")]}
        for i in range(20)
    ]
    assert explained(maps, [], xs=[{"key": "value"}] * 100).worst_case.calls == 20 * 100


def test_lists_are_evaluated_once_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Any] = []
    steps = 0

    def counted(expr: Any, scope: Any, *, budget: WorkBudget) -> Any:
        nonlocal steps
        evaluated.append(expr)
        before = budget.left
        try:
            return evaluate(expr, scope, budget=budget)
        finally:
            steps += before - budget.left

    monkeypatch.setattr(worst_case, "evaluate", counted)
    maps = [
        {"id": f"m{number}", "op": "map", "items": {"range": [9_000]}, "as": "i", "body": [call]}
        for number in range(20)
        for call in [generate(f"n{number}", "x")]
    ]
    calls = explained(maps, []).worst_case.calls
    assert evaluated == [{"range": [9_000]}] * 20
    assert steps <= worst_case.MAX_STEPS
    assert 20 * 9_000 < calls < 20 * 10_000  # the last lists are unknown, and count as the widest


def test_a_retry_of_a_try_repeats_its_body_and_not_its_handlers() -> None:
    handlers = [{"body": [generate("h", "x")]}]
    node = {"id": "t", "op": "try", "retries": 2, "body": [generate("n", "x")]}
    times = {each.id: each.times for each in explained([{**node, "handlers": handlers}], []).nodes}
    assert times == {"t": 1, "n": 3, "h": 1}


def test_the_worst_case_of_an_if_is_its_dearer_body_with_all_retries() -> None:
    node = {
        "id": "c",
        "op": "if",
        "cond": "flag",
        "then": [generate("n", "one two", retries=1)],
        "else": [generate("o", "one"), generate("p", "one"), generate("q", "{{x}}")],
    }
    worst = explained([node], []).worst_case
    assert worst.calls == 3
    assert worst.prompt_tokens == 1_002  # the value of x may fill the context


def test_nodes_without_a_use_are_dead_but_effects_are_not() -> None:
    nodes = [
        generate("used", "x"),
        generate("dead", "x"),
        {"id": "yields", "op": "yield", "value": {"var": "v_heard"}},
        generate("heard", "x"),
        generate("first", "x"),
        {"id": "last", "op": "expr", "expr": 1, "output": "end", "after": ["first"]},
    ]
    found = [a.node for a in explained(nodes, ["v_used", "end"]).advice if a.code == "node.dead"]
    assert found == ["dead"]


def test_advice_moves_constant_text_before_an_item() -> None:
    node = generate("n", "{{it}}" + LONG)
    each = {"id": "m", "op": "map", "items": "xs", "as": "it", "max_width": 10, "body": [node]}
    (advice,) = [a for a in explained([each], []).advice if a.code == "prompt.order"]
    assert advice.saves_tokens == len(LONG.split()) * 9
    assert "before `it`" in advice.fix
    better = generate("n", LONG + "{{it}}")
    each = {"id": "m", "op": "map", "items": "xs", "as": "it", "max_width": 10, "body": [better]}
    assert "prompt.order" not in codes(explained([each], []))


def test_advice_moves_common_text_before_different_beginnings() -> None:
    nodes = [generate("a", "Critic: {{x}}" + LONG), generate("b", "Copilot: {{x}}" + LONG)]
    explanation = explained(nodes, ["v_a", "v_b"])
    # Each prompt is three segments: beginning, value, text.
    assert codes(explanation) == {"prompt.order": "b"}
    same = [generate("a", LONG + "{{x}} Critic"), generate("b", LONG + "{{x}} Copilot")]
    assert codes(explained(same, ["v_a", "v_b"])) == {}


def test_a_text_has_no_control_characters_of_names() -> None:
    explanation = msgspec.structs.replace(explained([], []), name="a\x1b[2J\nb")
    assert to_text(explanation).startswith("a\\x1b[2J\\nb  ")


def test_renderings_contain_every_node_and_no_syntax_of_names() -> None:
    node = generate("n", 'say "]) --> x')
    each = {"id": "m", "op": "map", "items": "xs", "as": "it", "max_width": 2, "body": [node]}
    explanation = explained([each, generate("other", "x")], [])
    text, diagram = to_text(explanation), to_mermaid(explanation)
    assert "    n: generate; up to 2 times" in text
    assert diagram.startswith("flowchart TD\n")
    assert diagram.count("subgraph") == diagram.count("end\n") == 1
    assert 'n1(["n: generate, up to 2 times"])' in diagram
