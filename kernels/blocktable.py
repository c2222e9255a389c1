"""The block table of a context: a list that says when what stood in it was replaced.

From step to step a table gains a block now and then, and nearly never is one of its blocks
another. Whoever plans steps has to know, and to compare hundreds of blocks of hundreds of
tables in each costs more than all the rest of a step that goes on. So a table counts.

Knows numbers of blocks, nothing of what they hold. Kept true: while `replaced` is the same, a
table has the blocks that it had, in their places, and perhaps more behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex


class BlockTable(list[int]):
    """Blocks of a context in order. Lengthened by `append` and `extend` alone it stays the same."""

    __slots__ = ("replaced",)

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        """Begin with some blocks."""
        super().__init__(blocks)
        self.replaced = 0
        """How often blocks were replaced, taken away or moved."""

    # A number and a block, or a slice and blocks: a list's own two signatures.
    def __setitem__(self, place: Any, blocks: Any) -> None:
        """Put other blocks in the place of some."""
        self.replaced += 1
        super().__setitem__(place, blocks)

    def __delitem__(self, place: SupportsIndex | slice) -> None:
        """Take blocks away."""
        self.replaced += 1
        super().__delitem__(place)

    def __imul__(self, times: SupportsIndex) -> BlockTable:
        """Repeat all blocks; none is left of 0 times."""
        self.replaced += 1
        super().__imul__(times)
        return self

    def insert(self, place: SupportsIndex, block: int) -> None:
        """Move the blocks from a place on."""
        self.replaced += 1
        super().insert(place, block)

    def pop(self, place: SupportsIndex = -1) -> int:
        """Take a block away and return it."""
        self.replaced += 1
        return super().pop(place)

    def remove(self, block: int) -> None:
        """Take the first such block away."""
        self.replaced += 1
        super().remove(block)

    def clear(self) -> None:
        """Take all blocks away."""
        self.replaced += 1
        super().clear()

    def reverse(self) -> None:
        """Turn the order over."""
        self.replaced += 1
        super().reverse()

    def sort(  # type: ignore[override]
        self, *, key: Callable[[int], int] | None = None, reverse: bool = False
    ) -> None:
        """Order the blocks."""
        self.replaced += 1
        super().sort(key=key, reverse=reverse)
