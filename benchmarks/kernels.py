"""Attention over shared prefixes, compared with other libraries: first accuracy, then time.

    python benchmarks/kernels.py [--device cpu] [--out DIR] [--rows TEXT] [--rounds N]

On a CUDA device the `triton` implementation runs the two-level and tree grids in bfloat16. On a
CPU the `cpu` implementation runs a smaller grid in bfloat16 and float32. Every available
contender (`attention/contenders.py`) computes each row, is compared with float64 and timed in
turn. Contenders that are not available are listed with the reason. A table is printed. `--out`
writes `kernels-<device>.json` and `.md` after each row, so an interrupted run leaves its results.

The exit status is 1 if one of our results is inaccurate. Rows that do not fit into `--budget-s`
are listed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from attention import checks, clock, contenders, flashinfer_contenders, planning, rows
from attention.measurement import describe, measure
from attention.report import KernelReport, line
from conure.kernels import ops


def dtypes_of(device: torch.device) -> dict[str, torch.dtype]:
    """Return the dtypes of a device's grid."""
    if device.type == "cuda":
        return {"bfloat16": torch.bfloat16}
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}


def versions() -> dict[str, str]:
    """Return the versions of the libraries."""
    result = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(ImportError):
        result["triton"] = importlib.import_module("triton").__version__
    with contextlib.suppress(flashinfer_contenders.UnusableError):
        result["flashinfer"] = flashinfer_contenders.version()
    return result


def run(options: argparse.Namespace, device: torch.device) -> KernelReport:
    """AccuracyCheck, measure and print; write after each row."""
    began = time.monotonic()
    implementation = "triton" if device.type == "cuda" else "cpu"
    dtypes = dtypes_of(device)
    timer = time.process_time if options.processor_time else time.perf_counter
    report = KernelReport(
        device=describe(device),
        is_gpu=device.type == "cuda",
        versions=versions(),
        threads=torch.get_num_threads(),
        rates={name: clock.measure_rates(device, dtype, timer) for name, dtype in dtypes.items()},
        block_size=options.block_size,
        checks=_announced(_checks(implementation, device)),
        planning=planning.measure(timer),
    )
    if options.processor_time:
        report.notes.append("times are processor time")
    print(report.page().partition("\nMicroseconds")[0])
    grid = rows.GPU_ROWS if report.is_gpu else rows.CPU_ROWS
    for row, (name, dtype) in _work(grid, dtypes, options):
        if time.monotonic() - began > options.budget_s:
            report.notes.append(f"not run, {options.budget_s:g} s exceeded: {row.name} {name}")
            continue
        try:
            measured = measure(
                row,
                implementation,
                dtype=dtype,
                device=device,
                rates=report.rates[name],
                is_selected=lambda contender: contender not in options.skip,
                rounds=options.rounds,
                timer=timer,
                block_size=options.block_size,
            )
        except Exception as exception:  # measure the other rows
            report.failed.append(f"{row.name} {name}: {checks.first_line(exception)}")
            print(f"FAILED: {report.failed[-1]}", flush=True)
            continue
        report.measured.append(measured)
        print(line(measured, is_gpu=report.is_gpu), flush=True)
        if options.out is not None:
            report.write(options.out)
        if report.is_gpu:
            gc.collect()  # graphs and gathered copies of the previous row
            torch.cuda.empty_cache()
    report.notes.append(f"total time: {time.monotonic() - began:.0f} s")
    return report


def main(arguments: Sequence[str]) -> int:
    """Return 0 if all our results are accurate."""
    parser = argparse.ArgumentParser(description="Attention over shared prefixes, measured.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--skip", action="append", default=[], help="name of a contender to skip")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each contender (21)")
    parser.add_argument("--budget-s", type=float, default=460, help="start no row after this")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--processor-time", action="store_true", help="measure the processor time of one thread"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.processor_time:
        options.threads = 1  # with several threads, waiting would count
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with torch.inference_mode():
        report = run(options, torch.device(options.device))
    print()
    for note in report.notes:
        print(note)
    if options.out is not None:
        for path in report.write(options.out):
            print(path)
    ours = [
        check
        for measured in report.measured
        for name, check in measured.checks.items()
        if name in contenders.OUR_CONTENDERS
    ]
    wrong = [check for check in (*report.checks, *ours) if not check.is_accurate]
    for check in wrong:
        print(f"WRONG: {check.name}: relative error {check.error:.2g} above {check.bound:g}")
    return int(bool(wrong or report.failed))


def _checks(implementation: str, device: torch.device) -> Iterator[checks.AccuracyCheck]:
    yield from checks.variants(ops.implementation(implementation), device)
    if device.type == "cuda":
        from attention.configuration_checks import check_configurations  # needs triton

        yield from check_configurations(device)


def _work(
    grid: Sequence[rows.BenchmarkRow], dtypes: dict[str, torch.dtype], options: argparse.Namespace
) -> Iterator[tuple[rows.BenchmarkRow, tuple[str, torch.dtype]]]:
    for row in grid:
        if options.rows in row.name and row.fits(options.block_size):
            for dtype in dtypes.items():
                yield row, dtype


def _announced(result: Iterable[checks.AccuracyCheck]) -> list[checks.AccuracyCheck]:
    """Print each check at once, so that the next one is known if a kernel crashes."""
    printed = []
    for check in result:
        verdict = "ok" if check.is_accurate else f"WRONG {check.reason}"
        print(f"{check.name:24} error {check.error:.1e} {verdict}", flush=True)
        printed.append(check)
    return printed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
