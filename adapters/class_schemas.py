"""JSON schemas of classes, for answers that an engine constrains.

A JSON schema allows all fields that it does not mention. A class ignores or refuses them, so a
model would write fields that are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final
from urllib.parse import unquote

from conure.server.program.ir import Json

_CHOICES: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""Keywords whose schemas describe the whole value."""
_IN_PLACE: Final = _CHOICES | {
    *("$dynamicRef", "$recursiveRef", "dependencies", "dependentSchemas", "else", "if", "then")
}
"""Keywords whose schemas apply to the same value as the schema beside them."""
_OTHER_FIELDS: Final = frozenset({"additionalProperties", "unevaluatedProperties"})
_NAMED: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose content is schemas by name."""
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_PARTS: Final = frozenset({"additionalItems", "additionalProperties", "items", "prefixItems"})
"""Keywords whose schemas describe parts of the value, each part by one of the schemas."""
_CONDITIONS: Final = frozenset(
    {"contains", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords whose schemas are compared with values that other schemas describe."""
_SCHEMAS: Final = _IN_PLACE | _NAMED | _PARTS | _CONDITIONS
_OF_OBJECTS: Final = frozenset({"minProperties", "required"})


def without_other_fields(schema: Mapping[str, Any]) -> dict[str, Json]:
    """Return a schema whose objects have only the fields that the schema mentions.

    An object that states its `additionalProperties` keeps them. An object that several schemas
    describe together keeps other fields, because each schema would refuse the fields of the others.
    So do conditions, such as `not` and `contains`, and the definitions that conditions refer to.
    """
    root: dict[str, Any] = deepcopy(dict(schema))
    objects = _Objects(root)
    objects.add(root, is_open=False)
    for each in objects.closable():
        each["additionalProperties"] = False
    return root


class _Objects:
    """The schemas in a schema, sorted by whether they can refuse other fields.

    A schema that is used in two places stays open if one of the places requires it.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._schemas: dict[int, dict[str, Any]] = {}
        self._open: set[int] = set()

    def closable(self) -> list[dict[str, Any]]:
        """Return the schemas of objects to which `additionalProperties` can be added."""
        schemas = (each for key, each in self._schemas.items() if key not in self._open)
        return [each for each in schemas if _can_close(each)]

    def add(self, schema: Any, *, is_open: bool) -> None:
        """Add a schema and the schemas in it."""
        key = id(schema)
        known = self._open if is_open else self._schemas
        if not isinstance(schema, dict) or key in known:
            return
        self._schemas[key] = schema
        if is_open:
            self._open.add(key)
        for keyword in schema.keys() & _SCHEMAS:
            for name, part in _parts(keyword, schema[keyword]):
                is_part_open = is_open or not _can_enter(schema, keyword, name)
                if keyword != "$ref":
                    self.add(part, is_open=is_part_open)
                elif is_part_open:
                    self.add(self._target(part), is_open=True)

    def _target(self, reference: Any) -> Any:
        """Return the schema that a reference names; the root, with all schemas, if unknown."""
        target: Any = self._root
        path = unquote(str(reference)).removeprefix("#").split("/")
        try:
            for step in path[1:] if path[0] == "" else ():
                name = step.replace("~1", "/").replace("~0", "~")
                target = target[int(name) if isinstance(target, list) else name]
        except (LookupError, TypeError, ValueError):
            return self._root
        return target


def _parts(keyword: str, content: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the schemas of a keyword, with their names if they have names."""
    if keyword in _NAMED and isinstance(content, dict):
        yield from content.items()
    else:
        for part in content if isinstance(content, list) else [content]:
            yield "", part


def _is_single(keyword: str, schema: dict[str, Any]) -> bool:
    return len(list(_parts(keyword, schema[keyword]))) == 1


def _can_enter(schema: dict[str, Any], keyword: str, name: str) -> bool:
    """Return whether a part of a value, or the value, is described by this schema only."""
    if keyword in _DEFINITIONS:
        return True
    if keyword in _CHOICES:
        return _is_choice(schema)
    if keyword == "patternProperties":
        return _is_single(keyword, schema) and not schema.keys() & (_IN_PLACE | {"properties"})
    overlays = {key: schema[key] for key in schema.keys() & (_IN_PLACE | {"patternProperties"})}
    if keyword == "properties":
        anything = _OTHER_FIELDS | {"$dynamicRef", "$recursiveRef", "$ref", "patternProperties"}
        return not (anything | {name}) & set(_keys(overlays))
    return keyword in _PARTS and not overlays.keys() & _IN_PLACE


def _is_choice(schema: dict[str, Any]) -> bool:
    """Return whether a schema only names other schemas, of which one describes the value.

    The schemas of `oneOf` must differ by a discriminator: a value that two of them allow is
    invalid, and would become valid if one of them refused its other fields.
    """
    described = schema.keys() & (_SCHEMAS | _OF_OBJECTS) - _DEFINITIONS - {"not"}
    if described == {"oneOf"}:
        return "discriminator" in schema
    if described == {"allOf"}:
        return _is_single("allOf", schema)
    return described in ({"$ref"}, {"anyOf"})


def _can_close(schema: dict[str, Any]) -> bool:
    """Return whether the `properties` of a schema are all fields that its objects can have."""
    fields = schema.get("properties")
    if not isinstance(fields, dict):
        return False
    if schema.keys() & (_IN_PLACE | _OTHER_FIELDS | {"patternProperties"}):
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(least, int | float):
        return False
    return least <= len(fields) and all(name in list(fields) for name in required)


def _keys(content: Any) -> Iterator[str]:
    """Iterate over the keys of all objects in a JSON value."""
    if isinstance(content, dict):
        yield from content
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _keys(part)
