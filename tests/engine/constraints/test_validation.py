"""Validation against relaxed schemas: keywords mean what they mean in the grammar."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from conure.engine.constraints import grammar
from conure.engine.constraints.sandbox import SandboxRequest, _reply
from conure.engine.constraints.validation import check_schema, is_valid
from conure.engine.protocol import EngineError

from ..constraint_harness import schema

NEVER = {"not": {"const": "never"}}
"""A keyword that no grammar enforces, so that the schema beside it is relaxed."""
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ({"type": "number", "multipleOf": 0.1}, 0.3),
        ({"type": "number", "multipleOf": 0.01}, 19.99),
        ({"type": "number", "minimum": 0.1}, 0.1),
        ({"type": "integer", "multipleOf": 3}, 3 * 10**40),
        ({"type": "string", "pattern": r"^\p{L}+$"}, "é"),
        ({"type": "string", "pattern": "^[[:alpha:]]$"}, "a"),
        ({"type": "string", "pattern": r"(?<x>a)\z"}, "ba"),
        ({"type": "string", "pattern": r"^[\s\S]+$"}, '"\x00\n\x7f\\/é'),
        ({"type": "object", "patternProperties": {r"^\p{Lu}$": {"type": "number"}}}, {"A": 1}),
        (
            {
                "type": "object",
                "patternProperties": {r"^\p{Lu}$": {"type": "number"}},
                "additionalProperties": {"type": "string"},
            },
            {"A": 1, "a": "x"},
        ),
    ],
)
def test_keyword_that_the_grammar_has_enforced_does_not_fail(content: Any, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("\x7f", "\\u007f")
    request = SandboxRequest(schema({**content, **NEVER}), text)
    reply = _reply(grammar.byte_tokenizer([]), request)
    assert (reply.code, reply.matches) == ("", True), reply.message
    assert reply.constraint != request.constraint, "the schema is relaxed"


@pytest.mark.parametrize(
    ("content", "valid", "invalid"),
    [
        ({"contains": {"multipleOf": 0.1}}, [0.7], [0.75]),
        ({"not": {"multipleOf": 0.1}}, 0.35, 0.3),
        ({"uniqueItems": True}, [1, "1"], [1, 1.0]),
        ({"not": {"type": "integer"}}, 1.5, 1.0),
        ({"contains": {"type": "string", "pattern": r"^\p{L}$"}}, ["é"], ["1"]),
        ({"$schema": DRAFT_4, "not": {"const": 0.5}}, 1, 0.5),
        ({"not": {"pattern": r"^\d$"}}, "\u0661", "1"),
        ({"not": {"pattern": "a(?=b)"}}, "ac", "ab"),
        ({"contains": {"type": "string", "format": "date"}}, ["2020-02-29"], ["today"]),
        ({"not": {"type": "string", "format": "no format"}}, 1, "x"),
        ({"propertyNames": {"pattern": r"^\p{Lu}"}}, {"Ab": 1}, {"ab": 1}),
        ({"not": {"patternProperties": {r"^\p{Lu}": False}}}, {"A": 1}, {"a": 1}),
        (
            {"not": {"additionalProperties": False, "patternProperties": {r"^\p{Lu}": True}}},
            {"a": 1},
            {"A": 1},
        ),
        (
            {
                "patternProperties": {r"^\p{L}+$": {"type": "integer"}},
                "unevaluatedProperties": False,
            },
            {"a": 1},
            {"1": 1},
        ),
        (
            {
                "$schema": DRAFT_2019,
                "anyOf": [{"patternProperties": {r"^\d$": True}}, False],
                "unevaluatedProperties": {"type": "null"},
            },
            {"1": 1, "\u0661": None},
            {"\u0661": 1},
        ),
        (
            {
                "$defs": {"upper": {"patternProperties": {r"^\p{Lu}": True}}},
                "if": {"required": ["a"]},
                "then": {"properties": {"a": True}, "$ref": "#/$defs/upper"},
                "else": {"additionalProperties": {"type": "null"}},
                "unevaluatedProperties": False,
            },
            {"a": 1, "A": 1},
            {"b": 1},
        ),
        (
            {
                "$defs": {"letter": {"$schema": DRAFT_7, "pattern": r"^\p{L}$"}},
                "items": {"$ref": "#/$defs/letter"},
            },
            ["é"],
            ["1"],
        ),
        (
            {"properties": {"$schema": {"not": {"const": {"$schema": "x"}}}}},
            {"$schema": {"$schema": "y"}},
            {"$schema": {"$schema": "x"}},
        ),
        (
            {
                "$schema": DRAFT_7,
                "definitions": {"list": {"type": "array"}},
                "$ref": "#/definitions/list",
                "uniqueItems": True,
            },
            [1, 2],
            [1, 1],
        ),
        (
            {
                "$schema": DRAFT_7,
                "properties": {"next": {"$ref": "#"}},
                "not": {"type": "object", "required": ["x"], "maxProperties": 1},
                "multipleOf": 0.1,
            },
            {"next": 0.3},
            {"next": {"x": 1}},
        ),
    ],
)
def test_relaxed_keyword_is_validated_exactly(content: Any, valid: Any, invalid: Any) -> None:
    check_schema(content)
    assert is_valid(content, json.dumps(valid))
    assert not is_valid(content, json.dumps(invalid))


@pytest.mark.parametrize("text", ["", "[1,", "NaN", '"\\ud800"', "1e999", "[" * 100_000])
def test_text_that_is_no_value_is_invalid(text: str) -> None:
    assert not is_valid(True, text)


def test_multiple_with_a_large_exponent_is_found_at_once() -> None:
    assert is_valid({"multipleOf": 7}, "7e300")
    assert not is_valid({"multipleOf": 7}, "1e300")
    assert not is_valid({"multipleOf": 7}, "7e-999999999")
    assert is_valid({"multipleOf": 7}, "0e-999999999")


@pytest.mark.parametrize("text", ["0e99999999999999999999", "1e-99999999999999999999"])
def test_number_whose_exponent_no_decimal_has_is_zero(text: str) -> None:
    assert is_valid({"const": 0, "multipleOf": 7}, text)
    assert not is_valid({"not": {"type": "number"}}, text)


def test_pattern_that_neither_grammars_nor_python_read_is_refused() -> None:
    with pytest.raises(EngineError, match="is not a 'regex'"):
        check_schema({"not": {"pattern": r"\p{L}(?=a"}})


def test_string_that_exceeds_the_limits_of_grammars_is_matched() -> None:
    content = {"type": "string", "not": {"pattern": "error.{0,40}code.{0,40}fatal"}}
    log = _log(30_000, "error code x")
    assert not is_valid(content, json.dumps(f"{log} error code fatal"))
    assert is_valid(content, json.dumps(log))


def test_strings_that_exceed_the_limits_of_grammars_together_are_matched() -> None:
    pattern = "error.{0,40}code.{0,40}fatal"
    logs = [_log(400, "error code x", seed) for seed in range(60)]
    assert is_valid({"items": {"not": {"pattern": pattern}}}, json.dumps(logs))
    ends = [f"{log} error code fatal" for log in logs]
    assert is_valid({"items": {"pattern": pattern}, **NEVER}, json.dumps(ends))


def test_pattern_too_complex_for_grammars_and_unknown_to_python_is_reported() -> None:
    content = {"not": {"pattern": r"error.{0,40}code.{0,40}fatal\z"}}
    with pytest.raises(EngineError, match="too complex") as caught:
        is_valid(content, json.dumps(_log(30_000, "error code x")))
    assert caught.value.code == "constraint.too_complex"


def test_text_that_exceeds_the_limits_of_its_grammar_is_no_mismatch() -> None:
    constraint = schema({"type": "string", "pattern": "error.{0,40}code.{0,40}fatal"})
    text = json.dumps(_log(30_000, "error code x") + " error code fatal")
    reply = _reply(grammar.byte_tokenizer([]), SandboxRequest(constraint, text))
    assert reply.code == "constraint.too_complex"


def _log(num_words: int, words: str, seed: int = 0) -> str:
    chosen = random.Random(seed).choices(words.split(), k=num_words)
    return " ".join(chosen)
