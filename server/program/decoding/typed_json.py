"""Decoding and conversion to typed records, in any thread.

msgspec builds a description of a record type on its first use. If two threads do this at once, one
of them reads an unfinished description, and the interpreter crashes. So decoders are created under
a lock, once per type, and all typed decoding of the clients and the server uses this module.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_DESCRIPTION_LOCK = threading.Lock()


@overload
def decode_record(body: bytes | str, record_type: type[T]) -> T: ...


@overload
def decode_record(body: bytes | str, record_type: Any) -> Any: ...


def decode_record(body: bytes | str, record_type: Any) -> Any:
    """Decode JSON.

    Raises:
        msgspec.DecodeError: if the body is not JSON.
        msgspec.ValidationError: if it does not fit the type.
    """
    return _decoder(record_type).decode(body)


@overload
def convert_record(value: object, record_type: type[T]) -> T: ...


@overload
def convert_record(value: object, record_type: Any) -> Any: ...


def convert_record(value: object, record_type: Any) -> Any:
    """Convert a JSON value, or a record, to another type.

    Raises:
        msgspec.ValidationError: if it does not fit the type.
    """
    _decoder(record_type)  # builds the description under the lock
    return msgspec.convert(value, record_type)


@functools.cache
def _decoder(record_type: Any) -> msgspec.json.Decoder[Any]:
    with _DESCRIPTION_LOCK:
        return msgspec.json.Decoder(record_type)
