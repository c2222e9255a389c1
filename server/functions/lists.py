"""`list.*`: operations on lists that expressions do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..program.errors import ExpressionError, RunError
from ..program.expressions.values import check_number, compact_json, kind_of
from .registry import function

TIMEOUT_S = 5


@function(timeout_s=TIMEOUT_S)
def unique(items: list[Any]) -> list[Any]:
    """Return the first occurrence of each item, in order. 1, 1.0 and true are different items."""
    first: dict[str, Any] = {}
    for item in items:
        first.setdefault(compact_json(item), item)
    return list(first.values())


@function(timeout_s=TIMEOUT_S)
def sort(items: list[Any], by: str | None = None, descending: bool = False) -> list[Any]:
    """Sort numbers or strings. With `by`, sort objects by the value of that key."""
    keys = items if by is None else [_key_of(item, by) for item in items]
    kinds = {"number" if kind_of(key) in ("int", "float") else kind_of(key) for key in keys}
    if len(kinds) > 1 or kinds - {"number", "string"}:
        found = ", ".join(sorted(kinds))
        raise RunError("list.sort", f"only numbers or only strings can be sorted, got {found}")
    order = sorted(range(len(items)), key=keys.__getitem__, reverse=descending)
    return [items[index] for index in order]


@function(timeout_s=TIMEOUT_S)
def flatten(items: list[Any]) -> list[Any]:
    """Replace each list in a list by its items, one level deep. Other items are kept."""
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
        raise RunError(
            "list.zip",
            f"the lists must have equal lengths, got {len(left)} and {len(right)} items",
        )
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
    try:
        return check_number(sum(items))
    except ExpressionError as error:
        raise RunError("list.sum", f"the sum is too large: {error}") from None


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
