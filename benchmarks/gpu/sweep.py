"""Which constants the kernels should have: rows under several, timed in turn.

The constants are those of `AttentionTuning`. Every result is checked. The notes name the fastest.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Final

import torch

from attention import case, checks, clock, contenders, rows
from conure.kernels import ops
from conure.kernels.gpu.configuration import DEFAULT_TUNING, AttentionTuning
from conure.kernels.gpu.launcher import TritonKernels

from . import grid
from .record import Figures, StageRecord

TUNINGS: Final[dict[str, AttentionTuning]] = {
    "default": DEFAULT_TUNING,
    "large stages 3": DEFAULT_TUNING._replace(large_stages=3),
    "large stages 4": DEFAULT_TUNING._replace(large_stages=4),
    "large tile 32": DEFAULT_TUNING._replace(large_tile=32),
    "64 keys for 64 rows": DEFAULT_TUNING._replace(tile_of_64_rows=64),
    "64 rows": DEFAULT_TUNING._replace(max_large_rows=64),
    "64 rows, 64 keys": DEFAULT_TUNING._replace(max_large_rows=64, tile_of_64_rows=64),
    "2 warps for small items": DEFAULT_TUNING._replace(small_warps=2),
    "2 warps, small stages 3": DEFAULT_TUNING._replace(small_warps=2, small_stages=3),
    "small stages 3": DEFAULT_TUNING._replace(small_stages=3),
    "small stages 7": DEFAULT_TUNING._replace(small_stages=7),
    "1 item": DEFAULT_TUNING._replace(max_items_per_program=1),
    "4 items": DEFAULT_TUNING._replace(max_items_per_program=4),
    "8 items": DEFAULT_TUNING._replace(max_items_per_program=8),
    "merging in attention": DEFAULT_TUNING._replace(merges_in_attention=True),
    "sizes in turn": DEFAULT_TUNING._replace(overlaps_sizes=False),
}
WANTED: Final = (
    *("3 B32 P1024", "6 B64 P2048", "7 B64 P8192", "8 B64 P32768", "9 B128 P4096"),
    *("10 B128", "12 B256", "1,8,64", "1,16,256", "1,2,8,32,128", "PAT 3", "PAT 14"),
    *("B1 S32768", "B256 S4096"),
)
"""Parts of the names of the rows that decide: matrix, latency, trees and no sharing."""


def run(record: StageRecord, device: torch.device, *, is_tiny: bool, rounds: int) -> None:
    """Time each row under all constants."""
    tunings = {
        name: tuning
        for name, tuning in TUNINGS.items()
        if not is_tiny or name in ("default", "large stages 3", "merging in attention")
    }
    rates = clock.measure_rates(device, torch.bfloat16)
    for row in _rows(is_tiny=is_tiny):
        record.measure(
            row.name,
            lambda row=row: _times(row, device, rates, tunings, rounds),  # type: ignore[misc]
        )
        gc.collect()
        torch.cuda.empty_cache()
    factors = best(record.rows)
    for name, factor in factors.items():
        print(f"{name:24} {factor:.3f} of the default's time, geometric mean", flush=True)
    if factors:
        name = min(factors, key=lambda each: factors[each])
        record.note(f"fastest constants: {name}, {factors[name]:.3f} of the default's time")


def best(measured: Sequence[Figures]) -> dict[str, float]:
    """Return the geometric mean of each choice's time divided by the default's."""
    means = {}
    for name in TUNINGS:
        ratios = [row[name] / row["default"] for row in measured if row.get(name)]
        if ratios:
            means[name] = float(torch.tensor(ratios, device="cpu").log().mean().exp())
    return means


def _rows(*, is_tiny: bool) -> list[rows.BenchmarkRow]:
    if is_tiny:
        return grid.grid(is_tiny=True)
    wanted = [row for row in rows.GPU_ROWS if any(part in row.name for part in WANTED)]
    return [*wanted, *(grid.shorter(row) for row in wanted if grid.has_rest(row))]


def _times(
    row: rows.BenchmarkRow,
    device: torch.device,
    rates: rows.DeviceRates,
    tunings: dict[str, AttentionTuning],
    rounds: int,
) -> Figures:
    """Return the microseconds of a row under each choice; None where a choice fails."""
    dtype = torch.bfloat16
    made = case.make(row, ops.implementation("triton"), block_size=16, dtype=dtype, device=device)
    passes: dict[str, Callable[[], object]] = {}
    failed: dict[str, None] = {}
    for name, tuning in tunings.items():
        operations = ops.AttentionOperations("triton", TritonKernels(tuning))
        attend = contenders.our_contender("shared", made, "triton", operations).attend
        try:
            error = checks.error(made, 0, attend(0))
        except RuntimeError as problem:  # a choice may need too many resources
            print(f"{row.name}: {name}: {checks.first_line(problem)}", flush=True)
            failed[name] = None
            continue
        assert error <= checks.BOUNDS[dtype], f"{name}: error {error:.2g}"

        def run_layers(attend: Callable[[int], object] = attend) -> None:
            for layer in range(made.layers):
                attend(layer)

        passes[name] = run_layers
    timings = clock.take_turns(passes, device, layers=made.layers, rounds=rounds)
    found = {name: timing.median_s * 1e6 for name, timing in timings.items()}
    return {"ideal_us": rates.ideal_s(row, 2) * 1e6, **found, **failed}
