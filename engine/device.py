"""The device that a model runs on: which one it is and what memory it has left.

`cpu` computes in main memory. `cuda` is torch's name for an accelerator, `cuda:N` for one of
several, and `auto` takes the first accelerator that torch sees, or else the CPU.

Knows torch's devices and the machine; refuses to know models and caches. Kept true: a device
that `pick` returned exists.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from .api import EngineError

KEPT_BYTES: Final = 2**25
"""Blocks up to this size are kept when freed; the largest that the C library allows."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_DTYPES: Final = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


def pick(name: str) -> torch.device:
    """Return a device by name; nothing is allocated there.

    Args:
        name: `cpu`, `cuda`, `cuda:N` or `auto`.

    Raises:
        EngineError: `engine.bad_option` if there is no such device.
    """
    num_devices = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if num_devices else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not (kind == "cuda" and number.isdecimal())):
        raise EngineError(
            "engine.bad_option", f"device must be cpu, cuda, cuda:N or auto, got {name!r}"
        )
    if kind == "cpu":
        return torch.device("cpu")
    index = int(number or 0)
    if index >= num_devices:
        seen = f"sees {num_devices} of them" if num_devices else "sees no CUDA device"
        raise EngineError("engine.bad_option", f"device is {name!r}, but torch {seen}")
    if find_spec("triton") is None:
        raise EngineError(
            "engine.bad_option", f"device is {name!r}, which needs triton: pip install triton"
        )
    return torch.device("cuda", index)


def check_dtype(name: str, device: torch.device) -> None:
    """Refuse a dtype that models do not run in on a device.

    Raises:
        EngineError: `engine.bad_option`.
    """
    known = _DTYPES[device.type]
    if name not in (*known, "auto"):
        raise EngineError(
            "engine.bad_option", f"dtype must be {', '.join(known)} or auto, got {name!r}"
        )


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that this process may still take.

    Main memory is bounded by the machine and by the process's control group.
    """
    if device.type == "cuda":
        # What torch keeps for itself is counted as taken.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = {name: number for name, _, number in (line.partition(":") for line in lines)}
    free = int(found["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file():
        ceiling = limit.read_text(encoding="ascii").strip()
        if ceiling != "max":
            free = min(free, int(ceiling) - int(used.read_text(encoding="ascii")))
    return max(0, free)


def num_cores(
    environment: Mapping[str, str] = os.environ, topology: Path = Path("/sys/devices/system/cpu")
) -> int:
    """Return how many threads may compute at once in this process.

    That is what the environment asks for by MKL_NUM_THREADS or OMP_NUM_THREADS, as torch has it,
    and else the cores that the process may run on. Two processors of one core count once: they
    share what multiplies. torch itself cannot be asked, for it answers what it was last told.

    Args:
        environment: Of the process.
        topology: Where the system tells which processors belong to one core.
    """
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        # A list is of nested parallel regions, outermost first.
        asked = environment.get(name, "").partition(",")[0].strip()
        if asked.isdecimal() and int(asked):
            return int(asked)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = set()
    for processor in os.sched_getaffinity(0):
        listed = topology / f"cpu{processor}" / "topology" / "thread_siblings_list"
        siblings.add(listed.read_text("ascii") if listed.is_file() else str(processor))
    return len(siblings)


def keep_freed_memory() -> None:
    """Tell the C library to keep what a step frees for the next one.

    By default it gives large blocks back, and each step pays for fresh pages: 13 % of a
    prefill. Elsewhere than under glibc nothing happens.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    set_option(_M_MMAP_THRESHOLD, KEPT_BYTES)
    set_option(_M_TRIM_THRESHOLD, 16 * KEPT_BYTES)
