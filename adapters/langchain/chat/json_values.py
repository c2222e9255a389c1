"""Conversion of an application's values to JSON and back.

Text, numbers, lists and dicts with text keys become the JSON of the same form. Every other value
becomes a dict with a reserved key that states its kind, so that `decode` restores the kind:

    (1, 2)       {"__langchain_tuple__": [1, 2]}
    {1: "one"}   {"__langchain_items__": [[1, "one"]]}
    Colour.RED   {"__langchain_object__": "module:Colour", "value": "red"}

Messages, Documents and other pydantic objects, dataclasses and enums are objects. A pydantic object
keeps its private attributes, and which of its fields are set. `decode` looks classes up among those
that the process has loaded, and never imports a module.

Invariant: a value that would not be equal after a round trip is rejected, never approximated.
Subclasses of text, numbers and dicts are equal to what JSON makes of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from functools import cached_property
from typing import Any, Final
from uuid import uuid4

from langchain_core.messages import BaseMessage, message_to_dict, messages_from_dict
from pydantic import BaseModel

from conure.server.program.decoding.unicode_text import is_unicode
from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json

from ...speculation.active_run import ActiveRunVar

_MESSAGE: Final = "__langchain_message__"
_OBJECT: Final = "__langchain_object__"
_TUPLE: Final = "__langchain_tuple__"
_ITEMS: Final = "__langchain_items__"
_LOCAL: Final = "__langchain_local__"
_VALUE: Final = "value"
_SET: Final = "set"
"""Fields of a pydantic object that are set, if they are not all of its fields."""
_PRIVATE: Final = "private"
"""Private attributes of a pydantic object, if it has any."""
_OBJECT_KEYS: Final = frozenset({_OBJECT, _VALUE, _SET, _PRIVATE})
_RESERVED_KEYS: Final = frozenset({_MESSAGE, _OBJECT, _TUPLE, _ITEMS, _LOCAL})
_MIN_INTEGER: Final = -(2**63)
_MAX_INTEGER: Final = 2**64 - 1
_BASE_CLASSES: Final[tuple[type[Any], ...]] = (BaseModel, Enum)
"""Classes whose subclasses are restored, in addition to dataclasses."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedValue:
    """JSON from `encode`, which `encode` does not convert again."""

    json: Json


class LocalValues:
    """Values of one run that JSON cannot carry. They stay in this process; the server gets a key.

    `encode` uses local values only within `active`: where all client steps of a program run in one
    process. Elsewhere `encode` rejects such a value.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def active(self) -> AbstractContextManager[None]:
        """Let `encode` and `decode` use these values within the block."""
        return _LOCAL_VALUES.activate(self)

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


_LOCAL_VALUES: Final = ActiveRunVar[LocalValues]("conure_values")


def encode(value: Any, *, what: str, is_plain: bool = False) -> Json:
    """Convert a value to JSON that `decode` converts back to an equal value.

    A value that JSON cannot carry is added to the active `LocalValues`, if there are any.

    Args:
        value: anything.
        what: describes the value in the error.
        is_plain: the JSON is printed in a prompt: only a value that is JSON itself is accepted.

    Raises:
        ProgramError: `langchain.not_json` if the value would not be equal after a round trip;
            `langchain.text` if it is text with half of a surrogate pair.
    """
    if isinstance(value, EncodedValue):
        return value.json
    local = None if is_plain else _LOCAL_VALUES.get()
    if local is not None and _changes_in_json(value):
        return {_LOCAL: local.add(value)}
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str) and not isinstance(value, Enum):
        _check_text(value, what)
        return str.__str__(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)  # an encoder of JSON rejects subclasses, such as numpy.float64
    if type(value) is list:
        items = enumerate(value)
        return [encode(item, what=f"{what}[{i}]", is_plain=is_plain) for i, item in items]
    if isinstance(value, dict) and _has_text_keys(value, may_be_reserved=is_plain):
        pairs = value.items()
        return {k: encode(item, what=f"{what}[{k!r}]", is_plain=is_plain) for k, item in pairs}
    marked = None if is_plain else _marked(value, what)
    if marked is not None:
        return marked
    if local is not None:
        return {_LOCAL: local.add(value)}
    form, allowed = "", "lists, tuples, dicts, messages, Documents, pydantic objects or dataclasses"
    if is_plain:
        form, allowed = " for a prompt", "lists or dicts whose keys are text"
    raise ProgramError(
        "langchain.not_json",
        f"{what} is a {type(value).__name__}, which cannot be sent as JSON{form}; let the function "
        f"return text, numbers, {allowed}",
    )


def _changes_in_json(value: Any) -> bool:
    """Return whether JSON cannot carry the value, or would lose a class that matters.

    A `Counter` that becomes a dict raises KeyError for a missing key, for example. Subclasses of
    str and float behave like their base class, so they are sent as JSON.
    """
    if type(value) is int:
        return not _MIN_INTEGER <= value <= _MAX_INTEGER
    if isinstance(value, str):
        return not is_unicode(value)
    return isinstance(value, dict) and type(value) is not dict


def _check_text(value: str, what: str) -> None:
    if not is_unicode(value):
        raise ProgramError(
            "langchain.text",
            f"{what} has half of a surrogate pair, which is not text; replace it, for example by "
            "text.encode('utf-8', 'replace').decode()",
        )


def _has_text_keys(value: dict[Any, Any], *, may_be_reserved: bool) -> bool:
    if _RESERVED_KEYS & value.keys() and not may_be_reserved:
        return False
    return all(isinstance(key, str) and is_unicode(key) for key in value)


def decode(value: Json) -> Any:
    """Convert the JSON from `encode` back to the value."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_MESSAGE}:
        return messages_from_dict([decode(value[_MESSAGE])])[0]
    if value.keys() == {_TUPLE}:
        return tuple(decode(item) for item in value[_TUPLE])
    if value.keys() == {_ITEMS}:
        return {decode(key): decode(item) for key, item in value[_ITEMS]}
    if value.keys() == {_LOCAL}:
        local = _LOCAL_VALUES.get()
        if local is None:
            raise ProgramError("langchain.local", "a value is known to the process that made it")
        return local.get(value[_LOCAL])
    if {_OBJECT, _VALUE} <= value.keys() <= _OBJECT_KEYS:
        return _object_of(value)
    return {key: decode(item) for key, item in value.items()}


