"""The device of a model: choosing it, and measuring its free memory and cores.

`cpu` computes in main memory. `cuda` is torch's name for an accelerator, `cuda:N` is one of
several, and `auto` is the first accelerator if the kernels run on it, otherwise the CPU.

Invariants: a device returned by `pick` exists, and the kernels run on it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from ..protocol import EngineError
from .control_groups import OWN_GROUPS, ControlGroups

KEPT_BYTES: Final = 2**25
"""Size of the largest freed block that glibc keeps; glibc allows no larger value."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_DTYPES: Final = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


def pick(name: str, *, needs_cpu: bool = False) -> torch.device:
    """Return a device by name, without allocating on it.

    Args:
        name: `cpu`, `cuda`, `cuda:N` or `auto`.
        needs_cpu: Whether another option needs a CPU; `auto` is then the CPU.

    Raises:
        EngineError: `engine.bad_option` if the device does not exist, or the kernels do not run on
            it.
    """
    num_devices = torch.cuda.device_count()
    if name == "auto":
        has_triton = num_devices > 0 and not needs_cpu and find_spec("triton") is not None
        name = "cuda" if has_triton and _why_unsupported(0) is None else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not (kind == "cuda" and number.isdecimal())):
        raise EngineError(
            "engine.bad_option", f"device must be cpu, cuda, cuda:N or auto, got {name!r}"
        )
    if kind == "cpu":
        return torch.device("cpu")
    index = int(number or 0)
    if index >= num_devices:
        counted = f"{num_devices} CUDA device{'' if num_devices == 1 else 's'}"
        found = counted if num_devices else "no CUDA device"
        raise EngineError("engine.bad_option", f"device is {name!r}, but torch finds {found}")
    if find_spec("triton") is None:
        raise EngineError(
            "engine.bad_option", f"device {name!r} needs triton: run pip install triton"
        )
    reason = _why_unsupported(index)
    if reason is not None:
        raise EngineError(
            "engine.bad_option", f"device is {name!r}, but {reason}; use another GPU, or device=cpu"
        )
    return torch.device("cuda", index)


def _why_unsupported(index: int) -> str | None:
    """Return why the kernels do not run on an accelerator; None if they do."""
    # Imported on demand: a machine without a GPU does not need triton.
    from conure.kernels.gpu.configuration import LEAST_CAPABILITY

    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    if capability >= LEAST_CAPABILITY:
        return None
    found, needed = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
    return f"{properties.name} has compute capability {found}, and the kernels need {needed}"


def describe(name: str, device: torch.device, *, needs_cpu: bool = False) -> str:
    """Return one line about a picked device, and how to pick another.

    Args:
        name: The requested name.
        device: The result of `pick`.
        needs_cpu: As in `pick`.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        line = f"device={device} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)"
        return f"{line}, found by device=auto" if name == "auto" else line
    if name != "auto":
        return "device=cpu"
    if not torch.cuda.device_count():
        return "device=cpu, because torch finds no CUDA device"
    if find_spec("triton") is None:
        return "device=cpu, because triton is not installed; for the GPU, run pip install triton"
    if needs_cpu:
        return "device=cpu, because batch_invariant needs it; turn it off to use the GPU"
    return f"device=cpu, because {_why_unsupported(0)}"


def check_dtype(name: str, device: torch.device) -> None:
    """Check that models can run in a dtype on a device.

    Raises:
        EngineError: `engine.bad_option` if not.
    """
    known = _DTYPES[device.type]
    if name not in (*known, "auto"):
        raise EngineError(
            "engine.bad_option",
            f"dtype on {device.type} must be {', '.join(known)} or auto, got {name!r}",
        )


def free_bytes(device: torch.device, groups: ControlGroups = OWN_GROUPS) -> int:
    """Return the free memory of a device.

    Free main memory is limited by the machine and, in a container, by its control group.

    Args:
        device: The device.
        groups: The control groups of the process.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches would count as used
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = {name: value for name, _, value in (line.partition(":") for line in lines)}
    free = int(values["MemAvailable"].split()[0]) * 1024
    return max(0, int(min(free, groups.free_bytes())))


def num_cores(
    environment: Mapping[str, str] = os.environ,
    topology: Path = Path("/sys/devices/system/cpu"),
    groups: ControlGroups = OWN_GROUPS,
    *,
    num_engines: int = 1,
) -> int:
    """Return how many threads can compute at once in this process.

    MKL_NUM_THREADS and OMP_NUM_THREADS take precedence, as in torch. Otherwise it is the number of
    cores that the process may run on. Two logical processors of a core count once, because they
    share its arithmetic units. A container's quota may be less than the time of its cores. With
    more threads than the quota allows, the system suspends threads during an operation, and the
    other threads wait for them. `torch.get_num_threads` cannot be used: it returns the number that
    was set last.

    Args:
        environment: The environment of the process.
        topology: The system's description of the processors, a folder.
        groups: The control groups of the process.
        num_engines: Processes that share the cores. A number from the environment applies to each
            process and is not divided.
    """
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        # A list names the threads of nested parallel regions, outermost first.
        threads = environment.get(name, "").partition(",")[0].strip()
        if threads.isdecimal() and int(threads):
            return int(threads)
    siblings = set()
    for processor in os.sched_getaffinity(0):
        path = topology / f"cpu{processor}" / "topology" / "thread_siblings_list"
        siblings.add(path.read_text("ascii") if path.is_file() else str(processor))
    return max(1, int(min(len(siblings), groups.num_processors()) / num_engines))


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory for the next step; without glibc, do nothing.

    By default glibc returns large blocks to the system, and each step must map new pages, which
    takes 13 % of a prefill.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    set_option(_M_MMAP_THRESHOLD, KEPT_BYTES)
    set_option(_M_TRIM_THRESHOLD, 16 * KEPT_BYTES)
