"""`list.*`: operations on lists that expressions do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..program.errors import RunError
from ..program.expressions.values import compact_json, kind_of
from .registry import function

TIMEOUT_S = 5


@function(timeout_s=TIMEOUT_S)
def unique(items: list[Any]) -> list[Any]:
    """Return the items without repetitions, in order. 1 and true are different, 1 and 1.0 too."""
    return list({compact_json(item): item for item in reversed(items)}.values())[::-1]


@function(timeout_s=TIMEOUT_S)
def sort(items: list[Any], by: str | None = None, descending: bool = False) -> list[Any]:
    """Return the items in order: all numbers or all strings, or objects `by` one of their keys."""
    keys = items if by is None else [_key_of(item, by) for item in items]
    kinds = {"number" if kind_of(key) in ("int", "float") else kind_of(key) for key in keys}
    if len(kinds) > 1 or kinds - {"number", "string"}:
        raise RunError("list.sort", f"only numbers or only strings have an order, got {kinds}")
    order = sorted(range(len(items)), key=keys.__getitem__, reverse=descending)
    return [items[index] for index in order]


@function(timeout_s=TIMEOUT_S)
def flatten(items: list[Any]) -> list[Any]:
    """Return the items of the lists in a list; other items stay."""
    return [inner for item in items for inner in (item if isinstance(item, list) else (item,))]


@function(timeout_s=TIMEOUT_S)
def chunk(items: list[Any], size: int) -> list[Any]:
    """Return lists of at most `size` consecutive items."""
    if size < 1:
        raise RunError("list.chunk", f"`size` must be at least 1, got {size}")
    return [items[start : start + size] for start in range(0, len(items), size)]


@function(timeout_s=TIMEOUT_S)
def zip_lists(left: list[Any], right: list[Any]) -> list[Any]:
    """Return pairs of the items of two lists of equal length."""
    if len(left) != len(right):
        raise RunError("list.zip", f"the lists have {len(left)} and {len(right)} items")
    return [list(pair) for pair in zip(left, right, strict=True)]


@function(timeout_s=TIMEOUT_S)
def reverse(items: list[Any]) -> list[Any]:
    """Return the items from last to first."""
    return items[::-1]


@function(timeout_s=TIMEOUT_S)
def add_up(items: list[Any]) -> Any:
    """Return the sum of numbers."""
    for item in items:
        if kind_of(item) not in ("int", "float"):
            raise RunError("list.sum", f"only numbers can be added, got {kind_of(item)}")
    return sum(items)


def _key_of(item: Any, by: str) -> Any:
    if not isinstance(item, dict) or by not in item:
        raise RunError("list.sort", f"an item has no `{by}`")
    return item[by]


LIST_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "list.unique": unique,
    "list.sort": sort,
    "list.flatten": flatten,
    "list.chunk": chunk,
    "list.zip": zip_lists,
    "list.reverse": reverse,
    "list.sum": add_up,
}
