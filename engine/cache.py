"""Blocks with a memory: reference counts and the prefix tree, kept in step.

A block that loses its last reader becomes cache if the tree is to keep its node, and free
otherwise; free blocks are handed out first, then cached ones, least recently used leaf first.

Knows blocks and nodes. Refuses to know contexts: who holds a block is a number. Kept true:
a node is cached if and only if nobody refers to its block; the source of a copy is not
handed out again before `unpin`.
"""

from __future__ import annotations

from .context import CACHED, SHARED
from .pool import BlockPool
from .radix import Node, RadixTree


class BlockCache:
    """A pool and a tree over the same blocks."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with every block free."""
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(num_blocks)
        self._pinned: set[int] = set()
        self._deferred: list[int] = []

    def take(self, behind: int = -1, wanted: int = 1) -> int | None:
        """Return a block with one reference, evicting cache if need be; None without any.

        Room for all that is wanted is made first: leaves go backwards, and what is taken
        one by one as it becomes free would lie backwards. For the arguments see the pool.
        """
        while self.pool.num_free < wanted and (cached := self.tree.evict()) is not None:
            self.pool.forget(cached)
            self._put_back(cached)
        return self.pool.take(behind, wanted)

    def hold(self, node: Node) -> int:
        """Add a reference to a node's block; return how its tokens count."""
        if node.is_cached:
            self.tree.revive(node)
            self.pool.revive(node.block)
            return CACHED
        self.pool.retain(node.block)
        return SHARED

    def drop(self, block: int) -> None:
        """Remove a reference; the last one leaves a cached or a free block behind.

        A context drops the blocks behind before the blocks in front: the tree loses leaves.
        """
        if not self.pool.drop(block):
            return
        node = self.tree.node_of[block]
        if node is not None and node.is_kept:
            self.tree.store(node)
            self.pool.store(block)
            return
        if node is not None:
            self.tree.remove(node)
        self._put_back(block)

    def clear(self) -> None:
        """Forget all that is cached."""
        while (cached := self.tree.evict()) is not None:
            self.pool.forget(cached)
            self._put_back(cached)

    def pin(self, block: int) -> None:
        """Keep a block's content until `unpin`, whoever drops it."""
        self._pinned.add(block)

    def unpin(self) -> None:
        """Let all pinned blocks go their way."""
        self._pinned.clear()
        for block in self._deferred:
            self.pool.put_back(block)
        self._deferred.clear()

    def check(self) -> None:
        """Assert the invariants of pool, tree and both together, between steps."""
        self.pool.check()
        self.tree.check()
        nodes = list(self.tree.nodes())
        assert sum(node.is_cached for node in nodes) == self.pool.num_cached
        assert all((self.pool.refs[n.block] == 0) == n.is_cached for n in nodes)

    def _put_back(self, block: int) -> None:
        if block in self._pinned:
            self._deferred.append(block)
        else:
            self.pool.put_back(block)
