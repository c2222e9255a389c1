"""JSON Schemas whose values of type `integer` fit 64 bits, as the values of variables must.

A schema allows integers of any length. Without bounds a model can write one that no variable can
hold, and the call would fail although its text matches the schema.

Out of scope: values of type `number`, or of any type. A bound would forbid exponents.
"""

from __future__ import annotations

from typing import Final

from .content import Json

MAX_INTEGER: Final = 2**63 - 1_024
"""The largest 64-bit integer that a float64, in which llguidance keeps bounds, holds exactly."""

_SCHEMAS: Final = ("items", "additionalProperties", "additionalItems", "contains", "then", "else")
_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_OBJECTS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def bound_integers(schema: dict[str, Json]) -> dict[str, Json]:
    """Return a schema whose integers are within `MAX_INTEGER`.

    Schemas inside `not` and `if` are unchanged: a bound there would accept more values.
    """
    bounded = dict(schema)
    for keyword in _SCHEMAS:
        if isinstance(inner := schema.get(keyword), dict):
            bounded[keyword] = bound_integers(inner)
    for keyword in _LISTS:
        if isinstance(inner := schema.get(keyword), list):
            bounded[keyword] = [_bounded(each) for each in inner]
    for keyword in _OBJECTS:
        if isinstance(inner := schema.get(keyword), dict):
            bounded[keyword] = {name: _bounded(each) for name, each in inner.items()}
    if _allows_integers(schema):
        if not _is_within(schema, "minimum", "exclusiveMinimum"):
            bounded["minimum"] = -MAX_INTEGER
        if not _is_within(schema, "maximum", "exclusiveMaximum"):
            bounded["maximum"] = MAX_INTEGER
    return bounded


def _bounded(schema: Json) -> Json:
    return bound_integers(schema) if isinstance(schema, dict) else schema


def _allows_integers(schema: dict[str, Json]) -> bool:
    """Whether a schema has type `integer` and not `number`."""
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    return "integer" in names and "number" not in names and not schema.keys() & {"enum", "const"}


def _is_within(schema: dict[str, Json], *keywords: str) -> bool:
    """Whether one of the keywords is a bound within `MAX_INTEGER`."""
    bounds = [schema.get(keyword) for keyword in keywords]
    return any(
        isinstance(bound, int | float) and abs(bound) <= MAX_INTEGER
        for bound in bounds
        if not isinstance(bound, bool)
    )
