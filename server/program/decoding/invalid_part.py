"""The part of a body that does not fit its type: its path, and what its type allows there.

msgspec names the path of the first invalid part, with `[...]` instead of the key of an object, but
not what would be allowed. Both are found by a walk over the body and its type, after the failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from .typed_json import convert_record

_ANY_KEY = "[...]"
_ERRORS = (msgspec.MsgspecError, LookupError, ValueError, AttributeError, TypeError)


def name_key(path: str, body: bytes, record_type: Any) -> str:
    """Replace `[...]` in a path of msgspec by the key of the invalid item.

    msgspec reports the first invalid item of an object. The halves of the object are converted
    until one item is left, so that the cost is linear in the object.
    """
    if _ANY_KEY not in path:
        return path
    try:
        holder, item_type = _walk(path[: path.index(_ANY_KEY)], body, record_type)
        object_type = _find_type(item_type, dict)
        items = list(holder.items())
        while len(items) > 1:
            half = items[: len(items) // 2]
            is_in_rest = _is_valid(dict(half), object_type)
            items = items[len(half) :] if is_in_rest else half
        return path.replace(_ANY_KEY, f".{items[0][0]}", 1)
    except _ERRORS:
        return path  # the path without a key is right, too


def record_at(path: str, body: bytes, record_type: Any) -> Any:
    """Return the type of the record at a path; None if it cannot be told."""
    try:
        value, found = _walk(path, body, record_type)
        return _struct_of(found, value)
    except _ERRORS:
        return None


def holders_of(name: str, record: Any) -> tuple[str, ...]:
    """Return the fields of a record type whose own records have a field of this name."""
    return tuple(
        field.encode_name
        for field in msgspec.structs.fields(record)
        if any(name in each.__struct_encode_fields__ for each in _records(field.type))
    )


def allowed_values(path: str, body: bytes, record_type: Any) -> tuple[str, ...]:
    """Return the texts that are allowed at a path; nothing if it is not one of a few."""
    try:
        _, found = _walk(path, body, record_type)
    except _ERRORS:
        return ()
    values = [
        value
        for each in _alternatives(found)
        if get_origin(each) is Literal
        for value in get_args(each)
    ]
    return tuple(value for value in values if isinstance(value, str))


def _walk(path: str, body: bytes, record_type: Any) -> tuple[Any, Any]:
    """Return the value at a path of a body, and its type.

    Raises:
        one of `_ERRORS`: if a key contains a dot or a bracket, or types do not tell the way.
    """
    value, found = msgspec.json.decode(body), record_type
    for part in re.split(r"[.\[\]]+", path):
        if part:
            found = _type_of_part(found, value, part)
            value = value[int(part)] if isinstance(value, list) else value[part]
    return value, found


def _type_of_part(record_type: Any, value: Any, part: str) -> Any:
    """Return the type of a field, or of the items of a list or an object."""
    if isinstance(value, list):
        return _find_type(record_type, list).__args__[0]
    if not any(hasattr(each, "__struct_config__") for each in _alternatives(record_type)):
        return _find_type(record_type, dict).__args__[1]
    fields = msgspec.structs.fields(_struct_of(record_type, value))
    return next(field.type for field in fields if field.encode_name == part)


def _struct_of(record_type: Any, value: Any) -> Any:
    """Return the record type of an object, by its tag if there are several."""
    structs = [each for each in _alternatives(record_type) if hasattr(each, "__struct_config__")]
    if len(structs) == 1:
        return structs[0]
    for each in structs:
        config = each.__struct_config__
        if value.get(config.tag_field) == config.tag:
            return each
    raise LookupError("no record type has the tag of the object")


def _records(field_type: Any) -> Iterator[Any]:
    """Yield the record types of a field, also those of the items of a list."""
    for each in _alternatives(field_type):
        if hasattr(each, "__struct_config__"):
            yield each
        elif get_origin(each) is list:
            yield from _records(get_args(each)[0])


def _find_type(record_type: Any, origin: type) -> Any:
    return next(each for each in _alternatives(record_type) if get_origin(each) is origin)


def _alternatives(record_type: Any) -> Iterator[Any]:
    """Yield the members of a union at any depth; an annotated type counts as its base."""
    if get_origin(record_type) is Annotated:
        yield from _alternatives(record_type.__origin__)
    elif get_origin(record_type) in (Union, UnionType):
        for each in get_args(record_type):
            yield from _alternatives(each)
    else:
        yield record_type


def _is_valid(value: Any, value_type: Any) -> bool:
    try:
        convert_record(value, value_type)
    except msgspec.ValidationError:
        return False
    return True
