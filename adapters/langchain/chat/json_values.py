"""Conversion of an application's values to JSON and back.

Messages, Documents and other pydantic objects, dataclasses, enums, tuples and dicts with other keys
than text are marked, so that they are restored as what they were. Classes are named by module and
name; they are looked up among the classes that the process has loaded, and never imported.

Invariant: a value that would not be equal after a round trip is rejected, never approximated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final
from uuid import uuid4

from langchain_core.messages import BaseMessage, message_to_dict, messages_from_dict
from pydantic import BaseModel

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

_MESSAGE: Final = "__langchain_message__"
_OBJECT: Final = "__langchain_object__"
_TUPLE: Final = "__langchain_tuple__"
_ITEMS: Final = "__langchain_items__"
_LOCAL: Final = "__langchain_local__"
_ROOTS: Final[tuple[type[Any], ...]] = (BaseModel, Enum)


class LocalValues:
    """Values of one run that JSON cannot carry. They stay in this process; the server gets a key.

    A program that is run with `execute` has all of its client steps in one process. In others, such
    a value is rejected.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let `encode` and `decode` use these values within the block."""
        token = _LOCAL_VALUES.set(self)
        try:
            yield
        finally:
            _LOCAL_VALUES.reset(token)

    def add(self, value: Any) -> str:
        """Keep a value, and return its key."""
        key = uuid4().hex
        self._values[key] = value
        return key

    def get(self, key: str) -> Any:
        """Return a value.

        Raises:
            ProgramError: if it belongs to another run.
        """
        if key not in self._values:
            raise ProgramError("langchain.local", "a value belongs to another run")
        return self._values[key]


_LOCAL_VALUES: Final[ContextVar[LocalValues | None]] = ContextVar("conure_values", default=None)


def encode(value: Any, *, what: str, is_plain: bool = False) -> Json:
    """Convert a value to JSON that `decode` converts back to an equal value.

    Args:
        value: anything.
        what: describes the value in the error.
        is_plain: the JSON must be the value itself, without marks.

    Raises:
        ProgramError: `langchain.not_json` if the value would not be equal after a round trip.
    """
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str) and not isinstance(value, Enum):
        return str.__str__(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if type(value) is list:
        items = enumerate(value)
        return [encode(item, what=f"{what}[{i}]", is_plain=is_plain) for i, item in items]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        pairs = value.items()
        return {k: encode(item, what=f"{what}[{k!r}]", is_plain=is_plain) for k, item in pairs}
    marked = None if is_plain else _marked(value, what)
    if marked is not None:
        return marked
    local = _LOCAL_VALUES.get()
    if local is not None and not is_plain:
        return {_LOCAL: local.add(value)}
    form = " for a prompt" if is_plain else ""
    raise ProgramError(
        "langchain.not_json",
        f"{what} is a {type(value).__name__}, which cannot be sent as JSON{form}; let the function "
        "return text, numbers, lists, tuples, dicts, messages, Documents, pydantic objects or "
        "dataclasses",
    )


def decode(value: Json) -> Any:
    """Convert the JSON from `encode` back to the value."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_MESSAGE}:
        return messages_from_dict([value[_MESSAGE]])[0]
    if value.keys() == {_TUPLE}:
        return tuple(decode(item) for item in value[_TUPLE])
    if value.keys() == {_ITEMS}:
        return {decode(key): decode(item) for key, item in value[_ITEMS]}
    if value.keys() == {_LOCAL}:
        local = _LOCAL_VALUES.get()
        if local is None:
            raise ProgramError("langchain.local", "a value is known to the process that made it")
        return local.get(value[_LOCAL])
    if value.keys() == {_OBJECT, "value"}:
        return _restored(value[_OBJECT], decode(value["value"]))
    return {key: decode(item) for key, item in value.items()}


def _marked(value: Any, what: str) -> Json:
    """Return the JSON of a value that is not JSON itself; None if it cannot be restored."""
    if isinstance(value, BaseMessage):
        return {_MESSAGE: message_to_dict(value)}
    if type(value) is tuple:
        return {_TUPLE: [encode(item, what=f"{what}[{i}]") for i, item in enumerate(value)]}
    if type(value) is dict:
        items = value.items()
        pairs = [[encode(k, what=f"a key of {what}"), encode(v, what=what)] for k, v in items]
        return {_ITEMS: pairs}
    content: Any
    if isinstance(value, BaseModel):
        content = {name: getattr(value, name) for name in type(value).model_fields}
        content |= value.model_extra or {}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, Enum):
        content = value.value
    else:
        return None
    marked = {_OBJECT: _name_of(type(value)), "value": encode(content, what=what)}
    try:
        is_restored = bool(decode(marked) == value)
    except Exception:  # its class does not compare, or is not found
        is_restored = False
    return marked if is_restored else None


def _restored(name: str, content: Any) -> Any:
    kind = _class_named(name)
    if issubclass(kind, BaseModel):
        return kind.model_construct(**content)
    if issubclass(kind, Enum):
        return kind(content)
    restored = object.__new__(kind)
    for field, value in content.items():
        object.__setattr__(restored, field, value)
    return restored


def _name_of(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_named(name: str) -> type[Any]:
    """Return a loaded class of values.

    Raises:
        ProgramError: if there is none.
    """
    for root in (*_ROOTS, object):
        for kind in _subclasses(root, set()):
            is_value = issubclass(kind, _ROOTS) or dataclasses.is_dataclass(kind)
            if is_value and _name_of(kind) == name:
                return kind
    raise ProgramError(
        "langchain.class", f"this process has not loaded the class {name} of a value"
    )


def _subclasses(kind: type[Any], seen: set[type[Any]]) -> Iterator[type[Any]]:
    """Yield the subclasses of a class, the latest first, each once."""
    for each in reversed(type.__subclasses__(kind)):
        if each not in seen:
            seen.add(each)
            yield each
            yield from _subclasses(each, seen)
