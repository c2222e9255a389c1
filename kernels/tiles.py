"""Cuts the work items of a step into tiles: queries whose scores are one matrix.

A tile holds neighbouring queries, at most so many that its scores fit `SCORE_BYTES`. Each
item that serves some of them becomes one or several pieces, and each piece gets columns of
the matrix of its own, the same for all of its queries. Rows are ordered so that the queries
of every item are neighbours: along the tree of prefixes, then by length.

A stretch whose slots follow each other is read in place, where it is long enough to be worth
a call. What remains of queries with items of their own (decoding: the blocks at their ends)
is gathered for many queries at once, padded to the longest. New tokens of one row see each
other causally: a tile leaves out what none of its queries sees and masks the triangle.

Knows items, slots and sizes; its tensors are indices and masks. Kept true: for each query the
columns of its pieces hold each position that it sees exactly once; whatever else stands in
its row of scores is -inf, by a bias or because nothing writes there; padding repeats a slot
of the same query.

Shapes: Q queries of a tile - C columns of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .plan import Integers, Item, Plan
from .stretch import Room, Stretch, Tail, run_of

TILE_QUERIES: Final = 128
"""Queries of a tile at most: more of them compute more above the diagonal, fewer read keys
more often."""
SCORE_BYTES: Final = 2**25
"""Scores of a tile are at most this much, or one query's."""
GATHER_BYTES: Final = 2**22
"""Keys that one call gathers for several queries are at most this much."""
RUN_TOKENS: Final = 128
"""A shorter stretch is not worth a call of its own where others are gathered anyway."""
COLUMNS: Final = 32
"""Decoding queries get columns in such steps: a library call of a new shape costs as much as
ten of a known one."""
SPARE_COLUMNS: Final = 256
"""A query may have so many unused columns, or half of all, before it gets another tile."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys and values for neighbouring queries of a tile, and the columns of their scores."""

    first: int
    """First query, counted in the tile."""
    end: int
    column: int
    width: int
    tokens: Stretch
    """Slots that all queries read, [width], or what each of them reads alone: a `Tail`."""
    bias: Tensor | None
    """Added to the last columns of the scores, 0 or -inf: [end - first, 1, columns]."""
    is_first: bool
    """None of the queries has a piece before this one."""


@dataclass(slots=True)
class Tile:
    """Queries whose scores are one matrix, [Q, C] for every head."""

    queries: Tensor | slice
    """Packed queries, [Q]."""
    num_queries: int
    pieces: list[Piece] = field(default_factory=list)
    width: int = 0
    has_gaps: bool = False
    """In some columns no piece writes the scores of some query."""

    def can_grow(self) -> bool:
        """Whether every query has a tail with room for one more token."""
        tails = [piece.tokens for piece in self.pieces if isinstance(piece.tokens, Tail)]
        num_tails = sum(tail.num_queries for tail in tails)
        return num_tails == self.num_queries and all(tail.can_grow for tail in tails)

    def grow(self, slots: Integers) -> None:
        """Let every query see one more token: the slots of all packed queries, [T]."""
        mine = slots[self.queries if isinstance(self.queries, slice) else self.queries.numpy()]
        for piece in self.pieces:
            if isinstance(piece.tokens, Tail):
                piece.tokens.grow(mine[piece.first : piece.end])
            else:
                piece.tokens.go_on()

    def forget(self) -> None:
        """Keep nothing of a cache any more."""
        for piece in self.pieces:
            piece.tokens.forget()


class Sizes(NamedTuple):
    """What a layer decides: how large a tile may be, and how its tensors look."""

    dtype: torch.dtype
    """Of the masks."""
    score_bytes: int
    """Of one column of one query, all heads together."""
    token_bytes: int
    """Of the keys of one token."""
    run_tokens: int
    """A decoding query reads so long a stretch of neighbouring slots in place, if there are
    others beside it: one call serves all that is gathered."""


class _Span(NamedTuple):
    """Queries of one row that lie in one tile."""

    row: int
    begin: int
    """First and last query, counted among the row's new tokens."""
    end: int
    first: int
    """Where they stand in the tile."""


def cut(plan: Plan, window: int | None, sizes: Sizes, room: Room) -> list[Tile]:
    """Return the tiles of a step; together they name every query once.

    Args:
        plan: Of the step.
        window: Positions that a query sees, its own included; None sees all.
        sizes: Of the layer.
        room: For what tails keep.
    """
    if plan.num_queries > plan.num_rows or plan.binding(window) is not None:
        # The next step will not be this one with a token more: nothing is worth keeping.
        room = Room(0)
    items = plan.items(window)
    row_of = np.repeat(np.arange(plan.num_rows), plan.num_new)
    rows_of = [_distinct(row_of[item.queries]) for item in items]
    spans = _fill(plan, _order(plan, rows_of), plan.binding(window), sizes)
    builders = [_Builder(plan, each, sizes, room) for each in spans]
    for item, rows in zip(items, rows_of, strict=True):
        for builder in builders:
            builder.add(item, rows)
    return [builder.finish() for builder in builders]


