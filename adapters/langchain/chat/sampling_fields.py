"""Pydantic fields from the sampling parameters of programs."""

from __future__ import annotations

import functools
import operator
import types
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, Field, create_model

M = TypeVar("M", bound=BaseModel)

_BOUNDS = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
_UNIONS = (Union, types.UnionType)


def with_sampling_fields(base: type[M], record: type[msgspec.Struct]) -> type[M]:
    """Return a subclass that has each field of a record, with its bounds; by default None.

    A subclass may declare a field again, with its own description, aliases and type.

    Args:
        base: a pydantic model.
        record: sampling parameters.
    """
    hints = get_type_hints(record, include_extras=True)
    fields: dict[str, Any] = {
        name: (_pydantic_type(hints[name]) | None, None) for name in record.__struct_fields__
    }
    return create_model(f"{base.__name__}With{record.__name__}", __base__=base, **fields)


def _pydantic_type(hint: Any) -> Any:
    """Return a type in which pydantic's bounds replace those of msgspec."""
    arguments = get_args(hint)
    if not arguments:
        return hint
    if get_origin(hint) is Annotated:
        inner, *annotations = arguments
        metas = [each for each in annotations if isinstance(each, msgspec.Meta)]
        bounds: dict[str, Any] = {
            name: bound
            for meta in metas
            for name in _BOUNDS
            if (bound := getattr(meta, name)) is not None
        }
        return Annotated[_pydantic_type(inner), Field(**bounds)]
    converted = [_pydantic_type(argument) for argument in arguments]
    origin = get_origin(hint)
    if origin in _UNIONS:
        return functools.reduce(operator.or_, converted)
    return origin[tuple(converted)]
