"""The tests for a GPU, with compiled kernels: suites that run side by side, then one alone.

Each suite is a row. It fails with the first lines of what failed. The machine's processors share
the tests of a suite if pytest-xdist is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .record import Figures, StageRecord

ROOT: Final = Path(__file__).parents[2]
KERNELS: Final = ROOT / "tests" / "kernels"
TOGETHER: Final = {
    "attention": ("test_ops.py", "gpu/test_merging.py", "gpu/test_launcher.py"),
    "other kernels": ("test_elementwise.py", "test_sampling.py", "test_large_caches.py"),
    "engine": ("../engine/runner/test_gpu.py",),
}
"""Suites that run at the same time: files in the tests of the kernels."""
ALONE: Final = "memory"
"""A suite that measures the memory of the whole device."""
ALONE_FILES: Final = ("../engine/runner/test_gpu_memory.py",)
KINDS: Final = "not cpu and not invariant"
"""The tests of kernels that run on a GPU, by their names and those of implementations."""
PROCESSES: Final = 5
"""Processes of a suite. Each has a CUDA context and compiles kernels."""


class FailedError(AssertionError):
    """A suite failed."""


def run(record: StageRecord, *, is_tiny: bool) -> None:
    """Run all suites; a tiny run only collects their tests."""
    started = {
        suite: _start(files, record, num_processes=PROCESSES, is_tiny=is_tiny)
        for suite, files in TOGETHER.items()
    }
    for suite, finish in started.items():
        record.measure(suite, finish)
    record.measure(ALONE, lambda: _start(ALONE_FILES, record, num_processes=0, is_tiny=is_tiny)())


def _start(
    files: tuple[str, ...], record: StageRecord, *, num_processes: int, is_tiny: bool
) -> Callable[[], Figures]:
    """Start a suite; return what waits for its result.

    The plugins that the project configures may be missing, so its configuration is not read.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={ROOT}"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore"]
    paths = [os.path.normpath(KERNELS / file) for file in files]
    command += ["--maxfail=20", *paths]
    if any(Path(path).is_relative_to(KERNELS) for path in paths):
        command += ["-k", KINDS]
    if is_tiny:
        command += ["--collect-only"]
    elif num_processes and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(num_processes)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def finish() -> Figures:
        left_s = max(1.0, record.deadline_s - record.clock())
        try:
            output, _ = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise FailedError(f"no result after {left_s:.0f} s") from error
        print(output[-20_000:], flush=True)
        lines = [line for line in output.splitlines() if line.strip()]
        summary = lines[-1] if lines else "no output"
        if process.returncode:
            failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            raise FailedError("; ".join([summary, *failed[:3]]))
        return {"result": summary}

    return finish
