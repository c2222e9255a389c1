"""JSON Schemas whose values of type `integer` fit 64 bits, as the values of variables must.

A schema allows integers of any length. Without bounds a model can write one that no variable can
hold, and the call would fail although its text matches the schema.

Out of scope: values of type `number`, or of any type, as a bound would forbid exponents; schemas
with more than `MAX_BOUNDS` integers.
"""

from __future__ import annotations

from typing import Any, Final

from .content import Json

MAX_INTEGER: Final = 2**63 - 1_024
"""The largest 64-bit integer that a float64, in which llguidance keeps bounds, holds exactly."""

MAX_BOUNDS: Final = 32
"""Most integers in a schema that gets bounds. Each takes about a millisecond to compile, and some
hundreds are too large for llguidance."""

_SCHEMAS: Final = ("items", "additionalProperties", "additionalItems", "contains", "then", "else")
_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_OBJECTS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def bound_integers(schema: dict[str, Json]) -> dict[str, Json]:
    """Return a schema whose integers are within `MAX_INTEGER`.

    Schemas inside `not` and `if` are unchanged: a bound there would make the whole schema accept
    more values.
    """
    num_integers = [0]  # a list, so that the recursion can count in it
    bounded = _bounded(schema, num_integers)
    return bounded if num_integers[0] <= MAX_BOUNDS else schema


def _bounded(schema: Json, num_integers: list[int]) -> Any:
    """Return a schema with bounds, and count its integers."""
    if not isinstance(schema, dict):
        return schema
    bounded = dict(schema)
    for keyword in _SCHEMAS:
        if isinstance(inner := schema.get(keyword), dict):
            bounded[keyword] = _bounded(inner, num_integers)
    for keyword in _LISTS:
        if isinstance(inner := schema.get(keyword), list):
            bounded[keyword] = [_bounded(each, num_integers) for each in inner]
    for keyword in _OBJECTS:
        if isinstance(inner := schema.get(keyword), dict):
            bounded[keyword] = {n: _bounded(each, num_integers) for n, each in inner.items()}
    if _allows_integers(schema):
        num_integers[0] += 1
        bounded |= _missing_bounds(schema)
    return bounded


def _allows_integers(schema: dict[str, Json]) -> bool:
    """Whether a schema has type `integer`, not `number`, and neither `enum` nor `const`."""
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    return "integer" in names and "number" not in names and not schema.keys() & {"enum", "const"}


def _missing_bounds(schema: dict[str, Json]) -> dict[str, Json]:
    """Return the bounds that a schema lacks; none if its own bounds are not usable numbers."""
    lower = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    upper = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    for bound in (*lower, *upper):
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            return {}
    if any(bound > MAX_INTEGER for bound in lower) or any(-bound > MAX_INTEGER for bound in upper):
        return {}
    bounds: dict[str, Json] = {}
    if all(bound <= -MAX_INTEGER for bound in lower):
        bounds["minimum"] = -MAX_INTEGER
    if all(bound >= MAX_INTEGER for bound in upper):
        bounds["maximum"] = MAX_INTEGER
    return bounds
