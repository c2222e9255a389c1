"""The shared library of the C++ kernels: finding, compiling and loading it.

There is one library per instruction set, compiled from all `*.cpp` files of `SOURCES`. Its name
contains the digest of these sources, so a library of other sources is never loaded. Wheels contain
libraries in `PREBUILT`; otherwise the system's compiler makes one when it is first needed, which
takes some seconds, and it is kept in the user's cache folder. A file ends with the digest of its
contents, so a damaged library is not loaded but compiled again.

Out of scope: torch; the functions take addresses.

Invariants: a library is loaded only on a processor that has all of its instructions.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from conure.cache_folder import cache_folder

SOURCES: Final = Path(__file__).parent / "source"
PREBUILT: Final = Path(__file__).parent / "prebuilt"
COMPILERS: Final = ("c++", "g++", "clang++")
OPTIONS: Final = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-ffp-contract=fast"),
)
COMPILE_SECONDS: Final = 300
AUTO: Final = "auto"


class LibraryUnavailableError(Exception):
    """No library exists for this machine; the message contains the reason and the remedy."""


class InstructionSet(NamedTuple):
    """Instructions that a library may use."""

    name: str
    machine: str
    """The machine's name, as in `platform.machine`; empty for any."""
    flags: frozenset[str]
    """Flags that the system reports for a processor with these instructions."""
    options: tuple[str, ...]
    """Options of the compiler."""


_V3: Final = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE: Final = ("-march=x86-64-v4", "-mprefer-vector-width=512")
INSTRUCTION_SETS: Final = (
    InstructionSet("avx512bf16", "x86_64", _V4 | {"avx512_bf16"}, (*_WIDE, "-mavx512bf16")),
    InstructionSet("avx512", "x86_64", _V4, _WIDE),
    InstructionSet("avx2", "x86_64", _V3, ("-march=x86-64-v3",)),
    InstructionSet("neonbf16", "aarch64", frozenset({"asimd", "bf16"}), ("-march=armv8.2-a+bf16",)),
    InstructionSet("neon", "aarch64", frozenset({"asimd"}), ()),
    InstructionSet("plain", "", frozenset(), ()),
)
"""All instruction sets, the fastest of each machine first."""
NAMES: Final = tuple(each.name for each in INSTRUCTION_SETS)


def supported(
    machine: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")
) -> list[InstructionSet]:
    """Return the instruction sets of this machine, the fastest first.

    Args:
        machine: Its name; None for that of `platform.machine`.
        cpuinfo: The system's description of the processors.
    """
    machine = machine or platform.machine()
    flags = _flags(cpuinfo)
    return [
        each for each in INSTRUCTION_SETS if each.machine in ("", machine) and each.flags <= flags
    ]


def has_matrix_unit(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies bfloat16 matrices, as oneDNN does with them."""
    return bool(_flags(cpuinfo) & {"amx_bf16", "bf16"})


def prefers_pairs(instructions: InstructionSet, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether products of bfloat16 pairs are faster than those of floats.

    AMD's processors execute them at the rate of float products, so twice as many numbers are
    multiplied. Intel's execute a quarter as many.
    """
    is_amd = "AuthenticAMD" in _values("vendor_id", cpuinfo)
    return is_amd and "avx512_bf16" in instructions.flags


def find(name: str = AUTO) -> InstructionSet:
    """Return an instruction set of this machine by name, or the fastest one.

    Raises:
        ValueError: if the machine does not have it.
    """
    available = supported()
    if name == AUTO:
        return available[0]
    for each in available:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in available)
    raise ValueError(f"{name!r} is not an instruction set of this processor, which has {names}")


def load(instructions: InstructionSet, environment: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """Load the library of an instruction set; compile it if there is none.

    Args:
        instructions: One of `supported()`.
        environment: Names the cache folder (`XDG_CACHE_HOME`, `HOME`) and the compiler (`CXX`).

    Raises:
        LibraryUnavailableError: if there is no library and it cannot be compiled.
    """
    prebuilt = PREBUILT / file_name(instructions)
    if _is_intact(prebuilt):
        return _open(prebuilt)
    try:
        path = cache_folder(environment) / "kernels" / prebuilt.name
    except FileNotFoundError as error:
        raise LibraryUnavailableError(error.strerror) from error
    if not _is_intact(path):
        try:
            _build_once(instructions, path, environment)
        except OSError as error:
            raise LibraryUnavailableError(
                f"{path.parent} cannot be written ({error.strerror}); "
                "set XDG_CACHE_HOME to another folder"
            ) from error
    return _open(path)


def _build_once(instructions: InstructionSet, path: Path, environment: Mapping[str, str]) -> None:
    """Compile a library, unless another process compiles the same one meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_intact(path):
            build(instructions, path.parent, environment)


def build(
    instructions: InstructionSet, folder: Path, environment: Mapping[str, str] = os.environ
) -> Path:
    """Compile a library into a folder; return its path.

    Raises:
        LibraryUnavailableError: if there is no compiler, or it fails.
        OSError: if the folder cannot be written.
    """
    compiler = _compiler(environment)
    target = folder / file_name(instructions)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        library = Path(scratch) / "library.so"
        _compile([*compiler, *OPTIONS, *instructions.options], library)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        library.replace(target)
    return target


def _compiler(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the compiler: `CXX`, which may have arguments, or a known one.

    Raises:
        LibraryUnavailableError: if there is none.
    """
    named = environment.get("CXX", "")
    if not named:
        found = next(filter(None, map(shutil.which, COMPILERS)), None)
        if found is None:
            raise LibraryUnavailableError(
                "no C++ compiler found; install one, for example with apt install g++"
            )
        return [found]
    with contextlib.suppress(ValueError):  # a quote is not closed
        for words in ([named], shlex.split(named)):
            if words and (program := shutil.which(words[0])) is not None:
                return [program, *words[1:]]
    raise LibraryUnavailableError(
        f"CXX is {named!r}, which does not start with a program; install a compiler, for example "
        "with apt install g++, and set CXX to it or unset it"
    )


def build_all(folder: Path, machine: str | None = None) -> list[Path]:
    """Compile the libraries of all instruction sets of a machine, as wheels contain them.

    Raises:
        LibraryUnavailableError: as `build`.
    """
    machine = machine or platform.machine()
    return [build(each, folder) for each in INSTRUCTION_SETS if each.machine in ("", machine)]


def file_name(instructions: InstructionSet) -> str:
    """Return the name of a library, which is different for different sources."""
    digest = hashlib.sha256(repr((OPTIONS, instructions.options)).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{platform.machine()}-{instructions.name}-{digest.hexdigest()[:16]}.so"


def _flags(cpuinfo: Path) -> set[str]:
    """Return the flags of the processor, empty if the system does not report them."""
    return _values("flags", cpuinfo) | _values("Features", cpuinfo)


def _values(name: str, cpuinfo: Path) -> set[str]:
    """Return what the system reports of the first processor under a name."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text("utf-8", errors="replace").splitlines():
            key, _, values = line.partition(":")
            if key.strip() == name:
                return set(values.split())
    return set()


def _compile(command: Sequence[str], library: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    try:
        done = subprocess.run(
            [*command, *sources, "-o", str(library)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LibraryUnavailableError(
            f"{command[0]} did not finish within {COMPILE_SECONDS} s"
        ) from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise LibraryUnavailableError(
            f"{command[0]} failed: {first.strip()[:200]}; install g++ 12 or clang 16, or newer"
        )


def _is_intact(path: Path) -> bool:
    """Return whether a file exists and ends with the digest of its contents."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryUnavailableError(f"{path} cannot be loaded: {error}") from error
