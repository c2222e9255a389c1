"""What a step costs on the host: planning 256 requests, as trees and alone.

Knows the planner, no tensors of a device.
"""

from __future__ import annotations

import time
from typing import Final

from conure.kernels import plan as plans

from .clock import Timing
from .rows import Row, lay_out

ROUNDS = 30
ROWS: Final = (
    Row("256 requests, 3 levels", "tree", (1, 16, 256), (1024, 1024, 128)),
    Row("256 requests, 2 levels", "tree", (1, 256), (8192, 256)),
    Row("256 requests alone", "unshared", (256,), (4096,)),
)


def measure(block_size: int = 16) -> dict[str, Timing]:
    """Time a plan from scratch: tables checked, tree found, items made."""
    return {f"planning, {row.name}": _time(row, block_size) for row in ROWS}


def _time(row: Row, block_size: int) -> Timing:
    tables = lay_out(row, block_size).tables
    new, lengths = [1] * row.num_requests, [row.kv_len] * row.num_requests
    samples = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        plans.build(new, lengths, tables, block_size=block_size).items()
        samples.append(time.perf_counter() - begin)
    return Timing.of(samples, is_graph=False)
