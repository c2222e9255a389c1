"""Schemas of classes: an answer has no fields that the class lacks."""

from __future__ import annotations

import json
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
