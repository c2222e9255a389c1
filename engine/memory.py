"""The KV memory of contexts: who shares which block with whom, and who has to leave.

Three ways to come by KV without computing it, tried in this order:

1. *The tree.* Full blocks with the same tokens after the same prefix under the same salt,
   whether another context holds them, only the cache does, or an earlier row of this very
   step is about to compute them.
2. *The parent's partial block.* A fork refers to it as it is; who writes into it next while
   others refer to it gets a copy of its own first (copy on write).
3. *Waiting.* A fork whose parent is about to compute what it lacks sits the step out,
   unless it is served before its parent: then it computes, and the parent shares.

When blocks run out: cached blocks go first, least recently used leaf first; then the ends of
idle contexts, farthest next use first and no more than is needed; then contexts with work,
whole, worst first, and only for a better one. Whoever leaves keeps its ids and is computed
again when its turn comes. An idle context is never computed again for itself: what a fork of
it had to make anew is handed back to it when the fork ends.

Writing. A row writes only into blocks that no other context refers to and that the tree
does not name for others: such a block is copied first. The one write into a block that the
tree names is the last token of a context that wants its logits again: the same token after
the same prefix, with no other reader. What a step makes exists only when it is over: a block
taken in it, or filled up in it, is `unmade` until then and never the source of a copy; and a
source that loses its last reader is not taken again before the end of the step. Hence no
block is both source and destination in one step: copies may be made in any order, or at once.

Knows contexts, blocks and tokens. Refuses to know budgets, sampling and text. Kept true
between steps: see `check`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from .cache import BlockCache
from .context import CACHED, SHARED, Context, Totals
from .radix import Node

_BETWEEN: Final = -2
"""The number of no step: no context was ever scheduled in it."""


class KVMemory:
    """Gives blocks to contexts and takes them away."""

    def __init__(self, num_blocks: int, block_size: int, totals: Totals) -> None:
        """Begin with every block free; `totals` is where taken tokens are counted."""
        self._cache = BlockCache(num_blocks)
        self.pool = self._cache.pool
        self._tree = self._cache.tree
        self.block_size = block_size
        self.copies: list[tuple[int, int]] = []
        """(source, destination) of this step, for the runner."""
        self._totals = totals
        self._holders: set[Context] = set()
        self._unmade: set[int] = set()
        self._rewritten: set[int] = set()
        """Blocks whose last token is run once more in this step."""
        self._orphans: list[Context] = []
        self._victims: list[Context] | None = None
        self._spared: list[Context] = []
        """Idle victims whose blocks others read: taking these gives no room yet."""
        self._step = _BETWEEN

    # A step: begin_step, attach and reserve per context, launch; settle per context, end_step.

    def begin_step(self, number: int) -> None:
        """Start to hand out blocks; contexts whose `step` is `number` will not be moved."""
        self._step = number

    def launch(self) -> set[int]:
        """Let go of what was held until the step is started; return the blocks that it makes.

        Steps take effect in the order in which they are started. So to the next one these
        blocks hold what they should, and what this one reads may be written over.
        """
        self._step = _BETWEEN
        self.copies.clear()
        self._victims = None
        self._spared.clear()
        self._cache.unpin()
        unmade = self._unmade | self._rewritten
        self._unmade, self._rewritten = set(), set()
        return unmade

    def end_step(self) -> None:
        """Let go of what was held until the step was over."""
        for context in self._orphans:
            if not context.is_released:
                self.release(context, context.keep or 0)
        self._orphans.clear()

    def attach(self, context: Context) -> bool:
        """Take KV that exists for a context; False where it should wait for its parent."""
        self._match(context)
        parent = context.parent
        if parent is None:
            return True
        if not parent.is_released:
            self._share_partial(context, parent)
            lacks = context.num_computed < context.parent_len
            is_coming = parent.has_work and parent.num_computed < context.parent_len
            is_coming = is_coming and not parent.is_held
            if lacks and is_coming and parent.is_before(context):
                return False
        self.detach(context)
        return True

    def reserve(self, context: Context, begin: int, end: int) -> int:
        """Make room to write positions `begin` to `end`; return where the room ends.

        Takes from others whatever `context` may take from them; returns `begin` where that
        is nothing. New full blocks are in the tree at once, for the rows that follow.
        """
        context.step = self._step
        blocks = context.blocks
        first = begin // self.block_size
        if first < len(blocks) and not self._make_writable(context, first):
            return begin
        if begin < context.num_computed:
            self._rewritten.add(context.blocks[first])
        while (missing := -(-end // self.block_size) - len(blocks)) > 0:
            block = self._take(context, blocks[-1] if blocks else -1, missing)
            if block is None:
                end = len(blocks) * self.block_size
                break
            self._holders.add(context)
            blocks.append(block)
        # A block whose last token is still to be sampled has no name yet.
        known = min(end, len(context.ids))
        if known // self.block_size > context.depth:
            self._register(context, known, is_computed=False)
        return max(begin, end)

    def settle(self, context: Context) -> None:
        """Note that all a context has reserved is computed."""
        if context.num_computed // self.block_size > context.depth:
            self._register(context, context.num_computed, is_computed=True)

    def undo(self, unmade: set[int]) -> None:
        """Take back every block whose content a failed step should have made.

        Contexts with such a block lose all KV. Their ids stay: they are computed again. The
        cache goes too, for some of it may have been freed while the step ran.
        """
        for context in list(self._holders):
            if not unmade.isdisjoint(context.blocks):
                self.evict(context)
        self._cache.clear()

    # Between steps.

    def fork(self, context: Context, parent: Context, parent_len: int) -> None:
        """Let a new context share what its parent has computed, and wait for the rest."""
        if context.salt != parent.salt:
            return
        context.origin, context.origin_len = parent, parent_len
        num_shared = min(parent.num_computed, parent_len)
        depth = num_shared // self.block_size
        if depth > parent.depth:
            # A step on its way runs the parent's last token again, in a block of its own.
            depth = parent.depth
            num_shared = depth * self.block_size
        if num_shared:
            self._holders.add(context)
            for block in parent.blocks[: -(-num_shared // self.block_size)]:
                self.pool.retain(block)
                context.blocks.append(block)
            context.node = _ancestor(parent.node, parent.depth - depth)
            context.depth = depth
            self._took(context, SHARED, num_shared)
        if num_shared < parent_len and parent.has_work:
            context.parent = parent
            context.parent_len = parent_len
            parent.num_waiting += 1

    def detach(self, context: Context) -> None:
        """Stop waiting for the parent; without one nothing happens."""
        while (parent := context.parent) is not None:
            context.parent = None
            parent.num_waiting -= 1
            if parent.keep is None or parent.num_waiting:
                return
            # The server freed the parent before; this was the last one that waited for it.
            if parent.step == self._step:
                self._orphans.append(parent)
                return
            self._end(parent, parent.keep)
            context = parent

    def release(self, context: Context, keep: int = 0) -> None:
        """End a context: its first `keep` tokens stay as cache, as far as they have KV."""
        self._end(context, keep)
        self.detach(context)

    def evict(self, context: Context) -> None:
        """Take all KV from a context; safe without any."""
        self._holders.discard(context)
        for block in reversed(context.blocks):
            self._cache.drop(block)
        context.blocks.clear()
        context.num_computed = 0
        context.node = None
        context.depth = 0

    def truncate(self, context: Context, length: int) -> None:
        """Give up the KV of the tokens from position `length` on; safe without any."""
        if length >= context.num_computed:
            return
        context.num_computed = length
        depth = length // self.block_size
        if depth < context.depth:
            context.node = _ancestor(context.node, context.depth - depth)
            context.depth = depth
        self.trim(context)

    def trim(self, context: Context) -> None:
        """Give up the blocks behind the last computed token; safe without any."""
        num_blocks = -(-context.num_computed // self.block_size)
        for block in reversed(context.blocks[num_blocks:]):
            self._cache.drop(block)
        del context.blocks[num_blocks:]
        if not context.blocks:
            self._holders.discard(context)

    @property
    def num_spare(self) -> int:
        """Blocks that can be taken from no context."""
        return self.pool.num_free + self.pool.num_cached

    def check(self, contexts: Iterable[Context], flying: Iterable[Context] = ()) -> None:
        """Assert what holds between steps.

        Args:
            contexts: All that are not released.
            flying: Those of a step on its way, for which blocks are reserved.
        """
        early = set(flying)
        self._cache.check()
        refs = [0] * self.pool.num_blocks
        for context in contexts:
            num_blocks = -(-context.num_computed // self.block_size)
            num_full = context.num_computed // self.block_size
            if context in early:
                assert len(context.blocks) >= num_blocks
                assert num_full - 1 <= context.depth <= len(context.blocks)
            else:
                assert len(context.blocks) == num_blocks
                assert context.depth == num_full
            assert (context in self._holders) == bool(context.blocks)
            assert context.num_computed <= len(context.ids)
            for block in context.blocks:
                refs[block] += 1
            node = context.node
            for index in range(context.depth - 1, -1, -1):
                assert node is not None
                assert node.block == context.blocks[index], "a context left the tree's path"
                size = self.block_size
                assert node.key == tuple(context.ids[index * size : (index + 1) * size])
                node = node.parent
            assert node is None or (node.parent is None and node.salt == context.salt)
        assert refs == self.pool.refs, "references are not those of the contexts"

    # Sharing.

    def _match(self, context: Context) -> None:
        """Take up the full blocks that the tree has for the tokens after `depth`."""
        ids, blocks, size = context.ids, context.blocks, self.block_size
        node = context.node or self._tree.root(context.salt)
        depth = context.depth
        while (depth + 1) * size <= len(ids):
            child = node.children.get(tuple(ids[depth * size : (depth + 1) * size]))
            if child is None:
                break
            is_last = context.generation is not None and (depth + 1) * size == len(ids)
            if is_last and child.block in self._unmade:
                # The last token is to be run again for its logits, which needs a copy of
                # this block; it has no content yet to copy.
                break
            kind = self._cache.hold(child)
            if depth < len(blocks):
                self._cache.drop(blocks[depth])
                blocks[depth] = child.block
            else:
                blocks.append(child.block)
            node, depth = child, depth + 1
            context.node, context.depth = node, depth
            self._took(context, kind, max(context.num_computed, depth * size))
        if blocks:
            self._holders.add(context)

    def _share_partial(self, context: Context, parent: Context) -> None:
        """Refer to the parent's block that holds more of the next tokens than our own."""
        index, size = context.depth, self.block_size
        begin = index * size
        end = min(parent.num_computed, context.parent_len, begin + size)
        if end <= context.num_computed or parent.depth < index:
            return
        block = parent.blocks[index]
        if block in self._unmade or parent.ids[begin:end] != context.ids[begin:end]:
            return
        if index and _ancestor(parent.node, parent.depth - index) is not context.node:
            return
        self.pool.retain(block)
        if index < len(context.blocks):
            self._cache.drop(context.blocks[index])
            context.blocks[index] = block
        else:
            context.blocks.append(block)
        self._holders.add(context)
        self._took(context, SHARED, end)

    def _took(self, context: Context, kind: int, end: int) -> None:
        """Move `num_computed` over tokens taken from elsewhere, and count them."""
        # The last token of a generating context goes through the model whatever is shared.
        counted = end - (context.generation is not None and end == len(context.ids))
        num = context.count_taken(kind, context.num_computed, counted)
        context.num_computed = end
        if kind == CACHED:
            self._totals.cached += num
        else:
            self._totals.shared += num

    def _register(self, context: Context, end: int, *, is_computed: bool) -> None:
        """Put the full blocks before `end` into the tree.

        Where the tree has a block for the same tokens already, computed ones are exchanged
        for it (two contexts came to the same text); those to be written now have to wait.
        """
        ids, blocks, size = context.ids, context.blocks, self.block_size
        node = context.node or self._tree.root(context.salt)
        for index in range(context.depth, end // size):
            key = tuple(ids[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = self._tree.insert(node, key, blocks[index])
                if not is_computed:
                    self._unmade.add(child.block)
            elif not is_computed:
                break
            elif child.block != blocks[index]:
                self._cache.hold(child)
                self._cache.drop(blocks[index])
                blocks[index] = child.block
            node = child
            context.node, context.depth = node, index + 1

    def _make_writable(self, context: Context, index: int) -> bool:
        """Make a block of the table this context's alone; False where no block can be had."""
        block = context.blocks[index]
        refs, node = self.pool.refs, self._tree.node_of[block]
        if refs[block] == 1 and (node is None or index < context.depth):
            return True
        if refs[block] > 1 or (node is not None and node.is_kept):
            target = self._take(context)
            if target is not None:
                self._copy(context, index, target)
                return True
            if refs[block] > 1:
                return False
        if node is not None and index >= context.depth:
            # Nobody else reads it, nor what follows it: the tree forgets what it held.
            self._tree.remove(node)
        return True

    def _copy(self, context: Context, index: int, target: int) -> None:
        """Exchange a block of the table for a copy of it."""
        block = context.blocks[index]
        assert block not in self._unmade
        self.copies.append((block, target))
        self._cache.pin(block)
        context.blocks[index] = target
        if index < context.depth:
            assert context.node is not None
            context.depth = index
            context.node = _ancestor(context.node, 1)
        self._cache.drop(block)

    # Blocks coming and going.

    def _take(self, context: Context, behind: int = -1, wanted: int = 1) -> int | None:
        """Return a block, taken from cache or from others if need be; None without any."""
        while (block := self._cache.take(behind, wanted)) is None:
            victim = self._next_victim(context)
            if victim is None:
                return None
            if victim.has_work:
                self.evict(victim)
            else:
                self._shorten(victim)
        self._unmade.add(block)
        return block

    def _shorten(self, victim: Context) -> None:
        """Take blocks from the end of an idle context until one is nobody's any more."""
        refs, is_shared = self.pool.refs, True
        while victim.blocks and is_shared:
            is_shared = refs[victim.blocks[-1]] > 1
            self.truncate(victim, (len(victim.blocks) - 1) * self.block_size)

    def _next_victim(self, context: Context) -> Context | None:
        """Return the context that loses KV next so that `context` can go on."""
        if self._victims is None:
            self._victims = sorted(self._holders, key=_worth)
        while self._victims:
            victim = self._victims[-1]
            is_movable = victim.step != self._step and victim.blocks and victim is not context
            if is_movable and victim.has_work and victim.is_before(context):
                break
            if is_movable and not victim.has_work and self.pool.refs[victim.blocks[-1]] == 1:
                return victim  # and again, as long as there is more to take
            self._victims.pop()
            if is_movable and victim.has_work:
                return victim
            if is_movable:
                self._spared.append(victim)
        return self._next_spared(context)

    def _next_spared(self, context: Context) -> Context | None:
        """Whose readers have lost their blocks meanwhile, perhaps."""
        while self._spared:
            victim = self._spared[-1]
            if victim.blocks and victim is not context and victim.step != self._step:
                return victim
            self._spared.pop()
        return None

    def _hand_back(self, context: Context) -> None:
        """Give an idle context what a fork of it, or a fork of that, had to compute again: others
        will read it.
        """
        origin, length = context.origin, context.origin_len
        while origin is not None and origin.is_released:
            length = min(length, origin.origin_len)
            origin = origin.origin
        # Who forked from this one goes by it to what lives on.
        context.origin, context.origin_len = origin, length
        if origin is None or origin.has_work:
            return
        if origin.num_computed < min(context.origin_len, context.num_computed):
            self._match(origin)

    def _end(self, context: Context, keep: int) -> None:
        """Mark what stays as cache, let go of everything."""
        self._hand_back(context)
        num_kept = min(context.depth, keep // self.block_size)
        node = _ancestor(context.node, context.depth - num_kept)
        while node is not None and not node.is_kept:
            node.is_kept = True
            node = _ancestor(node, 1)
        self.evict(context)
        context.is_released = True


def _ancestor(node: Node | None, num_steps: int) -> Node | None:
    """Walk up; None where that reaches the root, as for a context of depth 0."""
    for _ in range(num_steps):
        assert node is not None
        node = node.parent
    return None if node is None or node.parent is None else node


def _worth(context: Context) -> tuple[int, float, int, int]:
    """Sort key: who loses its KV first has the largest."""
    if context.has_work:
        return (0, context.rank, context.arrival, 0)
    next_use = math.inf if context.next_use is None else context.next_use
    return (1, next_use, -context.step, context.arrival)
