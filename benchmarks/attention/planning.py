"""What a step costs on the host: planning 256 requests, as trees and alone.

`from scratch` reads all tables, finds the tree and lays out the work of a GPU; `next step` is
the same after one more token of each request, as most decode steps are; in `one leaves, one
joins` a request of the tree also gives its place to another with a prompt of its own behind the
same prefix. Tables are the engine's, which count what was replaced in them. Knows the planner and
the work tables, no device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Final

from conure.kernels.blocktable import BlockTable
from conure.kernels.planner import Planner
from conure.kernels.work import Kind, Work

from .clock import Timing
from .rows import Row, lay_out

STEPS = 60
BUILDS = 10
KIND: Final = Kind(kv_heads=8, group=4, window=None, small=16, large=128, processors=132)
"""A layer of 32 heads on a device of 132 processors."""
ROWS: Final = (
    Row("3 levels", "tree", (1, 16, 256), (1024, 1024, 128)),
    Row("2 levels", "tree", (1, 256), (8192, 256)),
    Row("alone", "unshared", (256,), (4096,)),
)


def measure(
    timer: Callable[[], float] = time.perf_counter, *, block_size: int = 16
) -> dict[str, Timing]:
    """Time plans and work tables, from scratch and from step to step."""
    found = {}
    for row in ROWS:
        found[f"256 requests, {row.name}, from scratch"] = _builds(row, block_size, timer)
        found[f"256 requests, {row.name}, next step"] = _steps(row, block_size, timer)
        found[f"256 requests, {row.name}, one leaves, one joins"] = _steps(
            row, block_size, timer, is_changing=True
        )
    return found


def _builds(row: Row, block_size: int, timer: Callable[[], float]) -> Timing:
    tables = [BlockTable(table) for table in lay_out(row, block_size).tables]
    samples = []
    for _ in range(BUILDS):
        begin = timer()
        _plan(Planner(block_size=block_size), Work(KIND), tables, _lengths(row, block_size))
        samples.append(timer() - begin)
    return Timing.of(samples, is_graph=False)


def _steps(
    row: Row, block_size: int, timer: Callable[[], float], *, is_changing: bool = False
) -> Timing:
    laid = lay_out(row, block_size)
    tables = [BlockTable(table) for table in laid.tables]
    planner, work = Planner(block_size=block_size), Work(KIND)
    lengths = _lengths(row, block_size)
    _plan(planner, work, tables, lengths)
    fresh = itertools.count(laid.num_blocks)
    samples = []
    own = row.tokens[-1] // block_size
    for step in range(STEPS):
        lengths = [length + 1 for length in lengths]
        if is_changing:
            leaving = 37 * step % len(tables)
            left = tables.pop(leaving)
            del lengths[leaving]
            prefix = left[: row.kv_len // block_size - own]
            tables.append(BlockTable([*prefix, *itertools.islice(fresh, own)]))
            lengths.append(row.kv_len - 1)
        for table, length in zip(tables, lengths, strict=True):
            if length > len(table) * block_size:
                table.append(next(fresh))
        begin = timer()
        _plan(planner, work, tables, lengths)
        samples.append(timer() - begin)
    return Timing.of(samples, is_graph=False)


def _lengths(row: Row, block_size: int) -> list[int]:
    """Give the requests different lengths, so that some begin a block in each step."""
    return [row.kv_len - number % block_size for number in range(row.num_requests)]


def _plan(planner: Planner, work: Work, tables: list[BlockTable], lengths: list[int]) -> None:
    work.update(planner.plan([1] * len(tables), lengths, tables))
