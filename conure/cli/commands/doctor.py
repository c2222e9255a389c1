"""`conure doctor`: find out why a server cannot start, or is slower than it could be.

Each check reads one fact about this machine and names the cause and the cure of a problem. No check
changes anything.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from conure import __version__
from conure.adapters.client.connection import MAX_PORT
from conure.server.config import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    Config,
    ConfigError,
    default_data_folder,
)
from conure.server.listener import PortError, address, bind
from conure.server.prompts.model_notices import NO_CHAT_TEMPLATE
from conure.server.store.database import check_folder
from conure.server.store.records import JournalError

from ..command import ExitCode, UsageError, file_path
from ..main import EXTRA_OF_MODULE
from ..terminal import pretty
from .serve import check_model_argument

OLDEST_PYTHON = (3, 11)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MEMORY_INFO = Path("/proc/meminfo")
PACKAGE = Path(__file__).parents[2]
COMPILERS = ("c++", "g++", "clang++")
PREBUILT_KERNELS = Path("kernels", "cpu", "prebuilt")
"""Folder inside of the package with the libraries of wheels that contain compiled kernels."""
MIN_CACHE_BYTES = 256 << 20
"""Smallest useful memory for KV cache and activations, in addition to the weights."""
MIN_FREE_BYTES = 1 << 30
"""Free disk space below which the check of the journal's folder advises the user."""

OWN_MODELS = frozenset({"builtin", "seeded"})
"""Models of the package, as in `engine.models.registry`, whose import would load torch."""


class Finding(NamedTuple):
    """The result of one check."""

    level: Literal["ok", "note", "problem"]
    subject: str
    text: str
    """What was found and, unless all is well, what to do."""


class Machine(NamedTuple):
    """What the checks read. Tests replace it."""

    has_module: Callable[[str], bool]
    has_driver: bool
    """An NVIDIA driver is loaded."""
    torch_cuda: str | None
    """CUDA version that torch was built for; None without CUDA or without torch."""
    cuda_error: str
    """Why torch cannot use a GPU; empty if it can."""
    available_bytes: int
    """Main memory that a new process can use."""
    compiler: str | None
    """Path of the C++ compiler."""
    named_compiler: str = ""
    """The value of `CXX`."""
    has_prebuilt_kernels: bool = False
    free_gpu_bytes: int | None = None
    """Free memory of the GPU that torch uses; None without one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure doctor`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory or name of the model that the server is to load",
    )
    parser.add_argument("--host", default=DEFAULT_HOST, help="address that the server is to use")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port that the server is to use"
    )
    parser.add_argument(
        "--data", type=file_path, help="journal directory that the server is to use"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them is a problem."""
    machine = read_machine()
    port = [*check_port(arguments.host, arguments.port)]
    has_server = arguments.data is None and any(finding.level == "note" for finding in port)
    findings = [
        *check_python(),
        *check_extras(machine),
        *check_gpu(machine),
        *check_compiler(machine),
        *port,
        *check_data(arguments.data or default_data_folder(), has_server=has_server),
        *check_model(arguments.model, machine),
    ]
    if arguments.json:
        found = [finding._asdict() for finding in findings]
        sys.stdout.write(pretty(found) + "\n")
    else:
        for finding in findings:
            sys.stdout.write(f"{finding.level:<8} {finding.subject:<9} {finding.text}\n")
    has_problem = any(finding.level == "problem" for finding in findings)
    return ExitCode.FAILED if has_problem else ExitCode.DONE


def read_machine() -> Machine:
    """Read the facts about this machine."""
    torch_cuda, cuda_error = _torch_cuda()
    return Machine(
        has_module=lambda name: importlib.util.find_spec(name) is not None,
        has_driver=NVIDIA_DRIVER.exists(),
        torch_cuda=torch_cuda,
        cuda_error=cuda_error,
        available_bytes=available_memory(),
        compiler=find_compiler(),
        named_compiler=os.environ.get("CXX", ""),
        has_prebuilt_kernels=any((PACKAGE / PREBUILT_KERNELS).glob("*.so")),
        free_gpu_bytes=None if torch_cuda is None or cuda_error else _free_gpu_memory(),
    )


