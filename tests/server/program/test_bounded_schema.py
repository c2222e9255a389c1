"""Bounds for the integers of JSON Schemas."""

from __future__ import annotations

from typing import Any

import pytest

from conure.engine.constraints.grammar import accepts, byte_tokenizer, compile_grammar
from conure.server.program.bounded_schema import MAX_BOUNDS, MAX_INTEGER, bound_integers
from conure.server.program.grammar import grammar_of
from conure.server.program.ir import Constraint

TOKENIZER = byte_tokenizer([])
INTEGER: dict[str, Any] = {"type": "integer"}
BOUNDED = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}


def matches(schema: dict[str, Any], text: str) -> bool:
    grammar = grammar_of(Constraint(json_schema=schema))
    return accepts(compile_grammar(TOKENIZER, grammar), list(text.encode()))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (INTEGER, ["0", "-7", str(MAX_INTEGER), str(-MAX_INTEGER)], ["9" * 19, "-" + "9" * 30]),
        ({"type": ["integer", "null"]}, ["null", "5"], ["9" * 19]),
        ({"type": "integer", "minimum": 3}, ["3", "9" * 18], ["2", "9" * 19]),
        ({"type": "integer", "maximum": 1e30}, ["9" * 18], ["9" * 19]),
        ({"type": "integer", "exclusiveMaximum": 3}, ["2"], ["3", "-" + "9" * 19]),
        ({"type": "array", "items": INTEGER}, ["[1,2]"], ["[1," + "9" * 19 + "]"]),
        ({"type": "number"}, ["1.5", "6.02e23"], ["x"]),
    ],
)
def test_integers_fit_64_bits(
    schema: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    assert [text for text in inside if not matches(schema, text)] == []
    assert [text for text in outside if matches(schema, text)] == []


@pytest.mark.parametrize("keyword", ["properties", "$defs", "patternProperties"])
def test_schemas_by_name_are_bounded(keyword: str) -> None:
    assert bound_integers({keyword: {"type": INTEGER}}) == {keyword: {"type": BOUNDED}}


@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "oneOf", "prefixItems"])
def test_schemas_in_lists_are_bounded(keyword: str) -> None:
    assert bound_integers({keyword: [INTEGER, True]}) == {keyword: [BOUNDED, True]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "integer", "enum": [2**70]},
        {"not": {"type": "integer"}},
        {"default": {"type": "integer"}},
        {"properties": {"type": True}},
        {"type": ["integer", "number"]},
        {"type": "integer", "minimum": 2**63 - 1},
        {"type": "integer", "maximum": -1e19},
        {"type": "integer", "minimum": "x"},
        {"type": "integer", "maximum": None},
        {"prefixItems": [{"type": "integer"}] * (MAX_BOUNDS + 1)},
    ],
)
def test_other_schemas_stay(schema: dict[str, Any]) -> None:
    assert bound_integers(schema) == schema


def test_the_given_schema_does_not_change() -> None:
    given = {"properties": {"a": {"type": "integer"}}}
    bound_integers(given)
    assert given == {"properties": {"a": {"type": "integer"}}}