def _marked(value: Any, what: str) -> Json:
    """Return JSON with a reserved key for a value; None if `decode` could not restore the value."""
    if isinstance(value, BaseMessage):
        message = {_MESSAGE: encode(message_to_dict(value), what=what)}
        if _is_restored(message, value):
            return message
    if type(value) is tuple:
        return {_TUPLE: [encode(item, what=f"{what}[{i}]") for i, item in enumerate(value)]}
    if type(value) is dict:
        items = value.items()
        pairs = [[encode(k, what=f"a key of {what}"), encode(v, what=what)] for k, v in items]
        return {_ITEMS: pairs}
    marked = _marked_object(value, what)
    return marked if marked is not None and _is_restored(marked, value) else None


def _marked_object(value: Any, what: str) -> Json:
    """Return JSON with the class and the content of an object; None for other values."""
    content: Any
    more: dict[str, Json] = {}
    if isinstance(value, BaseModel):
        state = BaseModel.__getstate__(value)
        names = type(value).model_fields
        # Cached properties are in the same dict.
        content = {name: each for name, each in state["__dict__"].items() if name in names}
        content |= state["__pydantic_extra__"] or {}
        if value.model_fields_set != content.keys():
            more[_SET] = sorted(value.model_fields_set)
        if state["__pydantic_private__"]:
            more[_PRIVATE] = encode(state["__pydantic_private__"], what=what)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        if _has_other_attributes(value, content):
            return None
    elif isinstance(value, Enum):
        content = value.value
    else:
        return None
    return {_OBJECT: _name_of(type(value)), _VALUE: encode(content, what=what), **more}


def _has_other_attributes(value: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether a dataclass instance has attributes that its fields do not give."""
    others = getattr(value, "__dict__", {}).keys() - fields.keys()
    kind = type(value)
    return any(not isinstance(getattr(kind, name, None), cached_property) for name in others)


def _is_restored(marked: Json, value: Any) -> bool:
    """Return whether `decode` makes an equal value of the JSON."""
    try:
        return bool(decode(marked) == value)
    except Exception:  # the class of the value does not compare, or is not found
        return False


def _object_of(marked: Mapping[str, Json]) -> Any:
    """Return the object that `_marked_object` describes.

    Its constructor, validators and hooks do not run again.
    """
    kind, content = _class_named(marked[_OBJECT]), decode(marked[_VALUE])
    if issubclass(kind, BaseModel):
        return _model_of(kind, content, marked)
    if issubclass(kind, Enum):
        return kind(content)
    restored = object.__new__(kind)
    for field, value in content.items():
        object.__setattr__(restored, field, value)
    return restored


def _model_of(
    kind: type[BaseModel], content: Mapping[str, Any], marked: Mapping[str, Json]
) -> BaseModel:
    """Return a pydantic object from the state that pydantic pickles; see `_marked_object`."""
    fields = {name: each for name, each in content.items() if name in kind.model_fields}
    extra = {name: each for name, each in content.items() if name not in fields}
    private: dict[str, Any] | None = {} if kind.__private_attributes__ else None
    restored = kind.__new__(kind)
    restored.__setstate__(
        {
            "__dict__": fields,
            "__pydantic_extra__": extra if kind.model_config.get("extra") == "allow" else None,
            "__pydantic_fields_set__": set(marked.get(_SET, content)),
            "__pydantic_private__": decode(marked[_PRIVATE]) if _PRIVATE in marked else private,
        }
    )
    return restored


def _name_of(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_named(name: str) -> type[Any]:
    """Return the loaded pydantic class, enum or dataclass with this name.

    Raises:
        ProgramError: if there is none.
    """
    # The search of all classes is slow, and only dataclasses need it.
    for base in (*_BASE_CLASSES, object):
        for kind in _subclasses(base, set()):
            is_value = issubclass(kind, _BASE_CLASSES) or dataclasses.is_dataclass(kind)
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
