"""The rows of the benchmark: trees of contexts that decode one token each.

A tree has `nodes[i]` nodes of `tokens[i]` tokens on level i. The leaves are the requests, and the
nodes of a level are distributed evenly over those of the level above. `(1, 32)` and `(4096, 128)`
is a prefix of 4096 tokens for 32 requests with 128 private tokens; `(256,)` and `(4096,)` is 256
requests that share nothing.

Ideal times assume that each byte is read once, and that reading and multiplying overlap perfectly.
Rows named "PAT" are trees of the paper PAT (ASPLOS'26); the others are ours. No tensors and no
device are used here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One tree of contexts with one shape of heads."""

    name: str
    regime: str
    """The expected bound: `latency`, `memory`, `matrix`, `tree` or `unshared`; or `crossover`, if
    so little is shared that the planner decides."""
    nodes: tuple[int, ...]
    """Number of nodes on each level: a multiple of the number on the level above."""
    tokens: tuple[int, ...]
    """Tokens of each node of the level."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    is_scattered: bool = True
    """Whether blocks are scattered, as in a cache after long use. Otherwise the blocks of a node
    are contiguous, as in an empty cache."""

    @property
    def num_requests(self) -> int:
        """Number of requests: the leaves."""
        return self.nodes[-1]

    @property
    def kv_len(self) -> int:
        """Tokens that a request attends to."""
        return sum(self.tokens)

    @property
    def stored_tokens(self) -> int:
        """Tokens of all nodes, each counted once."""
        return sum(n * t for n, t in zip(self.nodes, self.tokens, strict=True))

    def fits(self, block_size: int) -> bool:
        """Return whether all inner nodes fill their blocks, so that they can be shared."""
        return not any(tokens % block_size for tokens in self.tokens[:-1])

    def shared_bytes(self, element: int) -> int:
        """Return the bytes moved if each node is read once, at `element` bytes per number."""
        return self.stored_tokens * self._token_bytes(element) + self._query_bytes(element)

    def unshared_bytes(self, element: int) -> int:
        """Return the bytes moved if every request reads its whole context."""
        tokens = self.num_requests * self.kv_len
        return tokens * self._token_bytes(element) + self._query_bytes(element)

    @property
    def operations(self) -> int:
        """Multiplications and additions, the same with and without sharing."""
        return 4 * self.heads * self.head_dim * self.num_requests * self.kv_len

    def _token_bytes(self, element: int) -> int:
        return 2 * self.kv_heads * self.head_dim * element

    def _query_bytes(self, element: int) -> int:
        return 2 * self.num_requests * self.heads * self.head_dim * element


class DeviceRates(NamedTuple):
    """Measured or nominal rates of a device."""

    bytes_per_s: float
    operations_per_s: float

    def ideal_s(self, row: BenchmarkRow, element: int) -> float:
        """Return the ideal seconds of a row: reading or multiplying, whichever takes longer."""
        reading = row.shared_bytes(element) / self.bytes_per_s
        return max(reading, row.operations / self.operations_per_s)


class RequestTables(NamedTuple):
    """The block tables of a row's requests."""

    tables: list[list[int]]
    """Blocks of each request, root first."""
    num_blocks: int


