"""Reference counts and prefix tree over the same blocks, kept consistent.

A block that loses its last reader becomes cached if its tree node is retained, and free
otherwise. Allocation uses free blocks first, then evicts cached leaves: leaves without expected
readers before the others, the least recently used first.

Out of scope: contexts; a reader of a block is only a reference count.

Invariants: a node is cached if and only if its block has no reference. The source of a copy
is not reallocated before `unpin`.
"""

from __future__ import annotations

from ..core.context import CACHED, SHARED
from .block_allocator import BlockAllocator
from .radix_tree import RadixNode, RadixTree


class BlockCache:
    """A block allocator and a prefix tree over the same blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockAllocator(num_blocks)
        self.tree = RadixTree(num_blocks)
        self._pinned: set[int] = set()
        self._deferred: list[int] = []
        """Pinned blocks that become free on `unpin`."""

    def allocate(self, after: int = -1, num_wanted: int = 1) -> int | None:
        """Return a block with one reference, evicting cached blocks if needed, or None.

        For the arguments see `BlockAllocator.allocate`. All `num_wanted` blocks are evicted before
        the first is allocated: leaves are evicted in descending order, so allocating each one
        as it becomes free would reverse the order of the blocks.
        """
        while self.pool.num_free < num_wanted and (cached := self.tree.evict()) is not None:
            self.pool.uncache(cached)
            self._free(cached)
        return self.pool.allocate(after, num_wanted)

    def acquire(self, node: RadixNode) -> int:
        """Add a reference to a node's block. Return how its tokens count: CACHED or SHARED."""
        if node.is_cached:
            self.tree.mark_referenced(node)
            self.pool.retain_cached(node.block)
            return CACHED
        self.pool.retain(node.block)
        return SHARED

    def release(self, block: int) -> None:
        """Remove a reference. Without any, the block becomes cached or free.

        A context releases its blocks from last to first, so the tree only loses leaves.
        """
        if not self.pool.release(block):
            return
        node = self.tree.node_of[block]
        if node is not None and node.is_retained:
            self.tree.mark_cached(node)
            self.pool.mark_cached(block)
            return
        if node is not None:
            self.tree.remove(node)
        self._free(block)

    def clear(self) -> None:
        """Evict all cached blocks."""
        while (cached := self.tree.evict()) is not None:
            self.pool.uncache(cached)
            self._free(cached)

    def pin(self, block: int) -> None:
        """Preserve a block's content until `unpin`, even if its last reference is released."""
        self._pinned.add(block)

    def unpin(self) -> None:
        """Unpin all blocks and free those that were released meanwhile."""
        self._pinned.clear()
        for block in self._deferred:
            self.pool.free(block)
        self._deferred.clear()

    def check(self) -> None:
        """Assert the invariants of allocator, tree and both together, between steps."""
        self.pool.check()
        self.tree.check()
        nodes = list(self.tree.nodes())
        assert sum(node.is_cached for node in nodes) == self.pool.num_cached
        assert all((self.pool.refs[n.block] == 0) == n.is_cached for n in nodes)

    def _free(self, block: int) -> None:
        if block in self._pinned:
            self._deferred.append(block)
        else:
            self.pool.free(block)
