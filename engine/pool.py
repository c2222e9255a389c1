"""The blocks of KV memory, by number: who refers to each, and which are free.

A block is in exactly one of three states. *Free*: nobody refers to it. *Held*: contexts
refer to it, counted. *Cached*: no context refers to it, but the prefix tree still names it,
so that it may be taken up again or evicted.

Knows numbers only: neither tokens nor contexts nor tensors. Refuses to decide what is
evicted. Kept true: `num_free + num_held + num_cached == num_blocks`.
"""

from __future__ import annotations


class BlockPool:
    """Reference counts of a fixed number of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.refs = [0] * num_blocks
        """How many contexts refer to each block. Read by the hot path; changed only here."""
        # Popped from the end, so low numbers go out first.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to and the cache does not name."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that at least one context refers to."""
        return self.num_blocks - len(self._free) - self.num_cached

    def take(self) -> int | None:
        """Return a free block with one reference, or None where none is free."""
        if not self._free:
            return None
        block = self._free.pop()
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
        self._free.append(block)

    def check(self) -> None:
        """Assert that no block is lost or in two states; linear in the number of blocks."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all(self.refs[block] == 0 for block in free), "a free block is referred to"
        num_unreferenced = sum(count == 0 for count in self.refs)
        assert num_unreferenced == len(free) + self.num_cached, "a block is lost"
        assert min(self.refs, default=0) >= 0
