"""Templates: slots, options, positions of errors."""

from __future__ import annotations

import warnings

import msgspec
import pytest

from conure.server.language.compiler import compile_source
from conure.server.language.errors import LanguageError
from conure.server.language.template import InputSlot, OutputSlot, parse_template
from conure.server.program.graph.graph import Graph


def test_text_inputs_and_outputs_are_found() -> None:
    parts = parse_template("Hi {{name}}, {{name=answer, max_tokens=5, stop=['.', '!']}}")
    assert parts[0] == "Hi "
    assert isinstance(parts[1], InputSlot)
    assert isinstance(parts[3], OutputSlot)
    assert parts[3].options == {"max_tokens": 5, "stop": [".", "!"]}


def test_an_end_marker_follows_its_output_in_the_context() -> None:
    parts = parse_template("{{name=a, end=<|im_end|>}}\n{{name=b, end='###'}}")
    assert parts[1] == "<|im_end|>\n"
    assert parts[3] == "###"


def test_four_braces_are_two_characters() -> None:
    assert parse_template("a {{{{b}}}} {{name=x}}")[0] == "a {{b}}}} "


def test_quoted_braces_and_commas_belong_to_the_value() -> None:
    (slot,) = parse_template("{{name=a, stop=['}}', ','], schema={'type': 'object'}}}")
    assert isinstance(slot, OutputSlot)
    assert slot.options == {"stop": ["}}", ","], "schema": {"type": "object"}}


def test_outputs_may_be_inserted_later() -> None:
    program = compile_source("{{q}}{{name=a}} again: {{a}}{{name=b}}", "template")
    Graph.build(program, {})
    prompt = msgspec.to_builtins(program.nodes[0])["prompt"]
    assert prompt == [
        {"input": "q"},
        {"output": "a"},
        {"text": " again: "},
        {"input": "a"},
        {"output": "b"},
    ]
    assert program.outputs == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("no slot", "no output", (1, 1)),
        ("a\n {{name=x", "not closed", (2, 2)),
        ("{{1x}}", "is not a name", (1, 1)),
        ("{{name=x, size=3}}", "unknown option `size`", (1, 1)),
        ("{{name=x, temperature=hot}}", "not a literal", (1, 10)),
        ("{{name=x}} {{name=x}}", "two slots have the name `x`", (1, 12)),
        ("{{x}} {{name=x}}", "written only later", (1, 1)),
        ("{{name=a, model=one}}{{name=b, model=two}}", "one context has one `model`", (1, 22)),
        ("{{name=a, timeout=1}}{{name=b, timeout=2}}", "one context has one `timeout`", (1, 22)),
        ("{{name=a, end=<|x|>, stop=5}}", "`stop` is a text or a list of texts", (1, 1)),
        ("{{name=a, stream=true}}", "cannot be a stream", (1, 1)),
        ("{{name=a, tools=[1]}}", "use `llm_chat`", (1, 1)),
        (r"{{name=a, choices=['\ud800']}}", "half of a surrogate pair", (1, 10)),
        (r"{{name=a, schema={'\ud800': 1}}}", "half of a surrogate pair", (1, 10)),
        ("{{name=a, seed=99999999999999999999}}", "fit into 64 bits", (1, 10)),
    ],
)
def test_an_error_has_a_position(text: str, message: str, position: tuple[int, int]) -> None:
    with pytest.raises(LanguageError) as caught:
        compile_source(text, "template")
    assert message in caught.value.message
    assert (caught.value.line, caught.value.column) == position


def test_options_of_the_call_may_be_given_to_any_slot() -> None:
    source = "{{name=a, timeout=5, retries=2}} {{name=b, priority=3, timeout=5}}"
    node = msgspec.to_builtins(compile_source(source, "template").nodes[0])
    assert (node["timeout_s"], node["retries"], node["priority"]) == (5, 2, 3)


def test_a_stop_that_is_null_is_not_given() -> None:
    node = compile_source("{{name=a, end=<|x|>, stop=null}}", "template").nodes[0]
    assert msgspec.to_builtins(node)["prompt"] == [{"output": "a", "stop": ["<|x|>"]}]


def test_odd_spellings_do_not_warn_the_server() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile_source(r"{{name=a, stop='\d'}}", "template")
    assert caught == []


def test_slots_know_their_lines() -> None:
    slots = [
        each for each in parse_template("{{a}} {{b}}\n\n é {{c}}") if not isinstance(each, str)
    ]
    assert [tuple(each.position) for each in slots] == [(1, 1), (1, 7), (3, 4)]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("0", 0),
        ("20", 20),
        ("1_000", 1000),
        ("0x1f", 31),
        ("-3", -3),
        ("1.5", 1.5),
        ("[1, 2]", [1, 2]),
    ],
)
def test_a_number_is_spelled_as_in_python(literal: str, value: object) -> None:
    (slot,) = parse_template(f"{{{{name=x, seed={literal}}}}}")
    assert isinstance(slot, OutputSlot)
    assert slot.options == {"seed": value}


def test_a_bracket_in_quotes_ends_no_slot() -> None:
    (slot,) = parse_template("{{name=x, stop=['}}', \"]\"]}}")
    assert isinstance(slot, OutputSlot)
    assert slot.options == {"stop": ["}}", "]"]}
