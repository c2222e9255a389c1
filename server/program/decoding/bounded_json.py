"""Bounds on JSON text: size, items, nesting, integers that fit 64 bits.

Invariant: the check of nesting runs before the parser and is linear, so a body of open brackets
costs milliseconds and never raises RecursionError.
"""

from __future__ import annotations

import json
import re
from array import array
from itertools import accumulate
from typing import Any, Final

import msgspec

from ..errors import ProgramError

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
"""Enough for a million tokens of prompt in any script, with JSON's escapes."""
MAX_ELEMENTS: Final = 1_000_000
"""Elements of all arrays and objects of a body. A parsed element takes up to 30 times the memory
of its JSON, text does not."""
MAX_DEPTH: Final = 64
"""Nesting of arrays and objects in a body or a value."""
MAX_ITEMS: Final = 200_000
"""Arrays, objects and keys in a body: its parser blocks all threads for up to 0.2 s."""

_DEPTH_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{}:'))
_PORTION = 65_536
_encode = msgspec.json.Encoder().encode
_DIGITS_AS_ZERO = bytes(ord("0") if chr(byte).isdecimal() else ord(" ") for byte in range(256))
_LONG_DIGITS = b"0" * 19
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_BYTE_OFFSET = re.compile(r"\(byte (\d+)\)$")


def parse_json(body: bytes) -> Any:
    """Parse a JSON value within bounds.

    Raises:
        ProgramError: as in `check_bounds`, and `json.malformed`.
    """
    check_bounds(body)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(error, body) from None


def check_bounds(body: bytes) -> None:
    """Check the size, the nesting and the integers of JSON text.

    Raises:
        ProgramError: `program.too_large` (413) for too many bytes or items, `json.too_deep`, or
            `json.number` (an integer beyond 64 bits).
    """
    if len(body) > MAX_BODY_BYTES:
        raise ProgramError(
            "program.too_large",
            f"the body has {len(body):,} bytes; at most {MAX_BODY_BYTES:,} are allowed",
            status=413,
        )
    marks = _outside_strings(body)
    depth = _deepest(marks)
    if depth > MAX_DEPTH:
        raise ProgramError(
            "json.too_deep",
            f"arrays and objects are nested {depth} levels deep; at most {MAX_DEPTH} are allowed",
        )
    num_items = len(marks) - marks.count(b"]") - marks.count(b"}")
    if num_items > MAX_ITEMS:
        raise ProgramError(
            "program.too_large",
            f"the body has {num_items:,} arrays, objects and keys; at most {MAX_ITEMS:,} are "
            "allowed",
            status=413,
        )
    _check_elements(body)
    _check_integers(body)


def check_keys(body: bytes) -> None:
    """Check that no object of well-formed JSON has a key twice: parsers keep one of the values.

    A parser drops repeated keys, so that its value has fewer colons than the text.

    Raises:
        ProgramError: `json.duplicate_key`.
    """
    num_keys = _outside_strings(body).count(b":")
    if num_keys and num_keys != _outside_strings(_encode(msgspec.json.decode(body))).count(b":"):
        json.loads(body, object_pairs_hook=_check_pairs)


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            raise ProgramError(
                "json.duplicate_key", f"an object has the key {key[:80]!r} twice: remove one"
            )
        keys.add(key)


def measure_depth(body: bytes) -> int:
    """Return how deep arrays and objects are nested; brackets in strings do not count.

    Linear in the body, and exact for well-formed JSON.
    """
    return _deepest(_outside_strings(body))


def _deepest(marks: bytes) -> int:
    steps = array("b", marks.translate(_DEPTH_STEPS, b":"))
    deepest = depth = 0
    # In portions, between which other threads can run.
    for start in range(0, len(steps), _PORTION):
        depths = array("q", accumulate(steps[start : start + _PORTION], initial=depth))
        deepest, depth = max(deepest, max(depths)), depths[-1]
    return deepest


def _outside_strings(body: bytes) -> bytes:
    """Return the brackets and colons of JSON text that are not in strings.

    Each step keeps the parity of quotes: it removes escaped quotes, then everything but quotes,
    brackets and colons, then pairs of adjacent quotes.
    """
    marks = _without_escapes(body).translate(None, _NO_MARKS).replace(b'""', b"")
    return b"".join(marks.split(b'"')[::2])


def _without_escapes(body: bytes) -> bytes:
    """Return JSON text without escaped backslashes and quotes."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return body


def _check_elements(body: bytes) -> None:
    """Refuse bodies that would take much more memory than their bytes."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= MAX_ELEMENTS:
        return
    structure = b" ".join(_without_escapes(body).split(b'"')[::2])
    count = structure.count(b",") + structure.count(b"[") + structure.count(b"{")
    if count > MAX_ELEMENTS:
        raise ProgramError(
            "program.too_large",
            f"the body has {count:,} elements; at most {MAX_ELEMENTS:,} are allowed",
            status=413,
        )


def _check_integers(body: bytes) -> None:
    """Refuse integers that JSON allows but that do not fit 64 bits.

    Linear in the body, also if the body is not JSON: a regular expression for strings would search
    the rest of the body again at every quote.
    """
    # Most bodies end here. A regular expression takes twelve times as long.
    if _LONG_DIGITS not in body.translate(_DIGITS_AS_ZERO):
        return
    for match in _NUMBER.finditer(b" ".join(_without_escapes(body).split(b'"')[::2])):
        token = match[0]
        if len(token) < 19 or not token.lstrip(b"-").isdigit():
            continue
        if len(token) > 21 or not -(2**63) <= int(token) < 2**64:
            head = token[:24].decode()
            raise ProgramError("json.number", f"the integer {head}... does not fit 64 bits")


def malformed(error: msgspec.DecodeError | UnicodeDecodeError, body: bytes) -> ProgramError:
    """Return the error `json.malformed` with the position in the body."""
    if isinstance(error, UnicodeDecodeError):
        return ProgramError("json.malformed", f"not JSON: a string is not UTF-8: {error.reason}")
    reason = str(error).removeprefix("JSON is malformed: ")
    offset = _BYTE_OFFSET.search(reason)
    if offset is None:
        return ProgramError("json.malformed", f"not JSON: {reason}")
    before = body[: int(offset[1])]
    line = before.count(b"\n") + 1
    column = len(before) - (before.rfind(b"\n") + 1) + 1
    return ProgramError("json.malformed", f"not JSON: {reason}, line {line}, column {column}")
