"""Sampling of tokens on a CPU, by the C++ kernels.

Shapes: as in `conure.kernels.sampling`.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor

from ..truncation import Truncation
from .attention import NativeLibrary

_SAMPLE: Final = struct.Struct("@9P4q")
"""`SampleArguments` in sampling.cpp."""


class CpuSampling:
    """Sampling by the C++ kernels; see `sampling.SamplingOperations`."""

    def __init__(self, native: NativeLibrary) -> None:
        self._native: Final = native

    def sample(
        self,
        scores: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        noise_keys: Tensor,
        truncation: Truncation,
    ) -> Tensor:
        """See `sampling.SamplingOperations`."""
        assert scores.device.type == "cpu", f"addresses of {scores.device} are not the processor's"
        tokens = torch.empty(len(rows), dtype=torch.int64)
        # Each name keeps a contiguous copy alive until the call returns.
        inputs = [each.contiguous() for each in (rows, temperatures, noise_keys, *truncation)]
        scores = scores.contiguous()
        arguments = _SAMPLE.pack(
            scores.data_ptr(),
            *(each.data_ptr() for each in (*inputs, tokens)),
            scores.stride(0),
            scores.shape[1],
            len(rows),
            len(truncation.rows),
        )
        self._native.functions.conure_sample(arguments, self._native.threads())
        return tokens
