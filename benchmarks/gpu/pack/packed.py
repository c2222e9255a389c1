"""Unpacks what `pack.sh` collected on another machine, for one without a network.

    .gpu     wheels that the machine lacks, FlashInfer, compiled Triton kernels
    .gpu_v   vLLM's Python, its dependencies and its attention kernels
    .gpu_c   vLLM's core operators
    .gpu_s   wheels that only the server needs

Each folder is smaller than what may travel at once; they are copied to one place, in any order.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDERS: Final = (".gpu", ".gpu_v", ".gpu_c", ".gpu_s")
PYTHON: Final = (3, 12)
"""The Python that the pieces are collected for; extension modules fit no other."""


def place() -> Path:
    """Return where pieces are unpacked, for all later stages on the machine."""
    return Path(os.environ.get("CONURE_GPU", "/tmp/conure-gpu"))


def unpack(root: Path, here: Path) -> list[str]:
    """Unpack the folders in a repository's root that have not been unpacked; return their files."""
    unpacked = []
    for folder in FOLDERS:
        for piece in sorted((root / folder).rglob("*")) if (root / folder).is_dir() else ():
            marker = here / "pieces" / piece.name
            if piece.is_dir() or marker.exists():
                continue
            _unpack(piece, here)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
            unpacked.append(str(piece.relative_to(root)))
    return unpacked


def environment(root: Path, here: Path | None, *, uses_vllm: bool) -> dict[str, str]:
    """Return the environment of a stage, without pieces if `here` is None.

    vLLM's dependencies hide those of the machine, and it compiles kernels if it finds FlashInfer,
    so both are visible to their own stages only.
    """
    paths = [str(root), str(root / "benchmarks")]
    result = {"PYTHONUNBUFFERED": "1"}
    if here is not None:
        folders = ("vllm", "vllm_deps") if uses_vllm else ("site",)
        paths += [str(here / folder) for folder in folders]
        result["CONURE_FA3"] = str(here / "vllm")
        if (here / "triton").is_dir():
            result["TRITON_CACHE_DIR"] = str(here / "triton")
    given = os.environ.get("PYTHONPATH")
    result["PYTHONPATH"] = os.pathsep.join([*paths, *([given] if given else [])])
    return result


def sizes(root: Path) -> Mapping[str, int]:
    """Return the bytes of each folder that exists."""
    return {
        folder: sum(each.stat().st_size for each in (root / folder).rglob("*") if each.is_file())
        for folder in FOLDERS
        if (root / folder).is_dir()
    }


def _unpack(piece: Path, here: Path) -> None:
    """Unpack a wheel into `site`, and `NAME.tar.xz` into the folder NAME."""
    if piece.suffix == ".whl":
        with zipfile.ZipFile(piece) as wheel:
            wheel.extractall(here / "site")
    elif piece.name.endswith(".tar.xz"):
        # Parts of one folder are numbered: vllm-1.tar.xz, vllm-2.tar.xz.
        name = piece.name.removesuffix(".tar.xz").partition("-")[0]
        with tarfile.open(piece) as archive:
            archive.extractall(here / name, filter="data")
    else:
        (here / "other").mkdir(parents=True, exist_ok=True)
        shutil.copy(piece, here / "other")
