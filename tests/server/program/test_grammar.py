"""The grammars of constraints, checked with the compiler."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.engine.constraints.grammar import accepts, byte_tokenizer, compile_grammar
from conure.server.program.grammar import MAX_LIST_ITEMS, grammar_of
from conure.server.program.ir import Constraint

TOKENIZER = byte_tokenizer([])


def matches(constraint: Constraint, text: str) -> bool:
    return accepts(compile_grammar(TOKENIZER, grammar_of(constraint)), list(text.encode()))


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        ("int", ["0", "-7", "12", "9" * 18], ["", "+1", "01", "1.0", "9" * 19, " 1", "1 "]),
        ("float", ["0", "-0.5", "12", "1e9", "1.25E-30"], ["", ".5", "1.", "1e999", "NaN", "inf"]),
        ("bool", ["true", "false"], ["True", "1", "", "true "]),
        ("string", ['""', '"a b"', '"\\n"', '"é🦜"'], ["", "a", '"a', '"\n"', ' "a"']),
        (
            "list",
            ['["a"]', '["a","b"]', '["' + "x" * 1024 + '"]'],
            ["", "[]", '["a", "b"]', "[1]", '["' + "x" * 1025 + '"]'],
        ),
    ],
)
def test_types_have_json_spelling(kind: str, inside: list[str], outside: list[str]) -> None:
    constraint = Constraint(type=kind)  # type: ignore[arg-type]  # one of them
    assert [text for text in inside if not matches(constraint, text)] == []
    assert [text for text in outside if matches(constraint, text)] == []


def test_the_length_of_a_list_is_limited() -> None:
    most = "[" + ",".join(['"a"'] * MAX_LIST_ITEMS) + "]"
    assert matches(Constraint(type="list"), most)
    assert not matches(Constraint(type="list"), most[:-1] + ',"a"]')


def test_schemas_produce_compact_json() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": True, "lenient": True},
    }
    constraint = Constraint(json_schema=schema)
    assert matches(constraint, '{"a":[1,2]}')
    assert not matches(constraint, '{"a": [1, 2]}')
    assert not matches(constraint, '{"a":[1,2],"b":1}')
    assert matches(Constraint(json_schema=True), '[{"any":null}]')


def test_a_lark_grammar_is_unchanged() -> None:
    assert matches(Constraint(lark='start: "a" b\nb: /[0-9]+/'), "a42")


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.text(max_size=12))
@settings(max_examples=150)
def test_choices_are_literal(choices: list[str], other: str) -> None:
    constraint = Constraint(choices=choices)
    assert all(matches(constraint, choice) for choice in choices)
    assert matches(constraint, other) == (other in choices)


def test_ten_thousand_choices_compile() -> None:
    choices = [f"choice number {i} of many" for i in range(10_000)]
    constraint = Constraint(choices=choices)
    assert matches(constraint, choices[7777])
    assert not matches(constraint, "choice number 10000 of many")


REGEXES = st.sampled_from(
    [
        "a/b",
        r"a\/b",
        r"[/]",
        "x\ny",
        r"\n",
        "\\\\/",
        r"\\",
        '"',
        "#",
        " ",
        "\x7f",
        "\x00",
        r"\d{2}",
        "(a|b)*",
        "é+",
    ]
)


@given(
    st.lists(REGEXES, min_size=1, max_size=4).map("".join),
    st.text('a/b\nxyé0129"# \\\x7f\x00', max_size=8),
)
@settings(max_examples=300)
def test_a_regex_matches_like_re(regex: str, text: str) -> None:
    expected = re.fullmatch(regex, text) is not None
    assert matches(Constraint(regex=regex), text) == expected
