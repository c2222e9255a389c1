"""KV memory of the scripted model: every slot stores the token that its KV stands for.

A real model computes a plausible wrong answer from wrong KV. Here the result is an error that names
the context, the block and the tokens. Each row first checks that its blocks contain exactly
`ids[:start]`, then writes its own tokens. Copies must not depend on their order.

A full block is compared by a hash of its tokens and of the previous block's hash in the writer's
context, because KV depends on the whole prefix. The expected hashes are computed from the ids of a
context. They are cached for a bounded number of contexts while the list of ids is the same object:
the core only appends to it, and replaces it when it truncates a context.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachetools import LRUCache

from ..protocol import EngineLimits
from ..runner.base import ScheduledSequence

_START = 0x5EED
_UNKNOWN = -1


class TokenMemory:
    """Blocks of token ids that rows write and check."""

    def __init__(self, limits: EngineLimits) -> None:
        """Allocate empty blocks."""
        self._size = limits.block_size
        self._tokens: list[list[int]] = [[] for _ in range(limits.num_blocks)]
        self._previous_hash = [_UNKNOWN] * limits.num_blocks
        """For each block, the hash of the previous block in its writer's context."""
        self._hashes = [_UNKNOWN] * limits.num_blocks
        """For each full block, the hash of all tokens up to its end."""
        self._expected: LRUCache[int, tuple[list[int], list[int]]] = LRUCache(
            4 * limits.max_sequences
        )
        """Ids and expected block hashes by context."""

    def run(self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, then check and write each row in order.

        Raises:
            AssertionError: if copies depend on their order, a row's blocks do not match its
                tokens, or a block does not contain the tokens that the row attends to.
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
            self._check(row)
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
            self._previous_hash[target] = self._previous_hash[source]
            self._hashes[target] = self._hashes[source]

    def _check(self, row: ScheduledSequence) -> None:
        """Assert that the blocks contain `ids[:start]`."""
        if not row.start:
            return
        size = self._size
        num_full = row.start // size
        expected = self._expect(row, num_full)
        hashes = list(map(self._hashes.__getitem__, row.blocks[:num_full]))
        if hashes != expected[:num_full]:
            index = next(i for i in range(num_full) if hashes[i] != expected[i])
            raise AssertionError(self._describe(row, index))
        if row.start % size:
            block = row.blocks[num_full]
            stored = self._tokens[block][: row.start % size]
            previous = expected[num_full - 1] if num_full else _START
            if (
                stored != row.ids[num_full * size : row.start]
                or self._previous_hash[block] != previous
            ):
                raise AssertionError(self._describe(row, num_full))

    def _write(self, row: ScheduledSequence, end: int) -> None:
        size = self._size
        if row.num_new == 1 and row.start % size:
            self._write_next(row.blocks[-1], row.start % size, row.ids[row.start])
            return
        for index in range(row.start // size, -(-end // size)):
            block = row.blocks[index]
            begin = index * size
            offset = max(row.start - begin, 0)
            tokens = self._tokens[block]
            tokens[offset:] = row.ids[begin + offset : min(end, begin + size)]
            self._previous_hash[block] = previous = (
                self._hashes[row.blocks[index - 1]] if index else _START
            )
            is_full = len(tokens) == size
            self._hashes[block] = hash((previous, *tokens)) if is_full else _UNKNOWN

    def _write_next(self, block: int, offset: int, token_id: int) -> None:
        """Write one token after others of its block, as every decoding row does."""
        tokens = self._tokens[block]
        tokens[offset:] = (token_id,)
        is_full = offset + 1 == self._size
        self._hashes[block] = hash((self._previous_hash[block], *tokens)) if is_full else _UNKNOWN

    def _expect(self, row: ScheduledSequence, num_full: int) -> list[int]:
        """Return the expected hashes of at least the first `num_full` blocks of a context."""
        known = self._expected.get(row.context)
        if known is None or known[0] is not row.ids:
            known = self._expected[row.context] = (row.ids, [])
        hashes = known[1]
        size = self._size
        for index in range(len(hashes), num_full):
            previous = hashes[-1] if hashes else _START
            hashes.append(hash((previous, *row.ids[index * size : (index + 1) * size])))
        return hashes

    def _describe(self, row: ScheduledSequence, index: int) -> str:
        block, size = row.blocks[index], self._size
        expected = row.ids[index * size : min(row.start, (index + 1) * size)]
        return (
            f"context {row.context} attends to block {block} at index {index}: expected tokens "
            f"{expected}, found {self._tokens[block]} after {self._previous_hash[block]}"
        )
