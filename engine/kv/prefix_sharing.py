"""Finds KV that exists for a context's tokens, and registers new KV for others to find.

Out of scope: allocation. A context gains blocks here only by sharing existing ones.
"""

from __future__ import annotations

from ..core.context import CACHED, SHARED, Context, EngineCounters
from .block_cache import BlockCache
from .radix_tree import RadixNode


class PrefixSharing:
    """Shares blocks between contexts with equal prefixes."""

    def __init__(
        self,
        cache: BlockCache,
        block_size: int,
        counters: EngineCounters,
        *,
        holders: set[Context],
        unwritten: set[int],
    ) -> None:
        """Both sets belong to the KV manager.

        Args:
            cache: All blocks, and the prefix tree.
            block_size: Tokens of a block.
            counters: Counts the tokens whose KV was reused.
            holders: All contexts with blocks; contexts that gain blocks are added.
            unwritten: Blocks that a step not yet started will write; new ones are added.
        """
        self._cache = cache
        self._tree = cache.tree
        self._block_size = block_size
        self._counters = counters
        self._holders = holders
        self._unwritten = unwritten

    def match(self, context: Context) -> None:
        """Share the full blocks that the tree has for the tokens after `context.depth`."""
        ids, blocks, size = context.ids, context.blocks, self._block_size
        node = context.node or self._tree.root(context.salt)
        depth = context.depth
        while (depth + 1) * size <= len(ids):
            child = node.children.get(tuple(ids[depth * size : (depth + 1) * size]))
            if child is None:
                break
            is_last = context.generation is not None and (depth + 1) * size == len(ids)
            if is_last and child.block in self._unwritten:
                # The last token runs again for its logits, in a copy of this block, which has
                # no content to copy yet.
                break
            source = self._cache.acquire(child)
            if depth < len(blocks):
                self._cache.release(blocks[depth])
                blocks[depth] = child.block
            else:
                blocks.append(child.block)
            node, depth = child, depth + 1
            context.node, context.depth = node, depth
            self._count(context, source, max(context.num_computed, depth * size))
        if blocks:
            self._holders.add(context)

    def fork(self, context: Context, parent: Context, parent_len: int) -> int:
        """Share what a parent has computed of the first `parent_len` tokens.

        Returns:
            The number of shared tokens.
        """
        num_shared = min(parent.num_computed, parent_len)
        depth = num_shared // self._block_size
        if depth > parent.depth:
            # A step in flight runs the parent's last token again, in a separate block.
            depth = parent.depth
            num_shared = depth * self._block_size
        if num_shared:
            self._holders.add(context)
            for block in parent.blocks[: -(-num_shared // self._block_size)]:
                self._cache.pool.retain(block)
                context.blocks.append(block)
            context.node = ancestor(parent.node, parent.depth - depth)
            context.depth = depth
            self._count(context, SHARED, num_shared)
        return num_shared

    def share_partial_block(self, context: Context, parent: Context) -> None:
        """Share the parent's partial block if it has more of the next tokens than the context."""
        index, size = context.depth, self._block_size
        begin = index * size
        end = min(parent.num_computed, context.parent_len, begin + size)
        if end <= context.num_computed or parent.depth < index:
            return
        if end == begin + size:
            return  # A full block is shared through the tree once no step in flight rewrites it.
        block = parent.blocks[index]
        if block in self._unwritten or parent.ids[begin:end] != context.ids[begin:end]:
            return
        if index and ancestor(parent.node, parent.depth - index) is not context.node:
            return
        self._cache.pool.retain(block)
        if index < len(context.blocks):
            self._cache.release(context.blocks[index])
            context.blocks[index] = block
        else:
            context.blocks.append(block)
        self._holders.add(context)
        self._count(context, SHARED, end)

    def register(self, context: Context, end: int, *, is_computed: bool) -> None:
        """Insert the full blocks before position `end` into the tree.

        The tree may already have a block for the same tokens, if two contexts arrived at the
        same text. A computed block is then replaced by the tree's block. A block that is not
        computed yet cannot be replaced, and registration stops there.
        """
        ids, blocks, size = context.ids, context.blocks, self._block_size
        node = context.node or self._tree.root(context.salt)
        for index in range(context.depth, end // size):
            key = tuple(ids[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = self._tree.insert(node, key, blocks[index])
                if not is_computed:
                    self._unwritten.add(child.block)
            elif not is_computed:
                break
            elif child.block != blocks[index]:
                self._cache.acquire(child)
                self._cache.release(blocks[index])
                blocks[index] = child.block
            node = child
            context.node, context.depth = node, index + 1

    def _count(self, context: Context, source: int, end: int) -> None:
        """Advance `num_computed` to `end` over reused tokens, and count them by source."""
        # The last token of a generating context always goes through the model.
        counted_end = end - (context.generation is not None and end == len(context.ids))
        num_counted = context.count_reused(source, context.num_computed, counted_end)
        context.num_computed = end
        if source == CACHED:
            self._counters.cached += num_counted
        else:
            self._counters.shared += num_counted


def ancestor(node: RadixNode | None, num_levels: int) -> RadixNode | None:
    """Return the node that many levels up, or None for the root."""
    for _ in range(num_levels):
        assert node is not None
        node = node.parent
    return None if node is None or node.parent is None else node


def limit_depth(context: Context, depth: int) -> None:
    """Move a context up its path in the tree until at most `depth` blocks are on it."""
    if depth < context.depth:
        context.node = ancestor(context.node, context.depth - depth)
        context.depth = depth
