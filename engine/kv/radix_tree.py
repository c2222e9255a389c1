"""The prefix tree: maps token prefixes to the blocks that hold their KV.

A node is one full block. Its key is the exact tuple of its tokens, so two prefixes share a
node only if they are equal, even if their hashes collide. Its parent identifies the preceding
tokens, on which KV depends too. Each salt has its own root, so contexts with different salts share
nothing.

Blocks of live contexts are in the tree as soon as they are *scheduled* to be computed, so
that contexts that arrive together with the same prefix compute it once, even within one step
(RadixAttention, arXiv 2312.07104, inserts after a request has finished).

Out of scope: reference counts. The caller sets `is_retained` and `is_expected`, and only while a
node is not cached.

Invariants, if callers acquire whole paths: ancestors of a retained node are retained, those of an
expected node are expected, and if no context refers to a node, none refers to its children. So each
cached node is a leaf, or becomes one by the eviction of other cached nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class RadixNode:
    """One full block under its prefix. A root has block -1."""

    block: int
    key: Key
    parent: RadixNode | None
    salt: str
    children: dict[Key, RadixNode] = field(default_factory=dict)
    is_retained: bool = False
    """The block becomes cached, not free, when the last context releases it."""
    is_expected: bool = False
    """Later contexts are expected to share the block. Nodes without this mark are evicted first."""
    is_cached: bool = False
    """No context refers to the block."""
    last_use: int = 0


class RadixTree:
    """Nodes by prefix and by block, and the eviction order of cached nodes."""

    def __init__(self, num_blocks: int) -> None:
        self.node_of: list[RadixNode | None] = [None] * num_blocks
        """The node of each block. Read by the hot path, written here only."""
        self._roots: dict[str, RadixNode] = {}
        # Heap of (is_expected, last_use, sequence number, leaf). An entry becomes stale when its
        # node is referenced again, gains a child or is removed. `evict` skips stale entries;
        # `_push` removes them when they outnumber the blocks.
        self._leaves: list[tuple[bool, int, int, RadixNode]] = []
        self._clock = 0

    def root(self, salt: str) -> RadixNode:
        """Return the root of a salt. A new root is added to the tree by its first insert."""
        return self._roots.get(salt) or RadixNode(-1, (), None, salt)

    def insert(self, parent: RadixNode, key: Key, block: int) -> RadixNode:
        """Add a node under `parent` for `block`, which must not be in the tree."""
        assert key not in parent.children
        assert self.node_of[block] is None
        if parent.parent is None:
            assert self._roots.setdefault(parent.salt, parent) is parent, "the root is stale"
        node = RadixNode(block, key, parent, parent.salt)
        parent.children[key] = node
        self.node_of[block] = node
        return node

    def remove(self, node: RadixNode) -> None:
        """Remove a node without children, and its root if it becomes empty."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key]
        self.node_of[node.block] = None
        node.is_cached = False
        if parent.children:
            return
        if parent.parent is None:
            self._roots.pop(parent.salt, None)
        elif parent.is_cached:
            self._push(parent)

    def mark_cached(self, node: RadixNode) -> None:
        """Mark a node as cached and most recently used."""
        self._clock += 1
        node.is_cached = True
        node.last_use = self._clock
        if not node.children:
            self._push(node)

    def mark_referenced(self, node: RadixNode) -> None:
        """Mark a cached node as referenced again."""
        node.is_cached = False

    def evict(self) -> int | None:
        """Remove the least recently used cached leaf. Return its block, or None.

        Leaves that are not `is_expected` are removed first.
        """
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if _is_current(entry):
                node = entry[-1]
                self.remove(node)
                return node.block
        return None

    def _push(self, node: RadixNode) -> None:
        if len(self._leaves) > 2 * len(self.node_of) + 64:
            current = {id(entry[-1]): entry for entry in self._leaves if _is_current(entry)}
            self._leaves = list(current.values())
            heapq.heapify(self._leaves)
        self._clock += 1
        heapq.heappush(self._leaves, (node.is_expected, node.last_use, self._clock, node))

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node except the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self) -> None:
        """Assert the tree's invariants. Linear in its size."""
        assert all(root.children for root in self._roots.values()), "the tree has an empty root"
        for node in self.nodes():
            self._check_node(node)
        num_nodes = sum(1 for _ in self.nodes())
        assert num_nodes == sum(node is not None for node in self.node_of), "a node is detached"
        queued = {id(entry[-1]) for entry in self._leaves if _is_current(entry)}
        assert all(id(node) in queued for node in self.nodes() if _is_evictable(node))

    def _check_node(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        assert self.node_of[node.block] is node, "the entry of a block in `node_of` is not its node"
        assert parent.children[node.key] is node
        if parent.parent is not None:
            assert parent.is_retained or not node.is_retained, "the parent is not retained"
            assert parent.is_expected or not node.is_expected, "the parent is not expected"
            assert node.is_cached or not parent.is_cached, "a referenced node under a cached one"
        assert node.is_retained or not node.is_cached, "a node is cached but not retained"


def _is_evictable(node: RadixNode) -> bool:
    return node.is_cached and not node.children


def _is_current(entry: tuple[bool, int, int, RadixNode]) -> bool:
    _, last_use, _, node = entry
    return _is_evictable(node) and node.last_use == last_use