def lay_out(row: BenchmarkRow, block_size: int, *, seed: int = 0) -> RequestTables:
    """Assign blocks to every node.

    Raises:
        ValueError: if a node above the leaves does not fill its blocks.
    """
    if not row.fits(block_size):
        raise ValueError(f"{row.name}: inner nodes do not fill blocks of {block_size} tokens")
    widths = [-(-tokens // block_size) for tokens in row.tokens]
    num_blocks = sum(n * w for n, w in zip(row.nodes, widths, strict=True))
    free = list(range(num_blocks))
    if row.is_scattered:
        random.Random(seed).shuffle(free)
    tables: list[list[int]] = [[]]
    for count, width in zip(row.nodes, widths, strict=True):
        children = count // len(tables)
        assert children * len(tables) == count, f"{row.name}: {count} nodes cannot be distributed"
        grown = []
        for table in tables:
            for _ in range(children):
                grown.append([*table, *free[:width]])
                del free[:width]
        tables = grown
    return RequestTables(tables, num_blocks)


def roofline(grid: Sequence[BenchmarkRow], rates: DeviceRates, *, element: int = 2) -> list[str]:
    """Return the lines of a table: bytes, operations and ideal times of each row."""
    lines = []
    for row in grid:
        unshared, shared = row.unshared_bytes(element), row.shared_bytes(element)
        alone_us, ideal_us = (
            1e6 * unshared / rates.bytes_per_s,
            1e6 * rates.ideal_s(row, element),
        )
        lines.append(
            f"| {row.name.strip()} | {unshared / 1e6:.0f} | {shared / 1e6:.1f}"
            f" | {row.operations / 1e9:.1f} | {alone_us:.1f} | {ideal_us:.1f}"
            f" | {alone_us / ideal_us:.1f} |"
        )
    return lines


def _two_levels(
    number: int, regime: str, requests: int, prefix: int, num_private: int
) -> BenchmarkRow:
    name = f"{number:2} B{requests} P{prefix} S{num_private}"
    return BenchmarkRow(name, regime, (1, requests), (prefix, num_private))


def _tree(
    nodes: tuple[int, ...], tokens: tuple[int, ...], *, source: str = "", regime: str = "tree"
) -> BenchmarkRow:
    shape = ",".join(map(str, nodes)) + " / " + ",".join(map(str, tokens))
    return BenchmarkRow(source + shape, regime, nodes, tokens)


def _unshared(requests: int, tokens: int) -> BenchmarkRow:
    return BenchmarkRow(f"B{requests} S{tokens} alone", "unshared", (requests,), (tokens,))


_CROSSOVER = tuple(
    BenchmarkRow(
        f"B{requests} P{prefix} S256, crossover", "crossover", (1, requests), (prefix, 256)
    )
    for requests, prefix in ((2, 64), (2, 256), (2, 1024), (8, 16), (8, 64), (8, 256))
)
GPU_ROWS: Final = (
    _two_levels(1, "latency", 8, 1024, 128),
    _two_levels(2, "latency", 16, 2048, 256),
    _two_levels(3, "memory", 32, 1024, 512),
    _two_levels(4, "latency", 32, 4096, 128),
    _two_levels(5, "memory", 32, 8192, 1024),
    _two_levels(6, "latency", 64, 2048, 64),
    _two_levels(7, "memory", 64, 8192, 512),
    _two_levels(8, "matrix", 64, 32768, 256),
    _two_levels(9, "memory", 128, 4096, 256),
    _two_levels(10, "matrix", 128, 16384, 128),
    _two_levels(11, "memory", 256, 2048, 512),
    _two_levels(12, "matrix", 256, 8192, 256),
    _two_levels(13, "memory", 512, 1024, 1024),
    _two_levels(14, "memory", 8, 131072, 512),
    _tree((1, 4, 64), (2048, 1024, 256)),
    _tree((1, 8, 64), (4096, 2048, 128)),
    _tree((1, 16, 256), (1024, 1024, 128)),
    _tree((4, 16, 64), (2048, 512, 256)),
    _tree((1, 2, 8, 32, 128), (2048, 1024, 512, 256, 128)),
    _tree((1, 1024), (2048, 32), source="PAT 3: ", regime="matrix"),
    _tree((1, 8, 512), (512, 512, 256), source="PAT 8: "),
    _tree((1, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32, 32), source="PAT 14: "),
    _unshared(256, 4096),
    _unshared(1, 32768),
    *_CROSSOVER,
)
"""The GPU grid; regimes are expectations for an H200."""

_PLAIN = (
    BenchmarkRow("B16 P1024 S128", "memory", (1, 16), (1024, 128)),
    BenchmarkRow("B32 P2048 S64", "memory", (1, 32), (2048, 64)),
    BenchmarkRow("B8 P4096 S256", "memory", (1, 8), (4096, 256), heads=16, kv_heads=2, head_dim=64),
    BenchmarkRow("1,4,16 / 1024,512,64", "tree", (1, 4, 16), (1024, 512, 64)),
    _unshared(16, 1152),
    _unshared(32, 512),
    _unshared(1, 4096),
)
CPU_ROWS: Final = (
    *(replace(row, is_scattered=False) for row in _PLAIN),
    *(replace(row, name=f"{row.name}, scattered") for row in (_PLAIN[0], _PLAIN[4])),
    *(replace(row, is_scattered=False) for row in _CROSSOVER),
)
"""The CPU grid, with contiguous and scattered blocks."""
