"""The blocks of KV memory, by number: who refers to each, and which are free.

A block is in exactly one of three states. *Free*: nobody refers to it. *Held*: contexts
refer to it, counted. *Cached*: no context refers to it, but the prefix tree still names it,
so that it may be taken up again or evicted.

Blocks are handed out so that those of one context follow each other where that can be:
kernels read neighbours in place, and gather others.

Knows numbers only: neither tokens nor contexts nor tensors. Refuses to decide what is
evicted. Kept true: `num_free + num_held + num_cached == num_blocks`.
"""

from __future__ import annotations

from typing import Final

_FREE: Final = b"\1"
_LONGEST_RUN: Final = 32
"""Free neighbours that are looked for at most: longer runs save nothing more."""


class BlockPool:
    """Reference counts of a fixed number of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.refs = [0] * num_blocks
        """How many contexts refer to each block. Read by the hot path; changed only here."""
        self.num_free = num_blocks
        """Blocks that nobody refers to and the cache does not name."""
        # One byte each, so that free neighbours are found at the speed of a search in text.
        self._free = bytearray(_FREE * num_blocks)

    @property
    def num_held(self) -> int:
        """Blocks that at least one context refers to."""
        return self.num_blocks - self.num_free - self.num_cached

    def take(self, behind: int = -1, wanted: int = 1) -> int | None:
        """Return a free block with one reference, or None where none is free.

        Args:
            behind: The block that the context ends with: the next one is best.
            wanted: Blocks that the context is about to take, this one included. Else they
                begin where so many are free, or at the lowest free block.
        """
        if not self.num_free:
            return None
        block = behind + 1
        if behind < 0 or block == self.num_blocks or not self._free[block]:
            block = self._free.find(_FREE * min(wanted, _LONGEST_RUN))
            if block < 0:
                block = self._free.find(_FREE)
        self._free[block] = 0
        self.num_free -= 1
        self.refs[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a block that is held."""
        assert self.refs[block] > 0
        self.refs[block] += 1

    def revive(self, block: int) -> None:
        """Give a cached block its first reference."""
        assert self.refs[block] == 0
        self.refs[block] = 1
        self.num_cached -= 1

    def drop(self, block: int) -> bool:
        """Remove one reference; True where it was the last.

        The caller then says where the block goes: `store` or `put_back`.
        """
        count = self.refs[block] - 1
        assert count >= 0
        self.refs[block] = count
        return count == 0

    def store(self, block: int) -> None:
        """Count a block without references as cached."""
        assert self.refs[block] == 0
        self.num_cached += 1

    def forget(self, block: int) -> None:
        """Count a cached block as cached no longer; the caller puts it back."""
        assert self.refs[block] == 0
        self.num_cached -= 1

    def put_back(self, block: int) -> None:
        """Make a block without references free."""
        assert self.refs[block] == 0
        assert not self._free[block], "a block is free twice"
        self._free[block] = 1
        self.num_free += 1

    def check(self) -> None:
        """Assert that no block is lost or in two states; linear in the number of blocks."""
        assert self._free.count(_FREE) == self.num_free
        assert not any(map(int.__and__, self._free, map(bool, self.refs))), (
            "a free block is referred to"
        )
        num_unreferenced = sum(count == 0 for count in self.refs)
        assert num_unreferenced == self.num_free + self.num_cached, "a block is lost"
        assert min(self.refs, default=0) >= 0
