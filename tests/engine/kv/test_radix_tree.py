"""The prefix tree, compared with a model."""

from __future__ import annotations

import random

import pytest

from conure.engine.kv.radix_tree import RadixNode, RadixTree


def grow(tree: RadixTree, salt: str, *blocks: int) -> list[RadixNode]:
    """Insert a path whose keys are the block numbers."""
    nodes: list[RadixNode] = []
    parent = tree.root(salt)
    for block in blocks:
        parent = tree.insert(parent, (block,), block)
        nodes.append(parent)
    return nodes


def cache(tree: RadixTree, nodes: list[RadixNode]) -> None:
    for node in reversed(nodes):
        node.is_retained = True
        tree.mark_cached(node)


def test_salts_share_nothing() -> None:
    tree = RadixTree(4)
    grow(tree, "one", 0)
    assert tree.root("two").children == {}
    assert (0,) in tree.root("one").children


def test_empty_root_is_removed() -> None:
    tree = RadixTree(4)
    (node,) = grow(tree, "one", 0)
    tree.remove(node)
    tree.check()
    assert tree.root("one") is not tree.root("one")


def test_node_with_children_cannot_be_removed() -> None:
    tree = RadixTree(4)
    first, _ = grow(tree, "", 0, 1)
    with pytest.raises(AssertionError):
        tree.remove(first)


def test_keys_with_equal_hashes_are_distinct() -> None:
    tree = RadixTree(4)
    assert hash((-1,)) == hash((-2,))
    tree.insert(tree.root(""), (-1,), 0)
    tree.insert(tree.root(""), (-2,), 1)
    assert tree.root("").children[(-1,)].block == 0
    assert tree.root("").children[(-2,)].block == 1


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    tree = RadixTree(8)
    old, new = grow(tree, "", 0, 1), grow(tree, "x", 2, 3)
    cache(tree, old)
    cache(tree, new)
    tree.check()
    tree.mark_referenced(old[0])
    tree.mark_referenced(old[1])
    cache(tree, old)
    assert [tree.evict() for _ in range(5)] == [3, 2, 1, 0, None]


def test_leaf_without_expected_readers_is_evicted_first() -> None:
    tree = RadixTree(8)
    expected = grow(tree, "", 0, 1)
    longer = tree.insert(expected[-1], (2,), 2)
    for node in expected:
        node.is_expected = True
    other = grow(tree, "x", 3)
    cache(tree, [*expected, longer])
    cache(tree, other)
    tree.check()
    assert [tree.evict() for _ in range(5)] == [2, 3, 1, 0, None]


def test_node_with_a_new_reference_is_not_evicted() -> None:
    tree = RadixTree(8)
    nodes = grow(tree, "", 0, 1)
    cache(tree, nodes)
    tree.mark_referenced(nodes[0])
    assert [tree.evict(), tree.evict()] == [1, None]


def test_eviction_order_matches_a_model() -> None:
    chance = random.Random(5)
    for _ in range(30):
        tree = RadixTree(12)
        nodes = [tree.insert(tree.root(""), (0,), 0)]
        for block in range(1, 12):
            nodes.append(tree.insert(chance.choice(nodes), (block,), block))
        uses: dict[int, int] = {}
        for node in reversed(nodes):
            node.is_retained = True
            tree.mark_cached(node)
            uses[node.block] = len(uses)
        for use in range(100, 300):
            leaf = chance.choice(nodes)
            path = [leaf]
            while (parent := path[-1].parent) is not None and parent.parent is not None:
                path.append(parent)
            for node in reversed(path):
                tree.mark_referenced(node)
            for offset, node in enumerate(path):
                tree.mark_cached(node)
                uses[node.block] = use * 100 + offset
        tree.check()
        left = {node.block: node for node in nodes}
        while left:
            leaves = [block for block, node in left.items() if not node.children]
            oldest = min(leaves, key=uses.__getitem__)
            assert tree.evict() == oldest
            del left[oldest]
            tree.check()
        assert tree.evict() is None
