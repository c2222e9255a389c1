"""Decode and prefill steps of Llama 3 8B, compared with the lower bound of the device.

The steps are those of `decode_step.py`, one row each. No row is timed before the small model and
the recorded steps have been found right.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Final

import decode_step
from decode_step import StepFigure

from .record import Figures, StageRecord

BATCHES: Final = (1, 64)


def run(record: StageRecord, *, device: str, is_tiny: bool) -> None:
    """Check, measure and profile."""
    arguments = ["--device", device, "--batch", *map(str, BATCHES)]
    if is_tiny:
        arguments += ["--tiny", "--repeats", "2", "--context", "40", "--prefill", "64"]
    options = decode_step.parse(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        config = decode_step.write_config(Path(scratch) / "large.json", is_tiny=is_tiny)
        runner = decode_step.make_runner(str(config), options)
        checked = record.measure(
            "recorded steps, as eager ones",
            lambda: {"worst_logprob": decode_step.check_recorded(runner, max(BATCHES))},
        )
        if checked is None:
            return
        machine = decode_step.measure(runner, tiny=is_tiny)
        record.add(
            "ceilings",
            {"TB_per_s": machine.bytes_per_s / 1e12, "TFLOP_per_s": machine.flops / 1e12},
        )
        for batch in BATCHES:
            record.measure(
                f"decode, {batch} contexts of {options.context}",
                lambda batch=batch: _figures(  # type: ignore[misc]  # the loop's own value
                    decode_step.decode(runner, batch, options, machine)
                ),
            )
        record.measure(
            f"prefill, {options.prefill} tokens",
            lambda: _figures(decode_step.prefill(runner, options, machine)),
        )
        if record.is_over:
            return
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            decode_step.profile(runner, max(BATCHES), options.context)
        (record.folder / "decode-profile.txt").write_text(printed.getvalue(), "utf-8")


def _figures(figure: StepFigure) -> Figures:
    target = decode_step.TARGETS[figure.name]
    return {
        "ms": figure.step_ms,
        "min_ms": min(figure.runs),
        "max_ms": max(figure.runs),
        "replay_ms": figure.replay_ms,
        "eager_ms": figure.eager_ms,
        "bound_ms": figure.lower_bound_ms,
        "share": figure.share,
        "target": target,
        "verdict": "met" if figure.share >= target else "MISSED",
    }
