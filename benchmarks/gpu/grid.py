"""The grid of `kernels.py`: trees of contexts, all contenders that are installed, one row each.

Rows also run with 5 tokens less, so that the last tile of a private range is not full: a grid of
whole tiles would hide what a rest costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from attention import clock, contenders, measurement, rows
from attention.report import KernelReport, RowResult

from .record import Figures, StageRecord

SKIPPED: Final = ("flex",)
"""Compiling takes a minute for two rows."""
REST: Final = 5
"""Tokens by which the second half of the grid is shorter."""
MAX_REST_TOKENS: Final = 1024
"""Longer private ranges do not notice a rest."""


def grid(*, is_tiny: bool) -> list[rows.BenchmarkRow]:
    """Return the rows in the order in which they are measured."""
    if is_tiny:
        return [rows.BenchmarkRow("tiny", "tree", (1, 8), (128, 59))]
    plain = [row for row in rows.GPU_ROWS if row.regime != "crossover"]
    crossover = [row for row in rows.GPU_ROWS if row.regime == "crossover"]
    return [*plain, *(shorter(row) for row in plain if has_rest(row)), *crossover]


def has_rest(row: rows.BenchmarkRow) -> bool:
    """Return whether a rest in the private ranges of a row can be seen."""
    return row.tokens[-1] <= MAX_REST_TOKENS


def shorter(row: rows.BenchmarkRow) -> rows.BenchmarkRow:
    """Return a row whose private ranges are not whole tiles."""
    tokens = (*row.tokens[:-1], row.tokens[-1] - REST)
    return replace(row, name=f"{row.name} less {REST}", tokens=tokens)


def run(
    record: StageRecord,
    device: torch.device,
    *,
    is_tiny: bool,
    rounds: int,
    rivals: Sequence[str] = ("",),
) -> None:
    """Measure the grid; the JSON and the page of `kernels.py` are written, too.

    Args:
        record: Receives the rows.
        device: The GPU.
        is_tiny: Whether a single small row is measured.
        rounds: Rounds of each contender.
        rivals: Beginnings of the names of contenders besides ours; all by default.
    """
    dtype = torch.bfloat16
    rates = clock.measure_rates(device, dtype)
    report = KernelReport(
        device=record.about["device"],
        is_gpu=True,
        versions=record.about["versions"],
        threads=torch.get_num_threads(),
        rates={"bfloat16": rates},
        block_size=16,
        checks=[],
        planning={},
    )
    record.add(
        "ceilings",
        {"TB_per_s": rates.bytes_per_s / 1e12, "TFLOP_per_s": rates.operations_per_s / 1e12},
    )
    for row in grid(is_tiny=is_tiny):

        def measured(row: rows.BenchmarkRow = row) -> Figures:
            result = measurement.measure(
                row,
                "triton",
                dtype=dtype,
                device=device,
                rates=rates,
                is_selected=lambda name: (
                    name == "shared" or (name not in SKIPPED and name.startswith(tuple(rivals)))
                ),
                rounds=rounds,
                timer=time.perf_counter,
                block_size=16,
            )
            report.measured.append(result)
            report.write(record.folder)
            return figures(result)

        record.measure(row.name, measured)
        torch.cuda.empty_cache()  # graphs and gathered copies of the row


def figures(result: RowResult) -> Figures:
    """Return the figures of one row.

    Raises:
        AssertionError: if one of our results is not accurate.
    """
    wrong = [
        f"{name}: {check.error:.2g}"
        for name, check in result.checks.items()
        if name in contenders.OUR_CONTENDERS and not check.is_accurate
    ]
    assert not wrong, f"inaccurate: {', '.join(wrong)}"
    ours = result.timings["shared"]
    rivals = {name: result.best(name) for name in ("unshared", "sdpa", "flashinfer", "fa3")}
    return {
        "regime": result.row.regime,
        "us": ours.median_s * 1e6,
        "min_us": ours.min_s * 1e6,
        "max_us": ours.max_s * 1e6,
        "ideal_us": result.ideal_s * 1e6,
        "of_ideal": result.ideal_s / ours.median_s,
        **{f"x {name}": None if best is None else best[1] for name, best in rivals.items()},
        "missed": "; ".join(result.missed_targets(is_gpu=True)) or None,
    }
