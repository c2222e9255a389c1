"""The instruction sets of Arm, cross-compiled and emulated; needs g++ for aarch64 and qemu-user."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from conure.kernels.cpu import library

CHECK = Path(__file__).parent / "foreign_check.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HOST_COMPILER = next(filter(None, map(shutil.which, library.COMPILERS)), None)
SETS = [each for each in library.INSTRUCTION_SETS if each.machine == "aarch64"]


@pytest.mark.skipif(HOST_COMPILER is None, reason="needs a C++ compiler")
def test_check_compiles() -> None:
    options = ["-std=c++17", "-fsyntax-only", f"-I{library.SOURCES}"]
    command = [str(HOST_COMPILER), *options, str(CHECK)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR}: apt install g++-aarch64-linux-gnu qemu-user",
)
@pytest.mark.parametrize("instructions", SETS, ids=lambda each: each.name)
def test_kernels_equal_float64_on_arm(instructions: library.InstructionSet, tmp_path: Path) -> None:
    options = [each for each in library.OPTIONS if each not in ("-shared", "-fPIC")]
    sources = [*library.SOURCES.glob("*.cpp"), CHECK]
    program = tmp_path / "check"
    command = [COMPILER, *options, *instructions.options, "-static", f"-I{library.SOURCES}"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run(
        [EMULATOR, "-cpu", "max", str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("error") >= 90