def find_compiler() -> str | None:
    """Return the path of the C++ compiler that compiles the CPU kernels: $CXX, or a known one."""
    named = os.environ.get("CXX", "")
    names = [named] if named else [*COMPILERS]
    with contextlib.suppress(ValueError):  # a quote is not closed
        names += shlex.split(named)[:1]
    return next(filter(None, map(shutil.which, names)), None)


def _torch_cuda() -> tuple[str | None, str]:
    """Return the CUDA version of torch, and why it cannot use a GPU."""
    try:
        import torch
    except (ImportError, OSError) as exc:
        return None, f"torch cannot be imported: {exc}"
    version = torch.version.cuda
    if version is None:
        return None, "this torch is built without CUDA"
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as exc:
        return version, " ".join(str(exc).split())
    return version, ""


def _free_gpu_memory() -> int:
    """Return the free bytes of the GPU that torch uses."""
    import torch

    return torch.cuda.mem_get_info()[0]


def available_memory() -> int:
    """Return the bytes of main memory that a new process in the same control groups can use."""
    from conure.engine.runner.control_groups import OWN_GROUPS

    return max(0, int(min(_available_on_machine(), OWN_GROUPS.free_bytes())))


def _available_on_machine() -> int:
    with contextlib.suppress(OSError):  # other systems than Linux
        for line in MEMORY_INFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_python() -> Iterator[Finding]:
    """Check version and platform."""
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("problem", "python", f"Python {version} is too old; install 3.11 or newer")
    elif sys.platform != "linux":
        yield Finding(
            "problem", "python", f"Conure runs on Linux, not on {sys.platform}; use WSL or Docker"
        )
    else:
        yield Finding("ok", "python", f"{version}, conure {__version__}")


def check_extras(machine: Machine) -> Iterator[Finding]:
    """Check that the packages of a server are installed."""
    missing = [
        name
        for name, extra in EXTRA_OF_MODULE.items()
        if extra == "serve" and not machine.has_module(name)
    ]
    if missing:
        names = ", ".join(missing)
        yield Finding("problem", "packages", f"a server needs {names}: pip install 'conure[serve]'")
    else:
        yield Finding("ok", "packages", "everything that a server needs is installed")


def check_gpu(machine: Machine) -> Iterator[Finding]:
    """Check whether torch can use a GPU."""
    if machine.torch_cuda is not None and not machine.cuda_error:
        if machine.has_module("triton"):
            yield Finding("ok", "gpu", f"torch uses CUDA {machine.torch_cuda}")
        else:
            yield Finding("problem", "gpu", "the GPU kernels need triton: pip install triton")
    elif not machine.has_driver:
        yield Finding("note", "gpu", "no NVIDIA driver is loaded, so a server computes on the CPU")
    elif machine.torch_cuda is None:
        yield Finding(
            "problem",
            "gpu",
            f"a driver is loaded, but {machine.cuda_error}; install a CUDA build: "
            "pip install --force-reinstall torch",
        )
    else:
        yield Finding(
            "problem",
            "gpu",
            f"a driver is loaded, but torch (CUDA {machine.torch_cuda}) cannot use it: "
            f"{machine.cuda_error}; update the driver, or install a torch for an older CUDA",
        )


