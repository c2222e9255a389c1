"""Host cost of a step: the plan and the GPU work table of 256 requests.

`from scratch` reads all tables, finds the prefix tree and lays out the work of a GPU. In `next
step`, each request has one token more than in the step before, as in most decode steps. In `one
leaves, one joins`, one request is also replaced by another with the same prefix and a private
prompt. Block tables are arrays, as in the engine. No device is used.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from typing import Final

from conure.kernels.gpu.work_table.builder import LayerGroup, WorkTableBuilder
from conure.kernels.planning.planner import BlockTable, Planner

from .clock import Timing
from .rows import BenchmarkRow, lay_out

STEPS = 60
BUILDS = 10
LAYERS: Final = LayerGroup(
    kv_heads=8,
    group=4,
    window=None,
    small=16,
    large=128,
    processors=132,
    programs=(3, 2, 1),
)
"""Layers with 32 heads on a device with 132 multiprocessors."""
ROWS: Final = (
    BenchmarkRow("3 levels", "tree", (1, 16, 256), (1024, 1024, 128)),
    BenchmarkRow("2 levels", "tree", (1, 256), (8192, 256)),
    BenchmarkRow("alone", "unshared", (256,), (4096,)),
)


def measure(
    timer: Callable[[], float] = time.perf_counter, *, block_size: int = 16
) -> dict[str, Timing]:
    """Time plans and work tables, from scratch and from step to step."""
    timings = {}
    for row in ROWS:
        name = f"256 requests, {row.name}"
        timings[f"{name}, from scratch"] = _time_builds(row, block_size, timer)
        timings[f"{name}, next step"] = _time_steps(row, block_size, timer)
        timings[f"{name}, one leaves, one joins"] = _time_steps(
            row, block_size, timer, is_changing=True
        )
    return timings


def _time_builds(row: BenchmarkRow, block_size: int, timer: Callable[[], float]) -> Timing:
    tables = _tables(row, block_size)
    samples = []
    for _ in range(BUILDS):
        planner, builder = Planner(block_size=block_size), WorkTableBuilder(LAYERS)
        begin = timer()
        _plan(planner, builder, tables, _lengths(row, block_size))
        samples.append(timer() - begin)
    return Timing.of(samples, is_graph=False)


def _time_steps(
    row: BenchmarkRow, block_size: int, timer: Callable[[], float], *, is_changing: bool = False
) -> Timing:
    tables, lengths = _tables(row, block_size), _lengths(row, block_size)
    planner, builder = Planner(block_size=block_size), WorkTableBuilder(LAYERS)
    _plan(planner, builder, tables, lengths)
    unused_blocks = itertools.count(lay_out(row, block_size).num_blocks)
    samples = []
    num_private = row.tokens[-1] // block_size
    for step in range(STEPS):
        lengths = [length + 1 for length in lengths]
        if is_changing:
            leaving = 37 * step % len(tables)
            prefix = tables.pop(leaving)[: row.kv_len // block_size - num_private]
            del lengths[leaving]
            tables.append(array("i", [*prefix, *itertools.islice(unused_blocks, num_private)]))
            lengths.append(row.kv_len - 1)
        for table, length in zip(tables, lengths, strict=True):
            if length > len(table) * block_size:
                table.append(next(unused_blocks))
        begin = timer()
        _plan(planner, builder, tables, lengths)
        samples.append(timer() - begin)
    return Timing.of(samples, is_graph=False)


def _tables(row: BenchmarkRow, block_size: int) -> list[BlockTable]:
    return [array("i", table) for table in lay_out(row, block_size).tables]


def _lengths(row: BenchmarkRow, block_size: int) -> list[int]:
    """Return different lengths, so that some requests start a block in each step."""
    return [row.kv_len - number % block_size for number in range(row.num_requests)]


def _plan(
    planner: Planner, builder: WorkTableBuilder, tables: list[BlockTable], lengths: list[int]
) -> None:
    builder.update(planner.plan([1] * len(tables), lengths, tables))
