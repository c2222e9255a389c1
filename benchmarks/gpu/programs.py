"""Whole programs and request by request, by `conure serve` on a Llama 3 8B of random weights.

The workloads and both systems are those of `end_to_end.py`. Two servers share the GPU, and the
systems swap them each round.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import end_to_end
from apps.scaled_workloads import CONTEXT_LEN, SCALED
from end_to_end import Pair

from . import serving_cases
from .record import Figures, StageRecord

NUM_BLOCKS: Final = serving_cases.KV_BYTES // serving_cases.KV_BYTES_PER_TOKEN // end_to_end.BLOCK
"""Blocks of each server."""
TINY: Final = ("map-reduce summary",)
"""The workloads of a small model."""
FAKE: Final = ("--engine", "fake", "--time-per-output-token", "1e-3")
"""The engine of a rehearsal."""


def run(record: StageRecord, *, device: str | None, is_tiny: bool, rounds: int) -> None:
    """Run the workloads.

    Args:
        record: Receives a row for each kind of program of a workload.
        device: The device of the engines; None for engines that only sleep.
        is_tiny: Whether the model is small, and few workloads run.
        rounds: Rounds that count.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = serving_cases.write_config(Path(scratch), is_tiny=is_tiny)
        model = ("--dummy-weights", str(folder), "--device", str(device))
        options = FAKE if device is None else (*model, "--dtype", "bfloat16")
        # The small model has no room for longer contexts.
        context_len = 1024 if is_tiny else CONTEXT_LEN
        num_blocks = 1024 if is_tiny else NUM_BLOCKS
        with end_to_end.two_servers(options, num_blocks, context_len) as urls:
            for name in TINY if is_tiny else SCALED:
                _measure(record, urls, name, rounds)


def _measure(record: StageRecord, urls: tuple[str, str], name: str, rounds: int) -> None:
    if record.is_over:
        record.left_out.append(name)
        return
    try:
        found = end_to_end.compare(urls, name, rounds, 0.0)
    except Exception as error:  # run the other workloads
        record.fail(name, error)
        return
    for kind, pairs in found.items():
        record.add(name if kind == "app" else f"{name}, {kind}", _figures(pairs))


def _figures(pairs: Sequence[Pair]) -> Figures:
    ratios = end_to_end.ratios_of(pairs)
    return {
        "requests_s": statistics.median(pair.before_s for pair in pairs),
        "whole_s": statistics.median(pair.after_s for pair in pairs),
        "ratio": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "rounds": len(ratios),
        "steps": statistics.median(pair.after.num_steps for pair in pairs),
    }
