"""One row of the kernel benchmark: every contender is checked, then all are timed in turn."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch

from conure.kernels import ops

from . import case, checks, clock, contenders, rows
from .report import NOMINAL, RowResult


def describe(device: torch.device) -> str:
    """Return the manufacturer's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return f"CPU {platform.machine()}"
    models = [each.partition(":")[2].strip() for each in lines if each.startswith("model name")]
    return f"CPU {models[0] if models else platform.machine()}"


def measure(
    row: rows.BenchmarkRow,
    implementation: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rates: rows.DeviceRates,
    is_selected: Callable[[str], bool],
    rounds: int,
    timer: Callable[[], float],
    block_size: int,
) -> RowResult:
    """Check and time one row. A competitor that fails is skipped; our errors are raised."""
    operations = ops.implementation(implementation)
    created = case.make(row, operations, block_size=block_size, dtype=dtype, device=device)
    outputs: dict[str, torch.Tensor] = {}
    passes: dict[str, Callable[[], object]] = {}
    checks_by_name: dict[str, checks.AccuracyCheck] = {}
    skipped: dict[str, str] = {}
    for contender in contenders.prepare(created, implementation, is_selected):
        if not isinstance(contender, contenders.Contender):
            skipped[contender[0]] = contender[1]
            continue
        name, attend = contender.name, contender.attend
        try:
            error = checks.error(created, 0, attend(0))
        except Exception as exception:
            if name in contenders.OUR_CONTENDERS:
                raise
            skipped[name] = checks.first_line(exception)
            continue
        checks_by_name[name] = checks.AccuracyCheck(
            f"{row.name}: {name}", error, checks.BOUNDS[dtype]
        )
        passes[name] = _pass(attend, created.layers)
        if contender.out is not None:
            outputs[name] = contender.out
    timings = clock.take_turns(passes, device, layers=created.layers, rounds=rounds, timer=timer)
    for name, out in outputs.items():
        # The last timed output must be as accurate as the first one.
        replayed = checks.error(created, created.layers - 1, out)
        if not replayed <= checks_by_name[name].error:
            checks_by_name[name] = checks_by_name[name]._replace(error=replayed)
    element = dtype.itemsize
    nominal = next((NOMINAL[part] for part in NOMINAL if part in describe(device)), None)
    return RowResult(
        row,
        str(dtype).removeprefix("torch."),
        element,
        rates.ideal_s(row, element),
        None if nominal is None else nominal.ideal_s(row, element),
        timings,
        checks_by_name,
        skipped,
    )


def _pass(attend: Callable[[int], object], layers: int) -> Callable[[], None]:
    def run_layers() -> None:
        for layer in range(layers):
            attend(layer)

    return run_layers
