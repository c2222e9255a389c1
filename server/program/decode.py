"""From the bytes of a request body to records: bounded before parsed, precise when refused.

Knows the limits of a body (size, nesting, integers that fit 64 bits) and how msgspec words
its refusals. Refuses to know what the records mean; `graph` judges that.

Kept true: whatever the bytes are, the answer is a record or a ProgramError. The scan for
nesting runs before the parser and is linear, so a body of open brackets costs milliseconds
and never a RecursionError.
"""

from __future__ import annotations

import re
from array import array
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from .errors import ProgramError
from .ir import Append, Submission

T = TypeVar("T")

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 64
"""Arrays and objects inside each other, in a body or in a value."""

KNOWN_OPS = (
    "generate",
    "call",
    "client",
    "expr",
    "map",
    "if",
    "loop",
    "wait",
    "kill",
    "yield",
    "try",
)
LATER_OPS = frozenset({"procedure"})

_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LONG_DIGITS = re.compile(rb"[0-9]{19}")
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_AT = re.compile(r" - at (`key` in )?`\$\.?(.*)`$", re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)$")
_OP = re.compile(r"(^|\.)(nodes|body|then|else)\[\d+\]\.op$")
_ANY_KEY = "[...]"


def decode_submission(body: bytes) -> Submission:
    """The body of `POST /v1/programs`.

    Raises:
        ProgramError: as in `decode_json`.
    """
    return decode_json(body, Submission)


def decode_append(body: bytes) -> Append:
    """The body of `POST /v1/programs/{id}/nodes`.

    Raises:
        ProgramError: as in `decode_json`.
    """
    return decode_json(body, Append)


def seal(record: T) -> tuple[T, bytes]:
    """A record that was built here and not decoded, in bounds, and its JSON.

    Structs check no bounds when they are made, so one that came about by rewriting a smaller
    request is read back before anybody relies on it.

    Raises:
        ProgramError: as in `decode_json`.
    """
    body = msgspec.json.encode(record)
    return decode_json(body, type(record)), body


def decode_json(body: bytes, type: type[T] | Any) -> T:  # noqa: A002 - msgspec's word for it
    """A record of `type`, or any JSON value where `type` is `Any`.

    Raises:
        ProgramError: `program.too_large` (413), `json.too_deep`, `json.malformed`,
            `json.number` (an integer beyond 64 bits), `program.unsupported_op`, or
            `program.invalid` with the path of the first thing that is not as it should be.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ProgramError(
            "program.too_large",
            f"the body has {len(body):,} bytes; at most {MAX_BODY_BYTES:,} are taken",
            status=413,
        )
    depth = measure_depth(body)
    if depth > MAX_DEPTH:
        raise ProgramError(
            "json.too_deep", f"arrays and objects are nested {depth} deep; at most {MAX_DEPTH} are"
        )
    _check_integers(body)
    try:
        record: T = msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise _invalid(error, body, type) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error), body) from None
    except UnicodeDecodeError as error:
        raise _malformed(f"a string is not UTF-8: {error.reason}", body) from None
    return record


def measure_depth(body: bytes) -> int:
    """How deep arrays and objects stand inside each other; brackets in strings do not count.

    Linear in the body and exact where it is well formed. Each step below keeps every quote's
    parity: escaped quotes go first, then whatever is neither quote nor bracket, then pairs
    of quotes with nothing between them.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(_STEPS, _NO_BRACKETS).replace(b'""', b"")
    outside = b"".join(marks.split(b'"')[::2])
    return max(accumulate(array("b", outside)), default=0)


def _check_integers(body: bytes) -> None:
    """Refuse integers that JSON allows and no 64-bit reader (ours included) can write back."""
    if _LONG_DIGITS.search(body) is None:
        return
    for match in _NUMBER.finditer(_STRING.sub(b"", body)):
        token = match[0]
        if len(token) < 19 or not token.lstrip(b"-").isdigit():
            continue
        if len(token) > 21 or not -(2**63) <= int(token) < 2**64:
            head = token[:24].decode()
            raise ProgramError("json.number", f"the integer {head}... does not fit 64 bits")


def _malformed(reason: str, body: bytes) -> ProgramError:
    reason = reason.removeprefix("JSON is malformed: ")
    found = _BYTE.search(reason)
    if found is None:
        return ProgramError("json.malformed", f"not JSON: {reason}")
    before = body[: int(found[1])]
    line = before.count(b"\n") + 1
    column = len(before) - (before.rfind(b"\n") + 1) + 1
    return ProgramError("json.malformed", f"not JSON: {reason}, line {line}, column {column}")


def _invalid(error: msgspec.ValidationError, body: bytes, record_type: Any) -> ProgramError:
    text = str(error)
    found = _AT.search(text)
    if found is None:
        return ProgramError("program.invalid", text)
    reason, path = text[: found.start()], found[2]
    if _OP.search(path) and reason.startswith("Invalid value"):
        return _unsupported_op(reason.removeprefix("Invalid value ").strip("'"), path)
    if found[1]:
        reason = f"{reason} as a key"
    elif _ANY_KEY in path:
        path = _name_key(path, text, body, record_type)
    return ProgramError("program.invalid", f"{reason} at `{path}`", path=path)


def _unsupported_op(op: str, path: str) -> ProgramError:
    known = ", ".join(KNOWN_OPS)
    if op in LATER_OPS:
        message = f"op `{op}` belongs to the language, but this server runs only: {known}"
    else:
        message = f"there is no op `{op}`; this server runs: {known}"
    return ProgramError("program.unsupported_op", message, path=path)


def _name_key(path: str, text: str, body: bytes, record_type: Any) -> str:
    """Put the key's name where msgspec says `[...]`, by halving the object it stands in.

    msgspec reports the first offender, so the shortest prefix of the object's items that is
    refused with the same words ends with it.
    """
    try:
        document = msgspec.json.decode(body)
        holder: Any = document
        prefix = path[: path.index(_ANY_KEY)]
        *parents, last = [part for part in re.split(r"[.\[\]]+", prefix) if part]
        for part in parents:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        items = list(holder[last].items())
    except (msgspec.MsgspecError, LookupError, ValueError, AttributeError, TypeError):
        return path
    low, high = 1, len(items)
    while low < high:
        middle = (low + high) // 2
        holder[last] = dict(items[:middle])
        try:
            msgspec.convert(document, type=record_type)
            refused = False
        except msgspec.ValidationError as again:
            refused = str(again) == text
        low, high = (low, middle) if refused else (middle + 1, high)
    return path.replace(_ANY_KEY, f".{items[low - 1][0]}", 1) if items else path
