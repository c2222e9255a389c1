"""Every implementation of the operations that can run here, by a name for tests.

The C++ kernels count once per instruction set of this processor: `cpu-avx2`, `invariant-plain`.
"""

from __future__ import annotations

import os

import torch

from conure.kernels import elementwise, ops
from conure.kernels.cpu import library

INSTRUCTIONS = tuple(each.name for each in library.supported())
NAMES = (
    "reference",
    *(f"{kind}-{name}" for kind in ("cpu", "invariant") for name in INSTRUCTIONS),
    "triton",
)
TRITON_DEVICE = torch.device("cuda" if os.environ.get("TRITON_INTERPRET") == "0" else "cpu")
"""The device of Triton kernels: a GPU runs compiled ones, a CPU interprets them."""
ELEMENTWISE_NAMES = (*(f"cpu-{name}" for name in INSTRUCTIONS), "triton")


def attention(name: str) -> ops.AttentionOperations:
    """Return the attention operations of an implementation."""
    kind, _, instructions = name.partition("-")
    return ops.implementation(kind, instructions or library.AUTO)


def between_products(name: str) -> elementwise.ElementwiseOperations:
    """Return the elementwise operations of an implementation."""
    kind, _, instructions = name.partition("-")
    return elementwise.implementation(kind, instructions or library.AUTO)
