"""Products with bfloat16 weights on a CPU without a matrix unit, by the C++ kernels.

The kernels multiply two inputs at a time: an odd number of inputs is extended by a zero.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from .attention import NativeLibrary

_LINEAR: Final = struct.Struct("@5P3q")
"""`LinearArguments` in operations.h."""


class PackedLinear:
    """A weight in the layout of the kernels; calling it computes `inputs @ weight.T + bias`.

    Invariants: a result does not depend on the other rows of `inputs`, bit by bit.
    """

    def __init__(self, native: NativeLibrary, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a weight [N, K] of bfloat16, with an optional bias [N]."""
        self._native: Final = native
        self._bias: Final = bias
        self.num_outputs, self.num_inputs = weight.shape
        weight = functional.pad(weight, (0, self.num_inputs % 2)).contiguous()
        functions = native.functions
        size = functions.conure_packed_words(weight.shape[1], self.num_outputs)
        self._packed: Final = torch.empty(size, dtype=torch.int32)
        functions.conure_pack(weight.data_ptr(), self._packed.data_ptr(), *weight.shape[::-1])

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return [T, N] from inputs [T, K] contiguous."""
        if self.num_inputs % 2:
            inputs = functional.pad(inputs, (0, 1))
        num_rows, num_inputs = inputs.shape
        out = inputs.new_empty(num_rows, self.num_outputs)
        wide = None if self._native.prefers_pairs else torch.empty(num_rows, num_inputs)
        arguments = _LINEAR.pack(
            inputs.data_ptr(),
            self._packed.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            0 if wide is None else wide.data_ptr(),
            num_rows,
            num_inputs,
            self.num_outputs,
        )
        self._native.functions.conure_linear(arguments, self._native.threads())
        return out

    def addresses(self) -> tuple[int, int, int]:
        """Return a `Product` of decoder.cpp, which needs an even number of inputs."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return self._packed.data_ptr(), bias, self.num_outputs

    def unpack(self) -> Tensor:
        """Return the weight, [N, K]."""
        num_inputs = self.num_inputs + self.num_inputs % 2
        weight = torch.empty(self.num_outputs, num_inputs, dtype=torch.bfloat16)
        self._native.functions.conure_unpack(
            self._packed.data_ptr(), weight.data_ptr(), num_inputs, self.num_outputs
        )
        return weight[:, : self.num_inputs].contiguous()
