"""Schemas of variables: what they accept, what they refuse, and their bounds."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from conure.server.program.errors import ProgramError
from conure.server.program.expressions.regex import CACHE
from conure.server.program.expressions.value_schema import check_schema, find_violation

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "a", "ab", "b1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=6,
)
LEAVES: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": ["integer", "null"]},
    {"enum": [1, "a", None]},
    {"const": {"a": 1}},
    {"minimum": 0, "exclusiveMaximum": 4},
    {"minLength": 1, "maxLength": 1.0},
    {"minItems": 1, "maxItems": 2},
    {"pattern": "^a"},
    {"required": ["a"], "maxProperties": 1},
]
SCHEMAS = st.recursive(
    st.sampled_from(LEAVES) | st.booleans(),
    lambda inner: (
        st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), inner)})
        | st.fixed_dictionaries({"items": inner})
        | st.fixed_dictionaries({"prefixItems": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"additionalProperties": inner})
        | st.fixed_dictionaries({"not": inner})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(value=JSON, schema=SCHEMAS)
def test_a_value_is_accepted_if_jsonschema_accepts_it(value: Any, schema: Any) -> None:
    check_schema(schema, "schema")
    accepts = Draft202012Validator(schema).is_valid(value)
    assert (find_violation(value, schema) is None) == accepts


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, "s.$ref"),
        ({"format": "uri"}, "s.format"),
        ({"type": "text"}, "s.type"),
        ({"properties": {"a": {"minimum": "1"}}}, "s.properties.a.minimum"),
        ({"anyOf": []}, "s.anyOf"),
        ({"pattern": "(a+)+\\1"}, "s.pattern"),
        ({"items": 3}, "s.items"),
        ({"maxLength": -1}, "s.maxLength"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(ProgramError) as caught:
        check_schema(schema, "s")
    assert (caught.value.code, caught.value.path) == ("program.schema", path)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "str"}, "or a list of them, got 'str'"),
        ({"minLength": -1}, "`minLength` must be an integer from 0, got -1"),
        ({"maxItems": 1.5}, "`maxItems` must be an integer from 0, got 1.5"),
        ({"enum": []}, "`enum` must be a list that is not empty, got []"),
    ],
)
def test_a_message_shows_the_argument_that_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        check_schema(schema, "s")
    assert caught.value.message.endswith(message)


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"items": schema}
    with pytest.raises(ProgramError):
        check_schema(schema, "s")


def test_a_violation_names_its_place() -> None:
    schema = {"properties": {"a": {"items": {"properties": {"b": {"type": "string"}}}}}}
    assert find_violation({"a": ["x", {"b": 3}]}, schema) == "a[1].b is int, not string"


@pytest.mark.parametrize(
    ("value", "schema", "violation"),
    [
        ("hihg", {"enum": ["low", "high"]}, 'the value is "hihg", not one of "low", "high"'),
        (None, {"enum": [1, [2, 3]]}, "the value is null, not one of 1, (list of 2)"),
        ("x" * 99, {"const": {}}, f'the value is "{"x" * 80}"..., not the constant (object of 0)'),
        (
            True,
            {"enum": list(range(2_012))},
            "the value is true, not one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2,002 others",
        ),
    ],
)
def test_a_violation_shows_the_value_and_what_is_allowed(
    value: Any, schema: Any, violation: str
) -> None:
    assert find_violation(value, schema) == violation


@pytest.mark.parametrize(
    "keywords", [("minimum", "exclusiveMinimum"), ("exclusiveMinimum", "minimum")]
)
def test_the_first_violation_follows_the_order_of_the_schema(keywords: tuple[str, str]) -> None:
    schema: dict[str, Any] = dict.fromkeys(keywords, 1)
    assert find_violation(0, schema) == f"the value is 0, against `{keywords[0]}` 1"


def test_a_missing_library_is_no_fault_of_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    CACHE.clear()
    with pytest.raises(ModuleNotFoundError, match="google-re2"):
        find_violation("a", {"pattern": "a"})


def test_a_value_that_takes_too_long_is_a_violation() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5):
        schema = {"anyOf": [{"not": schema}, {"not": schema}, schema]}
    check_schema(schema, "s")
    violation = find_violation([1] * 200_000, {"items": schema})
    assert violation is not None
    assert "too large" in violation