def check_compiler(machine: Machine) -> Iterator[Finding]:
    """Check that the CPU kernels can be compiled."""
    if machine.has_prebuilt_kernels:
        yield Finding("ok", "compiler", "not needed: the package contains compiled CPU kernels")
    elif machine.compiler is None:
        cause, cure = "no C++ compiler", "install one (`apt install g++`), or set CXX to its path"
        if machine.named_compiler:
            cause = f"CXX is {machine.named_compiler!r}, which is not a program"
            cure = "unset or correct it"
        yield Finding(
            "note", "compiler", f"{cause}, so the CPU kernels run as slower torch operators; {cure}"
        )
    else:
        yield Finding("ok", "compiler", machine.compiler)


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Check that a server may use the address, and that the port is free.

    A Conure server that uses the port already is a note.
    """
    try:
        Config(data=Path(), host=host, port=port)
    except ConfigError as exc:
        yield Finding("problem", "port", str(exc))
        return
    try:
        bind(host, port).close()
    except PortError as exc:
        other = f"conure serve --port {port + 1 if port < MAX_PORT else port - 1}"
        level: Literal["note", "problem"] = "problem"
        if exc.has_conure:
            level, advice = "note", f"start a second one with {other} --data DIR"
        elif exc.is_in_use:
            advice = f"stop the process that uses the port (`ss -ltnp sport = :{port}`), or choose "
            advice += f"another: {other}"
        else:
            advice = f"choose another: conure serve --host {DEFAULT_HOST} --port {DEFAULT_PORT}"
        yield Finding(level, "port", f"{exc}; {advice}")
        return
    yield Finding("ok", "port", f"{address(host, port)} is free")


def check_data(folder: Path, *, has_server: bool = False) -> Iterator[Finding]:
    """Check that the journal directory can be written and that no server uses it.

    Args:
        folder: the directory.
        has_server: a Conure server runs that may use the directory, so its use is a note.
    """
    try:
        existing = check_folder(folder)
    except JournalError as exc:
        is_expected = has_server and exc.code == "store.locked"
        level: Literal["note", "problem"] = "note" if is_expected else "problem"
        yield Finding(level, "data", f"{exc} (conure serve --data DIR)")
        return
    free = shutil.disk_usage(existing).free
    space = f"{folder}, {free / 1e9:.1f} GB free"
    if free > MIN_FREE_BYTES:
        yield Finding("ok", "data", space)
    else:
        cure = "free some space, or choose another folder: conure serve --data DIR"
        yield Finding("note", "data", f"{space}; {cure}")


def check_model(model: str | None, machine: Machine) -> Iterator[Finding]:
    """Check that a model directory is complete and fits into memory."""
    if model is None or model in OWN_MODELS:
        return
    try:
        check_model_argument(model)
    except UsageError as exc:
        yield Finding("problem", "model", str(exc))
        return
    folder = Path(model).expanduser()
    is_local = folder.is_dir()
    if not is_local and (model.count("/") != 1 or model.startswith((".", "/", "~"))):
        yield Finding("problem", "model", f"there is no directory {model}")
        return
    if not all(map(machine.has_module, ("huggingface_hub", "tokenizers", "safetensors"))):
        yield Finding("note", "model", f"{model} is not checked until all packages are installed")
        return
    from conure.engine.models.inspection import (
        downloaded_folder,
        has_chat_template,
        problem_of,
        size_in_memory,
    )

    if not is_local:
        downloaded = downloaded_folder(model)
        # Other programs may have downloaded some files only: a server fetches the others.
        if downloaded is None or problem_of(downloaded) is not None:
            message = f"{model} is downloaded from the Hub at the first start, and checked then"
            yield Finding("note", "model", message)
            return
        folder = downloaded
    if (problem := problem_of(folder)) is not None:
        yield Finding("problem", "model", problem)
        return
    device, memory, available = "cpu", "memory", machine.available_bytes
    if machine.free_gpu_bytes is not None:
        device, memory, available = "cuda", "GPU memory", machine.free_gpu_bytes
    size = size_in_memory(folder, device)
    if size + MIN_CACHE_BYTES > available:
        yield Finding(
            "problem",
            "model",
            f"the weights of {model} take {size / 1e9:.1f} GB, and only "
            f"{available / 1e9:.1f} GB of {memory} are available; end other programs, "
            "or choose a smaller model",
        )
        return
    yield Finding("ok", "model", f"{model}, {size / 1e9:.1f} GB of weights")
    if not has_chat_template(folder):
        yield Finding("note", "model", NO_CHAT_TEMPLATE)
