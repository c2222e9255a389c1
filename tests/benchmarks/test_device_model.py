"""The model of the attention kernel orders rows as their causes do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from attention import device_model
from attention.rows import BenchmarkRow

ALONE = BenchmarkRow("alone", "unshared", (128,), (1024,))
SHARED = BenchmarkRow("shared", "memory", (1, 64), (2048, 64))


def seconds(row: BenchmarkRow, *, latency_us: float = 1.5, tflops: float = 350) -> float:
    return device_model.model(row, latency_s=latency_us * 1e-6, flops=tflops * 1e12).seconds


def test_no_row_is_faster_than_its_ideal_time() -> None:
    for row in (ALONE, SHARED):
        modelled = device_model.model(row, latency_s=0.0, flops=1e18)
        assert modelled.seconds > modelled.ideal_s


def test_rows_that_share_nothing_are_bound_by_memory() -> None:
    assert seconds(ALONE, tflops=100) == seconds(ALONE, tflops=1000)
    assert device_model.model(ALONE, latency_s=1.5e-6, flops=3.5e14).is_met


def test_shared_ranges_are_bound_by_latency_and_products() -> None:
    assert seconds(SHARED, latency_us=3) > seconds(SHARED)
    assert seconds(SHARED, tflops=50) > seconds(SHARED)
