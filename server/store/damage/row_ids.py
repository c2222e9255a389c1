"""Sets of row ids that take little memory: a journal may have a hundred million rows."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 4096
"""Row ids whose bits are allocated together."""


class RowIds:
    """A set of row ids with one bit per row id, for ids that are mostly close together."""

    def __init__(self) -> None:
        self._chunks: dict[int, bytearray] = {}

    def add(self, rowid: int) -> None:
        """Add a row id."""
        number, position = divmod(rowid, CHUNK)
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = bytearray(CHUNK // 8)
        chunk[position >> 3] |= 1 << (position & 7)

    def __contains__(self, rowid: int) -> bool:
        number, position = divmod(rowid, CHUNK)
        chunk = self._chunks.get(number)
        return chunk is not None and bool(chunk[position >> 3] & 1 << (position & 7))

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def between(self, low: int, high: int | None) -> Iterator[int]:
        """Yield the row ids above `low` and below `high`, in order. None: without a bound."""
        for number in sorted(self._chunks):
            start = number * CHUNK
            end = start + CHUNK if high is None else min(start + CHUNK, high)
            yield from filter(self.__contains__, range(max(start, low + 1), end))
