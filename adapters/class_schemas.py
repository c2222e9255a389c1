"""JSON schemas of classes, for answers that an engine constrains.

A JSON schema allows all fields that it does not mention. A class ignores or refuses them, so a
model would write fields that are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

from conure.server.program.ir import Json

_NAMED: Final = ("$defs", "definitions", "properties")
"""Keywords whose content is schemas by name."""
_PARTS: Final = ("additionalProperties", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords whose content is a schema or a list of schemas."""
_CHOICES: Final = frozenset({"$ref", "anyOf", "oneOf"})
_OF_OBJECTS: Final = frozenset({"minProperties", "properties", "required"})
_COMBINING: Final = frozenset(
    {
        *("$anchor", "$dynamicRef", "$recursiveRef", "allOf", "contains", "dependencies"),
        *("dependentSchemas", "else", "if", "not", "patternProperties", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
"""Keywords by which a second schema may describe a value, and refuse the fields of the first."""


def without_other_fields(schema: Mapping[str, Any]) -> dict[str, Json]:
    """Return a schema whose objects have only the fields that the schema mentions.

    An object that states its `additionalProperties` keeps them. A schema with conditions, or in
    which two schemas describe one value, is returned as it is, because a schema that refuses
    fields could there change which other values are allowed. Few classes have such a schema.
    """
    closed: dict[str, Any] = deepcopy(dict(schema))
    schemas = list(_schemas(closed))
    if not all(map(_is_plain, schemas)):
        return closed
    for each in schemas:
        if "properties" in each:
            each.setdefault("additionalProperties", False)
    return closed


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a schema and the schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in _NAMED:
        parts = schema.get(keyword)
        for part in parts.values() if isinstance(parts, dict) else ():
            yield from _schemas(part)
    for keyword in _PARTS:
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else [parts]:
            yield from _schemas(part)


def _is_plain(schema: dict[str, Any]) -> bool:
    """Return whether a value is described by this schema, or by the schemas it names, alone."""
    if schema.keys() & _COMBINING:
        return False
    choices = schema.keys() & _CHOICES
    if choices:
        # A value that two schemas of `oneOf` allow is invalid, unless they cannot both allow it.
        is_distinct = choices != {"oneOf"} or "discriminator" in schema
        return len(choices) == 1 and is_distinct and not schema.keys() & _OF_OBJECTS
    if "properties" not in schema:
        return True
    fields, required = schema["properties"], schema.get("required", [])
    if not isinstance(fields, dict) or not isinstance(required, list):
        return False
    return "minProperties" not in schema and all(name in list(fields) for name in required)
