"""Decoding of request bodies to records, with precise errors.

Responsibility: the path, the key and the `op` in msgspec's error messages.
Out of scope: what the records mean; `graph` checks that.

Invariant: every body gives a record or a ProgramError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from ..errors import ProgramError
from ..ir import Append, Submission
from ..nodes import NODE_KINDS
from .bounded_json import MAX_BODY_BYTES, check_bounds, check_keys, malformed, measure_depth
from .typed_json import convert_record, decode_record

__all__ = [
    "MAX_BODY_BYTES",
    "decode_append",
    "decode_json",
    "decode_submission",
    "measure_depth",
    "revalidate",
]

T = TypeVar("T")

_PATH = re.compile(r" - at (`key` in )?`\$\.?(.*)`$", re.DOTALL)
_OP_PATH = re.compile(r"(^|\.)(nodes|body|then|else)\[\d+\]\.op$")
_ANY_KEY = "[...]"


def decode_submission(body: bytes) -> Submission:
    """Decode the body of `POST /v1/programs`.

    Raises:
        ProgramError: as in `decode_json`.
    """
    return decode_json(body, Submission)


def decode_append(body: bytes) -> Append:
    """Decode the body of `POST /v1/programs/{id}/nodes`.

    Raises:
        ProgramError: as in `decode_json`.
    """
    return decode_json(body, Append)


def revalidate(record: T) -> tuple[T, bytes]:
    """Return a record that was built by code, checked against its bounds, and its JSON.

    Structs do not check bounds on construction. A record that was built from a smaller request
    may exceed them.

    Raises:
        ProgramError: as in `decode_json`.
    """
    body = msgspec.json.encode(record)
    return _decode(body, type(record)), body  # the encoder writes no key twice


def decode_json(body: bytes, type: type[T] | Any) -> T:  # noqa: A002 - msgspec's word for it
    """Decode a record of `type`, or any JSON value where `type` is `Any`.

    Raises:
        ProgramError: `program.too_large` (413), `json.too_deep`, `json.malformed`,
            `json.number` (an integer beyond 64 bits), `json.duplicate_key`,
            `program.unsupported_op`, or `program.invalid` with the path of the first invalid field.
    """
    record: T = _decode(body, type)
    check_keys(body)
    return record


def _decode(body: bytes, type: type[T] | Any) -> T:  # noqa: A002
    """Decode a record within bounds, whatever keys its objects repeat."""
    check_bounds(body)
    try:
        record: T = decode_record(body, type)
    except msgspec.ValidationError as error:
        raise _invalid(error, body, type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(error, body) from None
    return record


def _invalid(error: msgspec.ValidationError, body: bytes, record_type: Any) -> ProgramError:
    text = str(error)
    position = _PATH.search(text)
    if position is None:
        return ProgramError("program.invalid", text)
    reason, path = text[: position.start()], position[2]
    if _OP_PATH.search(path) and reason.startswith("Invalid value"):
        return _unsupported_op(reason.removeprefix("Invalid value ").strip("'"), path)
    if position[1]:
        reason = f"{reason} as a key"
    elif _ANY_KEY in path:
        path = _name_key(path, body, record_type)
    return ProgramError("program.invalid", f"{reason} at `{path}`", path=path)


def _unsupported_op(op: str, path: str) -> ProgramError:
    known = ", ".join(NODE_KINDS)
    return ProgramError(
        "program.unsupported_op", f"op `{op}` is unknown; this server runs: {known}", path=path
    )


def _name_key(path: str, body: bytes, record_type: Any) -> str:
    """Replace `[...]` in a path of msgspec by the key of the invalid item.

    msgspec reports the first invalid item of an object. The halves of the object are converted
    until one item is left, so that the cost is linear in the object.
    """
    try:
        holder, item_type = msgspec.json.decode(body), record_type
        for part in re.split(r"[.\[\]]+", path[: path.index(_ANY_KEY)]):
            if part:
                item_type = _type_of_part(item_type, holder, part)
                holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        object_type = _find_type(item_type, dict)
        items = list(holder.items())
        while len(items) > 1:
            half = items[: len(items) // 2]
            is_in_rest = _is_valid(dict(half), object_type)
            items = items[len(half) :] if is_in_rest else half
        return path.replace(_ANY_KEY, f".{items[0][0]}", 1)
    except (msgspec.MsgspecError, LookupError, ValueError, AttributeError, TypeError):
        return path  # the path without a key is right, too


def _is_valid(value: Any, value_type: Any) -> bool:
    try:
        convert_record(value, value_type)
    except msgspec.ValidationError:
        return False
    return True


def _type_of_part(record_type: Any, value: Any, part: str) -> Any:
    """Return the type of a field, or of the items of a list or an object."""
    if isinstance(value, list):
        return _find_type(record_type, list).__args__[0]
    structs = [each for each in _alternatives(record_type) if hasattr(each, "__struct_config__")]
    if not structs:
        return _find_type(record_type, dict).__args__[1]
    for each in structs:
        config = each.__struct_config__
        if len(structs) == 1 or value.get(config.tag_field) == config.tag:
            return next(f.type for f in msgspec.structs.fields(each) if f.encode_name == part)
    raise LookupError(part)


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
