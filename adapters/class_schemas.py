"""JSON schemas of classes, for answers that an engine constrains.

A JSON schema allows all fields that it does not mention. A class ignores or refuses them, so a
model would write fields that are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from conure.server.program.ir import Json

_VALUES: Final = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose content is a value and not a schema."""
_NAMED: Final = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Keywords whose content is schemas by name."""


def without_other_fields(schema: Mapping[str, Any]) -> dict[str, Json]:
    """Return a schema whose objects have only the fields that the schema mentions.

    An object that states its `additionalProperties` keeps them. A schema that combines objects with
    `allOf` is returned as it is, because each of them would refuse the fields of the others.
    """
    if any("allOf" in each for each in _schemas(schema)):
        return dict(schema)
    closed: dict[str, Json] = _closed(schema)
    return closed


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the schemas in it."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas(item)
    elif isinstance(schema, Mapping):
        yield schema
        for key, part in schema.items():
            if key in _NAMED and isinstance(part, Mapping):
                for each in part.values():
                    yield from _schemas(each)
            elif key not in _VALUES:
                yield from _schemas(part)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, part in schema.items():
        if key in _NAMED and isinstance(part, Mapping):
            closed[key] = {name: _closed(each) for name, each in part.items()}
        else:
            closed[key] = part if key in _VALUES else _closed(part)
    if "properties" in schema and "patternProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed
