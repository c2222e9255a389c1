"""The KV manager: allocates, shares, preempts and releases the blocks of contexts.

Reuse. A context gets KV without computing it in three ways, tried in this order:

1. *Prefix tree.* Full blocks with the same tokens after the same prefix under the same salt,
   whether another context refers to them, only the cache does, or an earlier row of the same
   step will compute them.
2. *The parent's partial block.* A fork shares the block. The first context that writes to a
   shared block gets a copy (copy on write).
3. *Waiting.* A fork skips the step if its parent is about to compute the missing tokens. If
   the fork has the higher priority, it computes them, and the parent shares the result.

Eviction. When no block is free, cached blocks are evicted first: leaves without expected readers
before the others, the least recently used first. Then contexts lose blocks (see `eviction`). A
context that loses KV keeps its ids and recomputes them when it is scheduled again. An idle context
is not recomputed. Instead, when a fork ends, the KV that the fork had to recompute is shared with
the context it was forked from.

Writes. A row writes only to blocks that no other context refers to and that the tree does not
hold for others; any other block is copied first. Exception: a context that needs the logits of
its last token again rewrites the same token after the same prefix, in a block with no other
reader. A block allocated or completed in a step is *unwritten* until the step is over, and is
never the source of a copy. The source of a copy is not reallocated before the step is started.
So no block is both source and destination in one step, and its copies may run in any order.

Out of scope: token budgets, sampling, text.

Invariants between steps: see `check`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..core.context import Context, EngineCounters
from ..protocol import Free
from .block_cache import BlockCache
from .eviction import VictimQueue
from .prefix_sharing import PrefixSharing, ancestor, limit_depth
from .radix_tree import RadixNode

_NO_STEP: Final = -2
"""A step number that no context was ever scheduled in."""


class KVCacheManager:
    """Allocates blocks to contexts and takes them back.

    Call order: `begin_step`; `match_prefix` and `allocate` per context; `seal_step`. When the
    step is over: `commit` per context; `end_step`.
    """

    def __init__(self, num_blocks: int, block_size: int, counters: EngineCounters) -> None:
        """Start with every block free; `counters` counts the tokens whose KV is reused."""
        self._cache = BlockCache(num_blocks)
        self.pool = self._cache.pool
        self.block_size = block_size
        self.copies: list[tuple[int, int]] = []
        """(source, destination) blocks that the runner must copy before this step."""
        self._holders: set[Context] = set()
        """All contexts with blocks."""
        self._unwritten: set[int] = set()
        self._rewritten: set[int] = set()
        """Blocks that this step does not fill, but that become invalid if it fails: it runs their
        last token again, or the previous step, which is still in flight, fills them."""
        self._sharing = PrefixSharing(
            self._cache, block_size, counters, holders=self._holders, unwritten=self._unwritten
        )
        self._victims = VictimQueue(self.pool.refs)
        self._release_after_step: list[Context] = []
        """Contexts that the server has freed, and that the current step still computes."""
        self._num_begun = 0
        """Number of calls of `begin_step`. A step without rows is not started, but contexts may be
        marked with its number."""
        self._step = _NO_STEP

    def begin_step(self) -> None:
        """Start allocating for a step.

        A context that allocates in this step is not preempted during it.
        """
        self._num_begun += 1
        self._step = self._num_begun

    def seal_step(self) -> set[int]:
        """End allocation, once the step is started. Return the blocks that the step writes.

        Steps take effect in the order in which they are started. So the next step may read these
        blocks, and may overwrite the blocks that this step reads.
        """
        self._step = _NO_STEP
        self.copies.clear()
        self._victims.reset()
        self._cache.unpin()
        written = self._unwritten | self._rewritten
        self._unwritten.clear()
        self._rewritten.clear()
        return written

    def end_step(self) -> None:
        """Release the contexts that were freed while the step ran."""
        for context in self._release_after_step:
            if not context.is_released:
                self.release(context, context.pending_free)
        self._release_after_step.clear()

    def match_prefix(self, context: Context) -> bool:
        """Share existing KV with a context. Return False if it should wait for its parent."""
        self._sharing.match(context)
        parent = context.parent
        if parent is None:
            return True
        if not parent.is_released:
            self._sharing.share_partial_block(context, parent)
            if (
                max(context.num_computed, parent.num_computed) < context.parent_len
                and parent.has_work
                and not parent.is_blocked
                and parent.is_before(context)
            ):
                return False
        self.detach(context)
        return True

    def allocate(self, context: Context, begin: int, end: int) -> int:
        """Allocate writable blocks for positions `begin` to `end`.

        Contexts with a lower priority may be preempted. New full blocks are in the prefix tree
        at once, so that later rows of the same step share them.

        Returns:
            The position where the allocated blocks end; `begin` if there are none.
        """
        context.step = self._step
        blocks = context.blocks
        first = begin // self.block_size
        if first < len(blocks) and not self._make_writable(context, first):
            return begin
        if begin < context.num_computed:
            self._rewritten.add(blocks[first])
        while (num_missing := -(-end // self.block_size) - len(blocks)) > 0:
            block = self._allocate_block(context, blocks[-1] if blocks else -1, num_missing)
            if block is None:
                end = len(blocks) * self.block_size
                break
            self._holders.add(context)
            blocks.append(block)
        # A block whose last token is not sampled yet has no key.
        num_known = min(end, len(context.ids))
        if num_known // self.block_size > context.depth:
            depth = context.depth
            self._sharing.register(context, num_known, is_computed=False)
            # The step in flight writes the blocks before `begin`, so this step can read them.
            earlier = blocks[depth : min(context.depth, begin // self.block_size)]
            self._unwritten.difference_update(earlier)
            self._rewritten.update(earlier)
        return max(begin, end)

    def fits(self, context: Context, end: int) -> bool:
        """Return whether a context can grow to `end` without taking blocks from another context."""
        # One more for the copy of a shared block. Sources of copies are not available until the
        # start.
        num_blocks = max(0, -(-end // self.block_size) - len(context.blocks)) + 1
        return num_blocks + len(self.copies) <= self.pool.num_free + self.pool.num_cached

    def commit(self, context: Context) -> None:
        """Register the full blocks that a context has computed."""
        if context.num_computed // self.block_size > context.depth:
            self._sharing.register(context, context.num_computed, is_computed=True)

    def rollback(self, written: set[int]) -> None:
        """Discard all blocks that a failed step should have written.

        Contexts with such a block lose all KV and recompute it from their ids. The cache is
        cleared, too: blocks of this step may have been released to it while the step ran.
        """
        for context in list(self._holders):
            if not written.isdisjoint(context.blocks):
                self._release_kv(context)
        self._cache.clear()

    def fork(self, context: Context, parent: Context, parent_len: int) -> None:
        """Share the parent's computed tokens with a new context, which waits for the rest."""
        if context.salt != parent.salt:
            return
        context.origin, context.origin_len = parent, parent_len
        num_shared = self._sharing.fork(context, parent, parent_len)
        if num_shared < parent_len and parent.has_work:
            context.parent = parent
            context.parent_len = parent_len
            parent.num_waiting_forks += 1

    def detach(self, context: Context) -> None:
        """Stop waiting for the parent. Without a parent, do nothing."""
        while (parent := context.parent) is not None:
            context.parent = None
            parent.num_waiting_forks -= 1
            if parent.pending_free is None or parent.num_waiting_forks:
                return
            # The server has freed the parent, and this was the last fork that waited for it.
            if parent.step == self._step:
                self._release_after_step.append(parent)
                return
            self._end(parent, parent.pending_free)
            context = parent

    def release(self, context: Context, command: Free | None = None) -> None:
        """End a context. The KV that the command names stays cached."""
        self._end(context, command)
        self.detach(context)

    def truncate(self, context: Context, length: int) -> None:
        """Release the KV of the tokens from position `length` on, if there is any.

        Blocks of a step in flight are kept; `trim` follows when the step is over.
        """
        limit_depth(context, length // self.block_size)
        if length < context.num_computed:
            context.num_computed = length
            self.trim(context)

    def trim(self, context: Context) -> None:
        """Release the blocks after the last computed token, if there are any."""
        limit_depth(context, context.num_computed // self.block_size)
        self._release_blocks(context, -(-context.num_computed // self.block_size))

    def check(self, contexts: Iterable[Context], in_flight: Iterable[Context] = ()) -> None:
        """Assert the invariants that hold between steps.

        Args:
            contexts: All contexts that are not released.
            in_flight: Contexts of the step in flight, which have blocks for it.
        """
        running = set(in_flight)
        self._cache.check()
        refs = [0] * self.pool.num_blocks
        for context in contexts:
            self._check_context(context, is_in_flight=context in running)
            for block in context.blocks:
                refs[block] += 1
        assert refs == self.pool.refs, "reference counts do not match the contexts' blocks"

    def _check_context(self, context: Context, *, is_in_flight: bool) -> None:
        size = self.block_size
        num_blocks = -(-context.num_computed // size)
        num_full = context.num_computed // size
        if is_in_flight:
            assert len(context.blocks) >= num_blocks
            assert num_full - 1 <= context.depth <= len(context.blocks)
        else:
            assert len(context.blocks) == num_blocks
            assert context.depth == num_full
        assert (context in self._holders) == bool(context.blocks)
        assert context.num_computed <= len(context.ids)
        node = context.node
        for index in range(context.depth - 1, -1, -1):
            assert node is not None
            assert node.block == context.blocks[index], (
                "the block table does not match the tree's path"
            )
            assert node.key == tuple(context.ids[index * size : (index + 1) * size])
            node = node.parent
        assert node is None or (node.parent is None and node.salt == context.salt)

    def _make_writable(self, context: Context, index: int) -> bool:
        """Give a context its own copy of a block if others read it.

        Return False if no block is free.
        """
        block = context.blocks[index]
        refs, node = self.pool.refs, self._cache.tree.node_of[block]
        if refs[block] == 1 and (node is None or index < context.depth):
            return True
        if refs[block] > 1 or (node is not None and node.is_retained):
            target = self._allocate_block(context)
            if target is not None:
                self._copy(context, index, target)
                return True
            if refs[block] > 1:
                return False
        if node is not None and index >= context.depth:
            # No other context reads the block or a successor of it: remove it from the tree.
            self._cache.tree.remove(node)
        return True

    def _copy(self, context: Context, index: int, target: int) -> None:
        """Replace a block of the table by a copy of it."""
        block = context.blocks[index]
        assert block not in self._unwritten
        self.copies.append((block, target))
        self._cache.pin(block)
        context.blocks[index] = target
        limit_depth(context, index)
        self._cache.release(block)

    def _allocate_block(self, context: Context, after: int = -1, num_wanted: int = 1) -> int | None:
        """Return a new block, taking blocks from other contexts if needed, or None."""
        while (block := self._cache.allocate(after, num_wanted)) is None:
            victim = self._victims.next_victim(context, self._holders, self._step)
            if victim is None:
                return None
            self._shorten(victim, num_wanted)
        self._unwritten.add(block)
        return block

    def _shorten(self, victim: Context, num_wanted: int) -> None:
        """Shorten a context by up to `num_wanted` blocks that no other context reads.

        Shared blocks at its end are released first and are not counted.
        """
        num_released = 0
        while victim.blocks and num_released < num_wanted:
            is_shared = self.pool.refs[victim.blocks[-1]] > 1
            if is_shared and num_released:
                break
            num_released += not is_shared
            self.truncate(victim, (len(victim.blocks) - 1) * self.block_size)

    def _release_kv(self, context: Context) -> None:
        self._release_blocks(context, 0)
        context.num_computed = 0
        context.node = None
        context.depth = 0

    def _release_blocks(self, context: Context, first: int) -> None:
        """Release the blocks of a table from index `first` on, last block first."""
        for block in reversed(context.blocks[first:]):
            self._cache.release(block)
        del context.blocks[first:]
        if not context.blocks:
            self._holders.discard(context)

    def _restore_to_origin(self, context: Context) -> None:
        """Share KV that a fork had to recompute with the idle context it was forked from.

        Later forks of that context reuse the KV.
        """
        origin, length = context.origin, context.origin_len
        while origin is not None and origin.is_released:
            length = min(length, origin.origin_len)
            origin = origin.origin
        # Forks of this context find their nearest live ancestor through its `origin`.
        context.origin, context.origin_len = origin, length
        if origin is None or origin.has_work:
            return
        if origin.num_computed < min(length, context.num_computed):
            self._sharing.match(origin)

    def _node_at(self, context: Context, num_tokens: int) -> RadixNode | None:
        """Return the node of the last full block of a context's first tokens, if it has KV."""
        return ancestor(context.node, max(0, context.depth - num_tokens // self.block_size))

    def _end(self, context: Context, command: Free | None) -> None:
        """Retain the prefix that stays cached, and release all blocks."""
        self._restore_to_origin(context)
        if command is not None:
            node = self._node_at(context, command.num_cached_tokens)
            while node is not None and not node.is_retained:
                node.is_retained = True
                node = ancestor(node, 1)
            num_expected = min(command.num_expected_tokens, command.num_cached_tokens)
            node = self._node_at(context, num_expected)
            while node is not None and not node.is_expected:
                node.is_expected = True
                node = ancestor(node, 1)
        self._release_kv(context)
        context.is_released = True
