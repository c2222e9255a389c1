"""Tests and measurements on a GPU, in stages of at most ten minutes each.

    python benchmarks/first_gpu.py smoke tests micro decode --out FOLDER
    python benchmarks/first_gpu.py grid --out FOLDER
    python benchmarks/first_gpu.py ours vllm programs --out FOLDER
    python benchmarks/first_gpu.py sweep --out FOLDER
    python benchmarks/first_gpu.py --rehearse --tiny --out FOLDER     every stage, without a GPU

    smoke    are results right: kernels, operations, sampling, a small model
    tests    the tests for a GPU
    micro    limits of the device, and each part of a decode step by itself
    decode   decode and prefill steps of Llama 3 8B, compared with the lower bound
    grid     attention over trees, by each implementation that is installed
    ours     the engine on requests with and without shared prefixes
    vllm     vLLM on the same requests
    programs `conure serve` on six workloads, as whole programs and request by request
    sweep    constants of the attention kernel

Each stage is a separate process with a time limit. It writes `STAGE.json` after each row, so a
stage that is stopped leaves what it has measured; `first_gpu.md` shows all stages in the folder,
and `first_gpu.log` what they printed. On Python 3.12, the files that `gpu/pack/pack.sh` collected
are unpacked first.

`--rehearse` runs the same code on a fake device that computes nothing (`engine.testing.fake_cuda`).
With `--compile`, Triton also compiles each kernel; `pack.sh` collects the results. If vLLM is
installed, `vllm` is rehearsed on a CPU. `programs` is rehearsed with engines that sleep. `--tiny`
uses small shapes. `--cpu` runs `ours`, `vllm` and `programs` on this CPU: real figures of a small
model.

With `--begin-when FILE`, `vllm` prepares its engine at once, and serves requests once FILE exists.

The exit status is 1 if a row failed or a stage did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpu import page
from gpu.pack import packed
from gpu.record import StageRecord, StageStoppedError

ROOT: Final = Path(__file__).parents[1]
MARGIN: Final = 0.85
"""Rows start only within this fraction of a stage's time limit."""
LIBRARIES: Final = ("torch", "triton", "transformers", "numpy", "flashinfer-python")


class Stage(NamedTuple):
    """A stage and its limit."""

    name: str
    limit_s: float
    uses_vllm: bool = False


STAGES: Final = {
    stage.name: stage
    for stage in (
        Stage("smoke", 150),
        Stage("tests", 200),
        Stage("micro", 100),
        Stage("decode", 170),
        Stage("grid", 480),
        Stage("ours", 180),
        Stage("vllm", 400, uses_vllm=True),
        Stage("programs", 300),
        Stage("sweep", 360),
    )
}


def main(arguments: Sequence[str]) -> int:
    """Run stages, or one stage in this process."""
    options = _parse(arguments)
    if options.run is not None:
        return run_stage(options)
    options.out.mkdir(parents=True, exist_ok=True)
    here = _place(options)
    unpacked = packed.unpack(options.packed, here) if here is not None else []
    if unpacked:
        print(f"unpacked {', '.join(unpacked)}", flush=True)
    has_failed = False
    for name in options.stages or STAGES:
        has_failed |= not start(STAGES[name], options)
        print(f"written to {page.write(options.out)}", flush=True)
    return int(has_failed)