def _distinct(rows: Integers) -> list[int]:
    """Return rows without repetition; equal ones are neighbours."""
    return list(dict.fromkeys(rows.tolist()))


def _order(plan: Plan, rows_of: Sequence[list[int]]) -> list[int]:
    """Order rows: decoding ones first, then so that those of every item are neighbours."""
    # Parents come before their children among items: the items of a row are its path.
    paths: list[list[int]] = [[] for _ in range(plan.num_rows)]
    for index, rows in enumerate(rows_of):
        if len(rows) > 1:
            for row in rows:
                paths[row].append(index)
    lengths, counts = plan.kv_len.tolist(), plan.num_new.tolist()
    return sorted(
        range(plan.num_rows),
        key=lambda row: (counts[row] > 1, paths[row], counts[row], lengths[row]),
    )


def _fill(plan: Plan, order: list[int], window: int | None, sizes: Sizes) -> list[list[_Span]]:
    """Deal the queries of the rows, in order, out to tiles."""
    dealt: list[list[_Span]] = []
    spans: list[_Span] = []
    num, least, most = 0, 0, 0
    for row in order:
        count, length = int(plan.num_new[row]), int(plan.kv_len[row])
        begin = 0
        while begin < count:
            need = length - count + begin + 1
            if window is not None:
                need = min(need, window)
            room = max(1, SCORE_BYTES // (sizes.score_bytes * max(most, need + TILE_QUERIES)))
            room = min(room, TILE_QUERIES) - num
            is_alike = max(most, need) <= 2 * min(least, need) + SPARE_COLUMNS
            is_alike &= not spans or (count > 1) == (plan.num_new[spans[-1].row] > 1)
            if spans and (room <= 0 or not is_alike):
                dealt.append(spans)
                spans, num = [], 0
                continue
            end = min(count, begin + max(room, 1))
            least = min(least, need) if spans else need
            most = max(most if spans else 0, need + end - begin)
            spans.append(_Span(row, begin, end, num))
            num += end - begin
            begin = end
            if begin < count:
                dealt.append(spans)
                spans, num = [], 0
    dealt.append(spans)
    return dealt


class _Builder:
    """Puts pieces into one tile."""

    def __init__(self, plan: Plan, spans: list[_Span], sizes: Sizes, room: Room) -> None:
        self._plan = plan
        self._spans = spans
        self._places = {span.row: place for place, span in enumerate(spans)}
        self._sizes = sizes
        self._room = room
        self._max_gathered = max(1, GATHER_BYTES // sizes.token_bytes)
        self._columns = [0] * len(spans)
        """Where the next piece of each span may begin."""
        self._is_served = [False] * len(spans)
        self._rest: dict[int, Integers] = {}
        """Slots that single queries still lack, by span."""
        starts = plan.query_start
        queries = np.concatenate(
            [np.arange(starts[s.row] + s.begin, starts[s.row] + s.end) for s in spans]
        )
        self._tile = Tile(run_of(queries) or torch.from_numpy(queries), len(queries))

    def add(self, item: Item, rows: list[int]) -> None:
        """Put the part of an item that concerns this tile into pieces."""
        places = [self._places[row] for row in rows if row in self._places]
        if not places:
            return
        tokens = item.slots(self._plan.block_size)
        first, last = min(places), max(places)
        assert last - first + 1 == len(places), "the rows of an item are not neighbours"
        if item.causal:
            self._add_causal(item, first, tokens)
            return
        span = self._spans[first]
        is_single = first == last and span.end - span.begin == 1
        run_tokens = RUN_TOKENS
        if is_single and len(self._spans) > 1:
            run_tokens = self._sizes.run_tokens
        runs, rest = _long_runs(tokens, COLUMNS if is_single else 1, run_tokens)
        if not is_single and self._keeps(tokens):
            # Gathered once it is one call in every step that goes on.
            runs, rest = [], tokens
        for run in runs:
            self._put(first, last, run)
        if not len(rest):
            return
        if is_single and first not in self._rest and len(rest) <= self._max_gathered // 2:
            self._rest[first] = rest
        else:
            self._put(first, last, rest)

    def finish(self) -> Tile:
        """Return the tile after its last item."""
        for bucket in self._buckets():
            self._put_tail(bucket)
        tile = self._tile
        tile.width = max(self._columns)
        tile.has_gaps |= min(self._columns) < tile.width
        return tile

    def _add_causal(self, item: Item, place: int, tokens: Integers) -> None:
        """Put in what the queries of a span see of their own row."""
        span = self._spans[place]
        num, num_new = span.end - span.begin, len(item.queries)
        end = len(tokens) - num_new + span.end
        if item.window is not None:
            begin = max(0, end - num - item.window + 1)
            seen = _window_bias(num, end - begin, item.window)
            self._put(place, place, tokens[begin:end], seen)
            return
        bias = _triangle(num) if num > 1 else None
        if run_of(tokens[:end]):
            self._put(place, place, tokens[:end], bias)
            return
        runs, rest = _long_runs(tokens[: end - num], 1, RUN_TOKENS)
        for run in runs:
            self._put(place, place, run)
        self._put(place, place, np.concatenate((rest, tokens[end - num : end])), bias)

    def _put(self, first: int, last: int, tokens: Integers, bias: Tensor | None = None) -> None:
        """Append a piece whose queries all read the same keys."""
        self._append(first, last, len(tokens), Stretch(tokens, self._room), bias)

    def _put_tail(self, places: list[int]) -> None:
        """Append a piece of neighbouring single queries with keys of their own."""
        stretches = [self._rest[place] for place in places]
        # There is room to grow by at least one token.
        width = (max(map(len, stretches)) // COLUMNS + 1) * COLUMNS
        tail = Tail(stretches, width, self._sizes.dtype, self._room)
        self._append(places[0], places[-1], width, tail, tail.bias)

    def _append(
        self,
        first: int,
        last: int,
        width: int,
        tokens: Stretch,
        bias: Tensor | None,
    ) -> None:
        places = range(first, last + 1)
        column = max(self._columns[place] for place in places)
        is_first = not any(self._is_served[place] for place in places)
        assert is_first or all(self._is_served[place] for place in places)
        for place in places:
            self._tile.has_gaps |= self._columns[place] < column
            self._columns[place] = column + width
            self._is_served[place] = True
        begin, end = self._spans[first].first, self._spans[last]
        self._tile.pieces.append(
            Piece(
                first=begin,
                end=end.first + end.end - end.begin,
                column=column,
                width=width,
                tokens=tokens,
                bias=None if bias is None else bias.to(self._sizes.dtype),
                is_first=is_first,
            )
        )

    def _keeps(self, tokens: Integers) -> bool:
        """Say whether steps will go on, and may keep these of one cache."""
        return self._room.num_bytes > 0 and len(tokens) <= self._max_gathered

    def _buckets(self) -> Iterator[list[int]]:
        """Yield neighbouring spans whose rests are worth one padded call."""
        bucket: list[int] = []
        least = most = 0
        for place in sorted(self._rest):
            length = len(self._rest[place])
            low, high = min(least, length), max(most, length)
            fits = (len(bucket) + 1) * high <= self._max_gathered
            # A much shorter one would be mostly padding.
            is_alike = high <= 2 * low or high - low <= RUN_TOKENS
            is_next = bucket and place == bucket[-1] + 1
            is_alike &= not bucket or self._is_served[place] == self._is_served[bucket[0]]
            if bucket and not (fits and is_alike and is_next):
                yield bucket
                bucket = []
            if not bucket:
                low = high = length
            bucket.append(place)
            least, most = low, high
        if bucket:
            yield bucket


def _long_runs(tokens: Integers, unit: int, run_tokens: int) -> tuple[list[Integers], Integers]:
    """Split slots into runs that are worth a call each, in whole units, and the rest."""
    if len(tokens) < run_tokens:
        return [], tokens
    borders = np.flatnonzero(np.diff(tokens) != 1) + 1
    ends = [0, *borders.tolist(), len(tokens)]
    long: list[Integers] = []
    short: list[Integers] = []
    for begin, end in pairwise(ends):
        middle = begin
        if end - begin >= run_tokens:
            middle = end - (end - begin) % unit
        if middle > begin:
            long.append(tokens[begin:middle])
        short.append(tokens[middle:end])
    return long, np.concatenate(short)


def _triangle(num: int) -> Tensor:
    """Return the bias [num, 1, num] of new tokens over themselves."""
    return torch.full((num, num), float("-inf")).triu_(1)[:, None]


def _window_bias(num: int, num_tokens: int, window: int) -> Tensor:
    """Return the bias [num, 1, num_tokens] of new tokens at the end of a stretch."""
    own = torch.arange(num_tokens - num, num_tokens)[:, None]
    seen = torch.arange(num_tokens)[None, :]
    visible = (seen <= own) & (seen > own - window)
    return torch.zeros(num, num_tokens).masked_fill_(~visible, float("-inf"))[:, None]
