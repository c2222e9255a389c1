"""Decoding of request bodies to records, with precise errors.

Responsibility: the path, the key and the `op` in msgspec's error messages.
Out of scope: what the records mean; `graph` checks that.

Invariant: every body gives a record or a ProgramError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ..checks import listed
from ..errors import ProgramError
from ..ir import Append, Submission
from ..nodes import NODE_KINDS
from ..suggestion import suggestion
from .bounded_json import MAX_BODY_BYTES, check_bounds, check_keys, malformed, measure_depth
from .invalid_part import allowed_values, holders_of, name_key, record_at
from .typed_json import decode_record

__all__ = [
    "MAX_BODY_BYTES",
    "UnknownFieldError",
    "decode_append",
    "decode_json",
    "decode_submission",
    "measure_depth",
    "revalidate",
]

T = TypeVar("T")

_PATH = re.compile(r" - at (`key` in )?`\$\.?(.*)`$", re.DOTALL)
_OP_PATH = re.compile(r"(^|\.)(nodes|body|then|else)\[\d+\]\.op$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


class UnknownFieldError(ProgramError):
    """A record of a body has a field that its type does not have."""

    def __init__(self, field: str, path: str, hint: str, fields: Sequence[str]) -> None:
        """Args: `hint` says what was meant, if that is known; `fields` are those of the record."""
        place = f" at `{path}`" if path else ""
        known = f"the fields are {listed(fields)}" if fields else ""
        message = f"Object contains unknown field `{field}`{place}"
        if advice := hint or known:
            message = f"{message}: {advice}"
        super().__init__("program.invalid", message, path=path or None)
        self.field = field
        self.hint = hint


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
    reason, path = (text, "") if position is None else (text[: position.start()], position[2])
    if _OP_PATH.search(path) and reason.startswith("Invalid value"):
        return _unsupported_op(reason.removeprefix("Invalid value ").strip("'"), path)
    if position is not None and position[1]:
        return ProgramError("program.invalid", f"{reason} as a key at `{path}`", path=path)
    path = name_key(path, body, record_type)
    if unknown := _UNKNOWN_FIELD.fullmatch(reason):
        return _unknown_field(unknown[1], path, body, record_type)
    message = f"{reason} at `{path}`" if path else reason
    if reason.startswith("Invalid enum value"):
        values = allowed_values(path, body, record_type)
        message += f": the values are {listed(values)}" if values else ""
    return ProgramError("program.invalid", message, path=path or None)


def _unknown_field(field: str, path: str, body: bytes, record_type: Any) -> UnknownFieldError:
    record = record_at(path, body, record_type)
    fields: tuple[str, ...] = () if record is None else record.__struct_encode_fields__
    holders = () if record is None else holders_of(field, record)
    hint = f"it is a field of {listed(holders)}" if holders else suggestion(field, fields)
    return UnknownFieldError(field, path, hint, fields)


def _unsupported_op(op: str, path: str) -> ProgramError:
    hint = suggestion(op, NODE_KINDS, f"this server runs: {', '.join(NODE_KINDS)}")
    return ProgramError("program.unsupported_op", f"op `{op}` is unknown; {hint}", path=path)
