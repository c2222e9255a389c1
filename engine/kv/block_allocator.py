"""Reference counts and the free list of a fixed number of KV blocks.

A block is in exactly one of three states. *Free*: no context refers to it. *Held*: at least
one context refers to it. *Cached*: no context refers to it, but the prefix tree still names
it, so it can be reused or evicted.

Blocks of one context are allocated next to each other where possible, for the processor's
prefetching.

Out of scope: tokens, contexts, tensors and the choice of what to evict.

Invariants: `num_free + num_held + num_cached == num_blocks`.
"""

from __future__ import annotations

from typing import Final

_FREE: Final = b"\1"
_MAX_RUN: Final = 32
"""Longest run of adjacent free blocks to search for."""


class BlockAllocator:
    """Reference counts of a fixed number of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.refs = [0] * num_blocks
        """Number of contexts that refer to each block. Read by the hot path, written here only."""
        self.num_free = num_blocks
        # One byte per block: `bytearray.find` searches for runs of free blocks.
        self._free = bytearray(_FREE * num_blocks)

    @property
    def num_held(self) -> int:
        """Blocks that at least one context refers to."""
        return self.num_blocks - self.num_free - self.num_cached

    def allocate(self, after: int = -1, num_wanted: int = 1) -> int | None:
        """Return a free block with one reference, or None if no block is free.

        Args:
            after: Last block of the context. The block with the next number is preferred.
            num_wanted: Blocks that the context needs, including this one. If `after` does not
                help, the block is the first of a run of that length, or the lowest free block.
        """
        if not self.num_free:
            return None
        block = after + 1
        if after < 0 or block == self.num_blocks or not self._free[block]:
            block = self._free.find(_FREE * min(num_wanted, _MAX_RUN))
            if block < 0:
                block = self._free.find(_FREE)
        self._free[block] = 0
        self.num_free -= 1
        self.refs[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a held block."""
        assert self.refs[block] > 0
        self.refs[block] += 1

    def retain_cached(self, block: int) -> None:
        """Give a cached block its first reference."""
        assert self.refs[block] == 0
        self.refs[block] = 1
        self.num_cached -= 1

    def release(self, block: int) -> bool:
        """Remove one reference. Return True if it was the last one.

        The caller then decides between `mark_cached` and `free`.
        """
        count = self.refs[block] - 1
        assert count >= 0
        self.refs[block] = count
        return count == 0

    def mark_cached(self, block: int) -> None:
        """Count a block without references as cached."""
        assert self.refs[block] == 0
        self.num_cached += 1

    def uncache(self, block: int) -> None:
        """Stop counting a block as cached. The caller frees it."""
        assert self.refs[block] == 0
        self.num_cached -= 1

    def free(self, block: int) -> None:
        """Return a block without references to the free list."""
        assert self.refs[block] == 0
        assert not self._free[block], "the block is already free"
        self._free[block] = 1
        self.num_free += 1

    def check(self) -> None:
        """Assert that no block is lost or in two states. Linear in the number of blocks."""
        assert self._free.count(_FREE) == self.num_free
        assert not any(map(int.__and__, self._free, map(bool, self.refs))), (
            "a free block has references"
        )
        num_unreferenced = sum(count == 0 for count in self.refs)
        assert num_unreferenced == self.num_free + self.num_cached, "a block is lost"
        assert min(self.refs, default=0) >= 0
