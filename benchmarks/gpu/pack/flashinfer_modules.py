"""Compile the FlashInfer kernels that `kernels.py` compares with, on a machine with nvcc.

    PYTHONPATH=.:benchmarks python benchmarks/gpu/pack/flashinfer_modules.py [--fa3] [--jobs N]

The compiled kernels are placed where FlashInfer looks for its packaged ones, so the folder in
which it is installed can be copied to a machine with a GPU. Compiling needs neither a GPU nor a
CUDA build of torch. On one core FA2 takes 2 minutes and FA3 8 minutes; FA3 also needs the headers
of curand (`CPATH`).

Supports FlashInfer 0.6 and 0.7.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence

import torch


def main(arguments: Sequence[str]) -> None:
    """Compile the modules that are missing."""
    parser = argparse.ArgumentParser(description="Compile FlashInfer kernels ahead of time.")
    parser.add_argument(
        "--fa3", action="store_true", help="also compile FA3, the default of the cascade"
    )
    parser.add_argument("--jobs", type=int, help="parallel compiler jobs (MAX_JOBS, or 1)")
    options = parser.parse_args(arguments)
    # FlashInfer reads these variables at import.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    if options.jobs is not None:
        os.environ["MAX_JOBS"] = str(options.jobs)
    os.environ.setdefault("MAX_JOBS", "1")
    from attention.flashinfer_contenders import cascade_module, prefill_module

    modules = [cascade_module(), prefill_module("fa2", torch.bfloat16, 128)]
    if options.fa3:
        modules.append(prefill_module("fa3", torch.bfloat16, 128))
    for module in modules:
        began = time.monotonic()
        if not module.is_aot:
            module.build(verbose=False)
            module.aot_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(module.jit_library_path, module.aot_path)
        print(f"{module.aot_path}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
