"""Tests of the prefix registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.runtime.calls.prefix_registry import (
    PrefixRegistry,
    RetainedContext,
    common_prefix_len,
)


def retained(context: int, ids: list[int], engine: str = "e") -> RetainedContext:
    return RetainedContext(
        engine, context, ids, num_expected=0, num_prompt=len(ids), since=0.0, num_own=len(ids)
    )


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    length = common_prefix_len(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


def test_prefix_is_retained_until_its_last_reader() -> None:
    registry = PrefixRegistry()
    for node in ("a", "b", "c"):
        registry.add_reader(node, (b"p", node.encode()))
    assert registry.remove_reader("a") == []
    prefix = retained(1, [1, 2, 3])
    assert registry.retain(b"p", prefix)
    assert registry.find("e", (b"p", b"b")) == [prefix]
    assert registry.remove_reader("b") == []
    assert registry.remove_reader("c") == [prefix]
    assert registry.num_retained == 0


def test_retain_without_readers_does_nothing() -> None:
    registry = PrefixRegistry()
    registry.add_reader("a", (b"p",))
    assert registry.remove_reader("a") == []
    late = retained(1, [1])
    assert not registry.retain(b"p", late)


def test_a_prefix_is_retained_once() -> None:
    registry = PrefixRegistry()
    registry.add_reader("a", (b"p",))
    first = retained(1, [1, 2])
    assert registry.retain(b"p", first)
    for other in (retained(2, [1, 2, 3]), retained(3, [1, 2], "elsewhere")):
        assert not registry.retain(b"p", other)
    assert registry.remove_reader("a") == [first]


def test_uses_lists_pending_readers() -> None:
    registry = PrefixRegistry()
    for node in ("a", "b"):
        registry.add_reader(node, (b"p", node.encode()))
    prefix = retained(1, [1])
    registry.retain(b"p", prefix)
    assert [(each, list(readers)) for each, readers in registry.uses()] == [(prefix, ["a", "b"])]
    registry.remove_reader("a")
    assert not registry.is_pending("a")
    assert [list(readers) for _, readers in registry.uses()] == [["b"]]


def test_find_longest_compares_token_ids() -> None:
    registry = PrefixRegistry()
    for node in ("a", "b"):
        registry.add_reader(node, (b"p", b"q"))
    assert registry.find_longest((b"p", b"q"), [1, 2, 3]) == (None, 0)
    registry.retain(b"p", retained(1, [1]))
    registry.retain(b"q", retained(2, [1, 2, 9]))
    assert registry.find_longest((b"p", b"q"), [1, 2, 3]) == ("e", 2)
    assert registry.find_longest((b"p",), [1, 2, 3]) == ("e", 1)


@given(
    st.lists(st.tuples(st.binary(max_size=1), st.lists(st.integers(0, 1)), st.sampled_from("ef"))),
    st.lists(st.binary(max_size=1)),
    st.lists(st.integers(0, 1)),
)
def test_find_longest_compares_all_contexts_of_the_prefixes(
    given_contexts: list[tuple[bytes, list[int], str]], hashes: list[bytes], ids: list[int]
) -> None:
    registry = PrefixRegistry()
    registry.add_reader("a", [prefix for prefix, _, _ in given_contexts])
    for number, (prefix, of_context, engine) in enumerate(given_contexts):
        registry.retain(prefix, retained(number, of_context, engine))
    first = {prefix: (of_context, engine) for prefix, of_context, engine in given_contexts[::-1]}
    matches = [
        (common_prefix_len(of_context, ids), engine)
        for prefix, (of_context, engine) in first.items()
        if prefix in hashes
    ]
    num_tokens, found = max(matches, default=(0, ""))
    assert registry.find_longest(hashes, ids) == (found if num_tokens else None, num_tokens)


class Unscannable(dict[Any, Any]):
    """A dictionary that nothing iterates over."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a scan over all retained contexts")

    items = keys = values = __iter__  # type: ignore[assignment]  # none of them returns


def test_a_call_does_not_scan_the_retained_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = PrefixRegistry()
    monkeypatch.setattr(registry, "_retained", Unscannable())
    registry.add_reader("a", (b"p", b"q"))
    prefix = retained(1, [1, 2])
    assert registry.retain(b"p", prefix)
    assert registry.find("e", (b"p",)) == [prefix]
    assert registry.find_longest((b"p", b"q"), [1, 2]) == ("e", 2)
    assert registry.remove_reader("a") == [prefix]


def test_removing_a_reader_twice_counts_once() -> None:
    registry = PrefixRegistry()
    registry.add_reader("a", (b"p",))
    registry.add_reader("b", (b"p",))
    registry.remove_reader("a")
    registry.remove_reader("a")
    assert registry.num_pending_readers(b"p") == 1


def test_lost_engine_loses_its_contexts() -> None:
    registry = PrefixRegistry()
    for node in ("a", "b"):
        registry.add_reader(node, (b"p",))
    registry.retain(b"p", retained(1, [1], "dead"))
    registry.engine_lost("dead")
    assert registry.find("dead", (b"p",)) == []
    assert registry.retain(b"p", retained(2, [1], "alive"))


def test_release_all_releases_everything() -> None:
    registry = PrefixRegistry()
    registry.add_reader("a", (b"p",))
    prefix = retained(1, [1])
    registry.retain(b"p", prefix)
    assert registry.release_all() == [prefix]
    assert registry.num_retained == 0


def test_release_all_includes_unfinished_fills() -> None:
    registry = PrefixRegistry()
    released, filled, other = retained(1, [1]), retained(2, [2]), retained(3, [3], "dead")
    for context in (released, filled, other):
        context.is_filled = False
        context.is_released = True
        registry.begin_fill(context)
    registry.mark_filled(filled)
    registry.engine_lost("dead")
    assert registry.release_all() == [released]
    assert released.is_filled, "freed without waiting for its cost"
    assert registry.release_all() == []


def test_discarded_context_is_not_found() -> None:
    registry = PrefixRegistry()
    for node in ("a", "b", "c"):
        registry.add_reader(node, (b"p", b"q"))
    bad, good = retained(1, [1]), retained(2, [1, 2])
    registry.retain(b"p", bad)
    registry.retain(b"q", good)
    registry.discard(bad)
    registry.discard(retained(1, [1]))
    assert registry.find("e", (b"p", b"q")) == [good]
    assert registry.retain(b"p", retained(3, [1]))
