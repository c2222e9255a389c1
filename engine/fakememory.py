"""KV memory of a model that has none: every slot holds the token it stands for.

What a real model would compute from wrong KV is a plausible wrong answer; here it is an
error that names the context, the block and both tokens.

Kept cheap, for every test above runs on it: a full block is compared by one number, a hash
over its tokens and the number of the block before it in the writer's context. What a
context's numbers should be follows from its ids alone and is remembered, for a bounded
number of contexts, as long as the list of ids is the same object: the core only appends to
it and makes a new one where it cuts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .api import Limits
from .runner import Row

_START = 0x5EED
_UNKNOWN = -1


class FakeMemory:
    """Blocks of token ids, written and read back by rows."""

    def __init__(self, limits: Limits) -> None:
        """Begin with blocks that hold nothing."""
        self._size = limits.block_size
        self._tokens: list[list[int]] = [[] for _ in range(limits.num_blocks)]
        self._before = [_UNKNOWN] * limits.num_blocks
        """Number of all that lies before each block, as its writer had it."""
        self._number = [_UNKNOWN] * limits.num_blocks
        """Number of all up to the end of each block, once it is full."""
        self._expected: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()
        self._max_expected = 4 * limits.max_sequences

    def run(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]]) -> None:
        """Copy, then let each row in order read all before its start and write its tokens.

        Raises:
            AssertionError: if copies depend on their order, a row's blocks do not match its
                tokens, or a block does not hold what the row would attend to.
        """
        self._copy(copies)
        for row in rows:
            end = row.start + row.num_new
            assert row.num_new > 0, f"context {row.context} runs no token"
            assert end <= len(row.ids), f"context {row.context} runs tokens it does not have"
            num_blocks = -(-end // self._size)
            assert len(row.blocks) == num_blocks, (
                f"context {row.context} has {len(row.blocks)} blocks for {end} tokens"
            )
            self._read(row)
            self._write(row, end)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        sources = {source for source, _ in copies}
        targets = {target for _, target in copies}
        assert len(targets) == len(copies), "a block is the destination of two copies"
        assert not sources & targets, "a block is source and destination in one step"
        for source, target in copies:
            self._tokens[target] = list(self._tokens[source])
            self._before[target] = self._before[source]
            self._number[target] = self._number[source]

    def _read(self, row: Row) -> None:
        """Assert that the blocks hold `ids[:start]`."""
        if not row.start:
            return
        size = self._size
        num_full = row.start // size
        expected = self._expect(row, num_full)
        numbers = list(map(self._number.__getitem__, row.blocks[:num_full]))
        if numbers != expected[:num_full]:
            index = next(i for i in range(num_full) if numbers[i] != expected[i])
            raise AssertionError(self._describe(row, index))
        if row.start % size:
            block = row.blocks[num_full]
            held = self._tokens[block][: row.start % size]
            before = expected[num_full - 1] if num_full else _START
            if held != row.ids[num_full * size : row.start] or self._before[block] != before:
                raise AssertionError(self._describe(row, num_full))

    def _write(self, row: Row, end: int) -> None:
        size = self._size
        for index in range(row.start // size, -(-end // size)):
            block = row.blocks[index]
            begin = index * size
            offset = max(row.start - begin, 0)
            tokens = self._tokens[block]
            tokens[offset:] = row.ids[begin + offset : min(end, begin + size)]
            self._before[block] = before = self._number[row.blocks[index - 1]] if index else _START
            is_full = len(tokens) == size
            self._number[block] = hash((before, *tokens)) if is_full else _UNKNOWN

    def _expect(self, row: Row, num_full: int) -> list[int]:
        """Return the numbers of the first `num_full` blocks of a context, or more."""
        known = self._expected.get(row.context)
        if known is None or known[0] is not row.ids:
            known = self._expected[row.context] = (row.ids, [])
            if len(self._expected) > self._max_expected:
                self._expected.popitem(last=False)
        numbers = known[1]
        size = self._size
        for index in range(len(numbers), num_full):
            before = numbers[-1] if numbers else _START
            numbers.append(hash((before, *row.ids[index * size : (index + 1) * size])))
        return numbers

    def _describe(self, row: Row, index: int) -> str:
        block, size = row.blocks[index], self._size
        wanted = row.ids[index * size : min(row.start, (index + 1) * size)]
        return (
            f"context {row.context} attends to block {block} as its number {index}, wants "
            f"{wanted} and finds {self._tokens[block]} after {self._before[block]}"
        )
