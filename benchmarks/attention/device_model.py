"""A coarse model of the attention kernel on an H200, from the work tables that the planner makes.

    cd benchmarks; PYTHONPATH=.. python -m attention.device_model [--latency-us 1.5] [--tflops 350]
        [--max-rows 64]

A program that is free takes the next unit. A unit costs a fixed latency, then its bytes: at most as
fast as its copies in flight allow, as its products allow, and as all active programs share the
memory. The launch, the merge launch and the partials are added. It orders rows and shows causes;
it predicts no figure of a device.
"""

from __future__ import annotations

import argparse
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from conure.kernels.gpu.work_table.builder import LayerGroup, WorkTableBuilder
from conure.kernels.gpu.work_table.table import ITEM_SIZE, ItemField, TableHeader
from conure.kernels.planning.plan import build_plan

from .report import LATENCY_S, SHARE_OF_IDEAL
from .rows import GPU_ROWS, BenchmarkRow, DeviceRates, lay_out

BLOCK: Final = 16
PROCESSORS: Final = 132
RATES: Final = DeviceRates(4.3e12, 790e12)
"""Measured rates of an H200: copies, and a bfloat16 product."""
LAYERS: Final = LayerGroup(8, 4, None, 16, 128, PROCESSORS, (3, 2, 1))
MEMORY_LATENCY_S: Final = 0.9e-6
TILE_BYTES: Final = 64 * 256
"""Keys, or values, of a tile."""
IN_FLIGHT: Final = {False: 4, True: 3}
"""Tiles of keys or values that are under way, for small and for large items."""
LAUNCH_S: Final = 2.5e-6
MERGE_S: Final = 4e-6
STEP_S: Final = 1e-7
"""Resolution of the simulation."""

Reals = NDArray[np.float64]


class Modelled(NamedTuple):
    """A row on the modelled device."""

    row: BenchmarkRow
    ideal_s: float
    seconds: float
    goal: str
    is_met: bool


def model(row: BenchmarkRow, *, latency_s: float, flops: float, max_rows: int = 128) -> Modelled:
    """Return the modelled time of a row.

    Args:
        row: The tree of contexts.
        latency_s: Fixed time of a unit: its words, page, queries and the first tile.
        flops: Rate at which all processors multiply in large items.
        max_rows: Maximum rows of a large item; see `AttentionTuning`.
    """
    tables = lay_out(row, BLOCK).tables
    num = row.num_requests
    plan = build_plan([1] * num, [row.kv_len] * num, tables, block_size=BLOCK)
    work = WorkTableBuilder(LAYERS._replace(large=max_rows))
    work.update(plan)
    seconds = LAUNCH_S + _attend_s(work, latency_s, flops)
    if work.is_merged:
        num_bytes = work.num_partials * row.heads * 4 * (row.head_dim + 1)
        seconds += MERGE_S + num_bytes / RATES.bytes_per_s
    ideal_s = RATES.ideal_s(row, 2)
    share = SHARE_OF_IDEAL.get(row.regime)
    if share is None:
        return Modelled(row, ideal_s, seconds, f"{LATENCY_S * 1e6:g} us", seconds <= LATENCY_S)
    return Modelled(row, ideal_s, seconds, f"{share:.0%}", ideal_s / seconds >= share)


def _attend_s(work: WorkTableBuilder, latency_s: float, flops: float) -> float:
    """Simulate the programs of a table."""
    first, count = (int(work.words[word]) for word in (TableHeader.ITEMS, TableHeader.NUM_ITEMS))
    items = work.words[first : first + count * ITEM_SIZE].reshape(-1, ITEM_SIZE)
    heads, programs = LAYERS.kv_heads, work.programs
    units = np.arange(count * heads)
    kv = items[units // heads, ItemField.NUM_KV].astype(float)
    is_large = items[units // heads, ItemField.IS_LARGE] != 0
    num_bytes = kv * 512
    limit = np.where(is_large, IN_FLIGHT[True], IN_FLIGHT[False]) * TILE_BYTES / MEMORY_LATENCY_S
    per_program = flops / programs
    products = 4 * work.large * 128 * kv / per_program
    rate = np.where(is_large, np.minimum(limit, num_bytes / np.maximum(products, 1e-12)), limit)

    current = np.arange(programs)
    is_busy = current < len(units)
    waiting = np.full(programs, latency_s)
    left: Reals = np.where(is_busy, num_bytes[np.minimum(current, len(units) - 1)], 0.0)
    now, num_taken = 0.0, programs
    while is_busy.any():
        is_reading = is_busy & (waiting <= 0)
        wanted = np.where(is_reading, rate[np.minimum(current, len(units) - 1)], 0.0)
        total = wanted.sum()
        scale = min(1.0, RATES.bytes_per_s / total) if total else 1.0
        left -= wanted * scale * STEP_S
        waiting = np.where(is_busy & ~is_reading, waiting - STEP_S, waiting)
        now += STEP_S
        is_done = is_reading & (left <= 0)
        num_done = int(is_done.sum())
        current[is_done] = num_taken + np.arange(num_done)
        num_taken += num_done
        is_busy &= current < len(units)
        has_next = is_done & is_busy
        left[has_next] = num_bytes[current[has_next]]
        waiting[has_next] = latency_s
    return now


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description="Model the attention kernel on an H200.")
    parser.add_argument("--latency-us", type=float, default=1.5, help="of a unit (1.5)")
    parser.add_argument("--tflops", type=float, default=350, help="of large items (350)")
    parser.add_argument("--max-rows", type=int, default=128, choices=(64, 128))
    options = parser.parse_args()
    modelled = [
        model(
            row,
            latency_s=options.latency_us * 1e-6,
            flops=options.tflops * 1e12,
            max_rows=options.max_rows,
        )
        for row in GPU_ROWS
        if row.regime != "crossover"
    ]
    for row, ideal_s, seconds, goal, is_met in modelled:
        verdict = "met" if is_met else "MISSED"
        print(
            f"{row.name[:44]:44} ideal {ideal_s * 1e6:7.1f} us  modelled {seconds * 1e6:7.1f} us "
            f"{ideal_s / seconds:5.0%}  goal {goal:5} {verdict}"
        )
    print(f"{sum(each.is_met for each in modelled)} of {len(modelled)} rows met")


if __name__ == "__main__":
    main()
