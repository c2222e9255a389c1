"""Builds the FlashInfer kernels that `kernels.py` compares with, on a machine with nvcc.

    python benchmarks/flashinfer_modules.py [--fa3] [--jobs N]

Each is laid where FlashInfer looks for what came with its package, so that the folder it is
installed in can be carried to a machine with the GPU and loads there without compiling. No
GPU is needed to build, and no CUDA build of torch. One core takes 2 minutes for FA2 and 8
for FA3, which also wants the headers of curand (`CPATH`).

Knows FlashInfer 0.6 and 0.7.
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
    """Build what is not there yet."""
    parser = argparse.ArgumentParser(description="Build FlashInfer kernels ahead of time.")
    parser.add_argument("--fa3", action="store_true", help="the default of its cascade, too")
    parser.add_argument("--jobs", type=int, default=1, help="files compiled at a time (1)")
    options = parser.parse_args(arguments)
    # FlashInfer reads these when it is imported.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    os.environ.setdefault("MAX_JOBS", str(options.jobs))
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
