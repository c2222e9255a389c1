"""Encodes requests as JSON, and refuses numbers that JSON cannot represent."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from conure.server.program.errors import ExpressionError


def encode_json(value: Any) -> bytes:
    """Return a value as JSON. A `msgspec.Raw` in it is inserted as it is.

    Raises:
        TypeError: if the value is not JSON.
        ExpressionError: `expr.number` if it contains NaN or an infinity.
    """
    encoded = msgspec.json.encode(value)
    if b"null" in encoded:  # msgspec writes NaN and infinities as null
        _check_finite(msgspec.to_builtins(value, enc_hook=_without_content))
    return encoded


def _without_content(raw: Any) -> None:
    """Replace a `msgspec.Raw`, which `to_builtins` does not accept, by None."""
    assert isinstance(raw, msgspec.Raw)


def _check_finite(value: Any) -> None:
    items = [value]
    while items:
        item = items.pop()
        if isinstance(item, dict):
            items.extend(item.values())
        elif isinstance(item, list | tuple):
            items.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise ExpressionError(
                "expr.number", f"{item} is not a JSON number; send null or a text instead"
            )