def start(stage: Stage, options: argparse.Namespace) -> bool:
    """Run a stage in a separate process; return whether it ended without a failure."""
    limit_s = options.limit_s or stage.limit_s
    command = [sys.executable, __file__, "--run", stage.name, "--out", str(options.out)]
    command += ["--limit-s", str(limit_s), "--rounds", str(options.rounds)]
    if options.rivals:
        command += ["--rivals", *options.rivals]
    if options.begin_when is not None:
        command += ["--begin-when", str(options.begin_when)]
    flags = ("rehearse", "compile", "cpu", "tiny")
    command += [f"--{flag}" for flag in flags if getattr(options, flag)]
    print(f"== {stage.name}, at most {limit_s:.0f} s", flush=True)
    environment = packed.environment(ROOT, _place(options), uses_vllm=stage.uses_vllm)
    began = time.monotonic()
    with (options.out / "first_gpu.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            ending = f"ended with status {code}"
        except subprocess.TimeoutExpired:
            code, ending = 1, f"was stopped after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"-- {stage.name} {ending}, {time.monotonic() - began:.0f} s", flush=True)
    _finish(stage, options.out, ending, code)
    return code == 0


def _place(options: argparse.Namespace) -> Path | None:
    """Return where files of `pack.sh` are unpacked; None on a CPU or another version of Python."""
    fits = sys.version_info[:2] == packed.PYTHON and not options.cpu
    return packed.place() if fits else None


def _finish(stage: Stage, folder: Path, ending: str, code: int) -> None:
    """Add how a stage ended to its record, and print the record."""
    path = folder / f"{stage.name}.json"
    if path.is_file():
        record = json.loads(path.read_text("utf-8"))
    else:  # the stage ended before its first row
        record = {"stage": stage.name, "device": "unknown", "versions": {}, "rows": []}
        record |= {"failed": {}, "left_out": [], "notes": []}
    if code:
        record["notes"].append(f"the stage {ending}; see first_gpu.log")
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(page.section(record), flush=True)


def run_stage(options: argparse.Namespace) -> int:
    """Run one stage in this process; return 1 if a row failed."""
    record = StageRecord(
        options.run,
        options.out,
        time.monotonic() + MARGIN * options.limit_s,
        about={"device": "unknown", "versions": _versions(), "is_rehearsal": options.rehearse},
    )
    record.path.unlink(missing_ok=True)
    try:
        with _device(options):
            _run(record, options)
    except StageStoppedError:
        return 1
    return int(bool(record.failed))


def _run(record: StageRecord, options: argparse.Namespace) -> None:
    """Run the stage, and record the name of its device."""
    common = {"is_tiny": options.tiny}
    if options.run == "vllm":
        from gpu import vllm_side

        record.about["device"] = _name(options)
        vllm_side.run(record, rounds=options.rounds, begin_when=options.begin_when, **common)
        return
    if options.run == "tests":
        from gpu import suites

        record.about["device"] = _name(options)
        suites.run(record, is_tiny=options.rehearse or options.tiny)
        return
    if options.run == "programs":
        from gpu import programs

        record.about["device"] = _name(options)
        where = "cpu" if options.cpu else None if options.rehearse else "cuda"
        programs.run(record, device=where, rounds=options.rounds, **common)
        return
    if options.cpu:
        from gpu import ours

        record.about["device"] = _name(options)
        ours.run(record, device="cpu", rounds=options.rounds, **common)
        return
    import torch

    record.about["device"] = torch.cuda.get_device_name()
    record.synchronize = torch.cuda.synchronize
    device = torch.device("cuda", 0)
    if options.run in ("ours", "decode"):
        from gpu import decode, ours

        if options.run == "ours":
            ours.run(record, device=str(device), rounds=options.rounds, **common)
        else:
            decode.run(record, device=str(device), **common)
        return
    with torch.inference_mode():
        _run_kernels(record, device, options)


def _run_kernels(record: StageRecord, device: Any, options: argparse.Namespace) -> None:
    """Run a stage that measures kernels."""
    if options.run == "micro":
        from gpu import micro

        micro.Micro(record, device, is_tiny=options.tiny).run()
    elif options.run == "smoke":
        from gpu import smoke

        smoke.run(record, device, is_tiny=options.tiny)
        if options.rehearse:
            record.note("not rehearsed: the small model, because a fake device computes no numbers")
        else:
            smoke.run_model(record, device)
    elif options.run == "grid":
        from gpu import grid

        rounds = 1 if options.tiny else 5 if options.rivals else 11
        rivals = options.rivals or ("",)
        grid.run(record, device, is_tiny=options.tiny, rounds=rounds, rivals=rivals)
    else:
        from gpu import sweep

        rounds = 1 if options.tiny else 9
        sweep.run(record, device, is_tiny=options.tiny, rounds=rounds)


@contextlib.contextmanager
def _device(options: argparse.Namespace) -> Iterator[None]:
    """Replace the GPU by a fake one for a rehearsal."""
    if options.cpu or not options.rehearse or options.run in ("vllm", "tests", "programs"):
        yield
        return
    from conure.engine.models.probe import LayerKVSpec
    from conure.engine.testing.fake_cuda import fake_cuda
    from gpu.shapes import LLAMA_3_8B, SMALL

    shape = {**LLAMA_3_8B, **(SMALL if options.tiny else {})}
    sizes = (shape["num_key_value_heads"], shape["head_dim"], shape["head_dim"])
    layers = [
        LayerKVSpec(*sizes, window=None, source=index)
        for index in range(shape["num_hidden_layers"])
    ]
    with fake_cuda(layers, compiles=options.compile):
        yield


def _name(options: argparse.Namespace) -> str:
    """Return the name of the GPU, or of this CPU in a rehearsal and with `--cpu`."""
    if options.rehearse or options.cpu:
        return f"CPU {platform.machine()}"
    import torch

    return torch.cuda.get_device_name()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure everything on a GPU, in stages.")
    parser.add_argument("stages", nargs="*", choices=[*STAGES, []], metavar="STAGE")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit-s", type=float, help="time limit of each stage (default: its own)")
    parser.add_argument("--rounds", type=int, default=2, help="counted rounds of requests (2)")
    parser.add_argument("--rehearse", action="store_true", help="use a fake device")
    parser.add_argument("--compile", action="store_true", help="compile kernels in a rehearsal")
    parser.add_argument("--cpu", action="store_true", help="run ours, vllm, programs on this CPU")
    parser.add_argument("--tiny", action="store_true", help="use small shapes")
    parser.add_argument("--packed", type=Path, default=ROOT, help="folder of what pack.sh made")
    parser.add_argument(
        "--rivals", nargs="+", default=[], metavar="NAME", help="contenders of a shorter grid"
    )
    parser.add_argument("--begin-when", type=Path, help="file that vllm waits for when it is ready")
    parser.add_argument("--run", choices=list(STAGES), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cpu and not set(options.stages or [options.run]) <= {"ours", "vllm", "programs"}:
        parser.error("--cpu runs the stages ours, vllm and programs only")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
