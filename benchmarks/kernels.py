"""Attention over shared prefixes, against its rivals: correctness first, then time.

    python benchmarks/kernels.py [--device cpu] [--out DIR] [--rows TEXT] [--rounds N]

On a CUDA device the `triton` implementation runs the two-level and tree grids in bfloat16, on
a CPU the `cpu` implementation runs a smaller grid in bfloat16 and float32. Each row is
computed by every contender that is there (`attention/contenders.py`), held against float64,
and timed in turns. Who cannot take part is named with the reason. A table is printed; `--out`
writes `kernels-<device>.json` and `.md`, after each row, so that a run that is cut off leaves
what it had.

Kept true: a wrong answer of ours ends in status 1, and rows that did not fit into `--budget-s`
are named.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from attention import checks, clock, contenders, flashinfer_contenders, planning, rows, scene
from attention.report import NOMINAL, Measured, Report, line
from conure.kernels import ops


def names_of(device: torch.device) -> dict[str, torch.dtype]:
    """Return the dtypes of a device's grid."""
    if device.type == "cuda":
        return {"bfloat16": torch.bfloat16}
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}


def describe(device: torch.device) -> str:
    """Return the name of the device as its maker has it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return f"CPU {platform.machine()}"
    models = [each.partition(":")[2].strip() for each in lines if each.startswith("model name")]
    return f"CPU {models[0] if models else platform.machine()}"


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(ImportError):
        found["triton"] = importlib.import_module("triton").__version__
    with contextlib.suppress(flashinfer_contenders.UnusableError):
        found["flashinfer"] = flashinfer_contenders.version()
    return found


def measure(
    row: rows.Row,
    implementation: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rates: rows.Rates,
    wanted: Callable[[str], bool],
    rounds: int,
    timer: Callable[[], float],
    block_size: int,
) -> Measured:
    """Check and time one row. A rival that fails is absent; ours raises."""
    operations = ops.implementation(implementation)
    made = scene.make(row, operations, block_size=block_size, dtype=dtype, device=device)
    outputs: dict[str, torch.Tensor] = {}
    passes: dict[str, Callable[[], object]] = {}
    answers: dict[str, checks.Check] = {}
    absent: dict[str, str] = {}
    for contender in contenders.prepare(made, implementation, wanted):
        if not isinstance(contender, contenders.Contender):
            absent[contender[0]] = contender[1]
            continue
        name, attend = contender.name, contender.attend
        try:
            error = checks.error(made, 0, attend(0))
        except Exception as raised:
            if name in contenders.OURS:
                raise
            absent[name] = checks.first_line(raised)
            continue
        answers[name] = checks.Check(f"{row.name}: {name}", error, checks.bounds(device)[dtype])
        passes[name] = _pass(attend, made.layers)
        if contender.out is not None:
            outputs[name] = contender.out
    timings = clock.take_turns(passes, device, layers=made.layers, rounds=rounds, timer=timer)
    for name, out in outputs.items():
        # What was timed last must be as right as what was checked first.
        replayed = checks.error(made, made.layers - 1, out)
        if not replayed <= answers[name].error:
            answers[name] = answers[name]._replace(error=replayed)
    element = dtype.itemsize
    nominal = next((NOMINAL[part] for part in NOMINAL if part in describe(device)), None)
    return Measured(
        row,
        str(dtype).removeprefix("torch."),
        element,
        rates.ideal_s(row, element),
        None if nominal is None else nominal.ideal_s(row, element),
        timings,
        answers,
        absent,
    )


def run(options: argparse.Namespace, device: torch.device) -> Report:
    """Check, measure and print; write after each row."""
    began = time.monotonic()
    implementation = "triton" if device.type == "cuda" else "cpu"
    dtypes = names_of(device)
    timer = time.process_time if options.processor_time else time.perf_counter
    report = Report(
        device=describe(device),
        is_gpu=device.type == "cuda",
        versions=versions(),
        threads=torch.get_num_threads(),
        rates={name: clock.measure_rates(device, dtype, timer) for name, dtype in dtypes.items()},
        block_size=options.block_size,
        checks=_announced(checks.variants(ops.implementation(implementation), device)),
        planning=planning.measure(timer),
    )
    if options.processor_time:
        report.notes.append("times are processor time")
    print(report.page().partition("\nMicroseconds")[0])
    grid = rows.GPU_ROWS if report.is_gpu else rows.CPU_ROWS
    for row, (name, dtype) in _work(grid, dtypes, options):
        if time.monotonic() - began > options.budget_s:
            report.notes.append(f"not run, {options.budget_s:g} s were over: {row.name} {name}")
            continue
        try:
            measured = measure(
                row,
                implementation,
                dtype=dtype,
                device=device,
                rates=report.rates[name],
                wanted=lambda contender: contender not in options.skip,
                rounds=options.rounds,
                timer=timer,
                block_size=options.block_size,
            )
        except Exception as raised:  # the other rows are still worth having
            report.failed.append(f"{row.name} {name}: {checks.first_line(raised)}")
            print(f"FAILED: {report.failed[-1]}", flush=True)
            continue
        report.measured.append(measured)
        print(line(measured, is_gpu=report.is_gpu), flush=True)
        if options.out is not None:
            report.write(options.out)
        if report.is_gpu:
            gc.collect()  # graphs and gathered copies of the row before
            torch.cuda.empty_cache()
    report.notes.append(f"the whole run took {time.monotonic() - began:.0f} s")
    return report


def main(arguments: Sequence[str]) -> int:
    """Return 0 if everything that is ours was right."""
    parser = argparse.ArgumentParser(description="Attention over shared prefixes, measured.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--skip", action="append", default=[], help="a contender to leave out")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each contender (21)")
    parser.add_argument("--budget-s", type=float, default=460, help="begin no row after this")
    parser.add_argument("--threads", type=int, help="threads of a CPU")
    parser.add_argument(
        "--processor-time", action="store_true", help="of one thread, where a CPU is shared"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.processor_time:
        options.threads = 1  # several would count their waiting for each other
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
        if name in contenders.OURS
    ]
    wrong = [check for check in (*report.checks, *ours) if not check.is_right]
    for check in wrong:
        print(f"WRONG: {check.name}: relative error {check.error:.2g} above {check.bound:g}")
    return int(bool(wrong or report.failed))


def _pass(attend: Callable[[int], object], layers: int) -> Callable[[], None]:
    def run_layers() -> None:
        for layer in range(layers):
            attend(layer)

    return run_layers


def _work(
    grid: Sequence[rows.Row], dtypes: dict[str, torch.dtype], options: argparse.Namespace
) -> Iterator[tuple[rows.Row, tuple[str, torch.dtype]]]:
    for row in grid:
        if options.rows in row.name and row.fits(options.block_size):
            for dtype in dtypes.items():
                yield row, dtype


def _announced(found: Iterable[checks.Check]) -> list[checks.Check]:
    """Print each check when it is there: a kernel that crashes is the one after the last."""
    kept = []
    for check in found:
        verdict = "right" if check.is_right else f"WRONG {check.reason}"
        print(f"{check.name:24} error {check.error:.1e} {verdict}", flush=True)
        kept.append(check)
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
