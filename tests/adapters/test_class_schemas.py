"""Schemas of classes: an answer has no fields that the class lacks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field

from conure.adapters.class_schemas import without_other_fields


class Point(BaseModel):
    x: int


class Named(BaseModel):
    kind: Literal["named"] = "named"
    properties: dict[str, Point] = {}


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    kind: Literal["open"] = "open"


class Shape(BaseModel):
    center: Point
    corners: list[Point] = []
    either: Named | Open | None = Field(default=None, discriminator="kind")
    weights: dict[str, float] = Field(default={}, examples=[{"properties": {"a": 1.0}}])
    inner: Shape | None = None


FULL: dict[str, Any] = {
    "center": {"x": 1},
    "corners": [{"x": 2}],
    "either": {"kind": "named", "properties": {"any": {"x": 3}}},
    "weights": {"any": 1.0},
    "inner": {"center": {"x": 4}},
}


def is_valid(value: Any) -> bool:
    schema = without_other_fields(Shape.model_json_schema())
    return Draft202012Validator(schema).is_valid(value)


def test_declared_fields_are_allowed() -> None:
    assert is_valid(FULL)
    assert is_valid({"center": {"x": 1}, "either": {"kind": "open", "other": 1}})


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("center",),
        ("corners", 0),
        ("either",),
        ("either", "properties", "any"),
        ("inner",),
        ("inner", "center"),
    ],
)
def test_other_fields_are_refused(path: tuple[str | int, ...]) -> None:
    value = json.loads(json.dumps(FULL))
    part = value
    for key in path:
        part = part[key]
    part["other"] = 1
    assert not is_valid(value)


def test_examples_and_defaults_stay_as_they_are() -> None:
    given = Shape.model_json_schema()["$defs"]["Shape"]
    changed = without_other_fields(given)
    assert changed["properties"]["weights"] == given["properties"]["weights"]
    assert "additionalProperties" not in given, "the argument is not changed"


def test_combined_objects_stay_as_they_are() -> None:
    part = {"type": "object", "properties": {"a": {}}}
    schema = {"allOf": [part, {"type": "object", "properties": {"b": {}}}]}
    assert without_other_fields(schema) == schema


def fields(*names: str, **schemas: Any) -> dict[str, Any]:
    """Return the schema of an object with required fields."""
    return {"type": "object", "properties": schemas, "required": list(names)}


LEAD = {"properties": {"a": {"const": 1}}, "required": ["a"]}
AB = fields(a={}, b={})
CHOICES = {
    "fields": AB,
    "any": {"anyOf": [fields("a", a={}), fields("b", b={}), {"type": "null"}]},
    "tagged": {
        "oneOf": [fields("a", a={"const": 1}, b={}), fields("a", a={"const": 2})],
        "discriminator": {"propertyName": "a"},
    },
}
"""Schemas of which a part refuses the field `c`."""
OPEN = {
    "single allOf": {"allOf": [AB]},
    "items": {"items": AB, "contains": LEAD},
    "condition with definition": {
        "properties": {"a": {}, "b": {"$ref": "#/$defs/AB"}},
        "not": {"$ref": "#/$defs/Lead"},
        "$defs": {"AB": AB, "Lead": LEAD},
    },
    "not": {**AB, "not": LEAD},
    "property of an object with conditions": {**fields(a=AB, b={}), "if": {"required": ["b"]}},
    "pattern": {"patternProperties": {"^a": AB}},
    "anyOf beside fields": {**fields("a", a={}), "anyOf": [fields("b", b={}), fields("c", c={})]},
    "oneOf beside fields": {**fields("a", a={}), "oneOf": [fields("b", b={}), fields("c", c={})]},
    "oneOf without tag": {"oneOf": [fields(a={}), AB]},
    "two choices": {"anyOf": [fields(a={}), {"type": "null"}], "allOf": [fields(b={})]},
    "allOf": {"allOf": [fields(a=fields(b={})), fields(a=fields(c={}))]},
    "if": {**fields("a", a={}), "if": LEAD, "then": fields("b", b={}), "else": {}},
    "dependentSchemas": {**fields(a={}), "dependentSchemas": {"a": fields("b", b={})}},
    "dependencies": {**fields(a={}), "dependencies": {"a": fields("b", b={})}},
    "$ref beside fields": {"$ref": "#/$defs/B", **fields(a={}), "$defs": {"B": fields("b", b={})}},
    "field described twice": {**fields(a=fields(b={}), b={}), "anyOf": [fields(a=fields(c={}))]},
    "field and pattern": {**fields(a=fields(b={})), "patternProperties": {"a": fields(c={})}},
    "unevaluatedProperties": {**fields(a={}), "unevaluatedProperties": {"type": "integer"}},
    "required without a schema": fields("a", "b", a={}),
    "fields of a reference, required beside it": {
        "$ref": "#/$defs/A",
        "required": ["b"],
        "$defs": {"A": fields(a={})},
    },
    "negated reference": {
        "not": {"properties": {"a": {"$ref": "#/$defs/AB"}}},
        "$defs": {"AB": AB},
    },
    "anchor": {"not": {"$ref": "#ab"}, "$defs": {"AB": {"$anchor": "ab", **AB}}},
    "reference in a condition, through a definition": {
        "items": {"$ref": "#/$defs/B"},
        "contains": {"$ref": "#/$defs/A"},
        "$defs": {"A": fields("a", a={"$ref": "#/$defs/B"}), "B": AB},
    },
}
"""Schemas that cannot refuse other fields."""


def objects(values: list[Any]) -> Iterator[dict[str, Any]]:
    """Iterate over the objects with some of the fields `a`, `b` and `c`."""
    absent = object()
    for parts in itertools.product([absent, *values], repeat=3):
        yield {key: part for key, part in zip("abc", parts, strict=True) if part is not absent}


def values() -> list[Any]:
    small = list(objects([1, 2]))
    nested = [*objects([1, {"a": 1}, {"b": 1}, {"b": 1, "c": 1}, {"c": 1}])]
    pairs = [list(each) for each in itertools.product(small, repeat=2)]
    return [None, *small, *nested, *pairs]


def has_c(value: Any) -> bool:
    return '"c"' in json.dumps(value)


@pytest.mark.parametrize("schema", CHOICES.values(), ids=CHOICES)
def test_only_values_with_other_fields_become_invalid(schema: dict[str, Any]) -> None:
    before, after = Draft202012Validator(schema), Draft202012Validator(without_other_fields(schema))
    lost = [each for each in values() if before.is_valid(each) != after.is_valid(each)]
    assert lost, "other fields are refused"
    allowed = [each for each in lost if after.is_valid(each)]
    assert not allowed, "no value becomes valid"
    if schema is AB:
        assert all(has_c(each) for each in lost), "declared fields stay valid"


@pytest.mark.parametrize("schema", OPEN.values(), ids=OPEN)
def test_objects_that_several_schemas_describe_stay_open(schema: dict[str, Any]) -> None:
    assert without_other_fields(schema) == schema


@pytest.mark.parametrize("odd", [{"required": True}, {"minProperties": "1"}, {"allOf": 1}])
def test_an_odd_schema_is_left_to_the_validator(odd: dict[str, Any]) -> None:
    schema = {"properties": {"a": {}}, **odd}
    assert without_other_fields(schema) == schema
