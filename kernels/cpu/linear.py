"""Products with packed weights on a CPU, by the C++ kernels.

The kernels multiply two bfloat16 inputs at a time: an odd number of them is extended by a zero.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from .attention import DTYPES, NativeLibrary

_LINEAR: Final = struct.Struct("@5P4q")
"""`LinearArguments` in operations.h."""
_WORD_BYTES: Final = 4


class PackedLinear:
    """A weight in the layout of the kernels; calling it computes `inputs @ weight.T + bias`.

    Invariants: a result does not depend on the other rows of `inputs`, bit by bit.
    """

    def __init__(self, native: NativeLibrary, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a weight [N, K] of float32 or bfloat16, with an optional bias [N]."""
        self._native: Final = native
        self._bias: Final = bias
        self.dtype: Final = weight.dtype
        self.num_outputs, self.num_inputs = weight.shape
        self._padding: Final = self.num_inputs % (_WORD_BYTES // weight.dtype.itemsize)
        self.is_widened: Final = weight.dtype == torch.bfloat16 and not native.prefers_pairs
        """Whether a product needs memory for its inputs in float32."""
        if self._padding:
            weight = functional.pad(weight, (0, self._padding))
        weight = weight.contiguous()
        self._row_words: Final = weight.shape[1] * weight.dtype.itemsize // _WORD_BYTES
        functions = native.functions
        size = functions.conure_packed_words(self._row_words, self.num_outputs)
        self._packed: Final = torch.empty(size, dtype=torch.int32)
        functions.conure_pack(
            weight.data_ptr(), self._packed.data_ptr(), self._row_words, self.num_outputs
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return [T, N] from contiguous inputs [T, K] of the weight's type."""
        assert inputs.dtype == self.dtype, f"{inputs.dtype} inputs of a {self.dtype} weight"
        assert inputs.shape[1] == self.num_inputs, "the weight has another number of inputs"
        if self._padding:
            inputs = functional.pad(inputs, (0, self._padding))
        num_rows, num_inputs = inputs.shape
        out = inputs.new_empty(num_rows, self.num_outputs)
        wide = torch.empty(num_rows, num_inputs) if self.is_widened else None
        arguments = _LINEAR.pack(
            inputs.data_ptr(),
            self._packed.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            0 if wide is None else wide.data_ptr(),
            num_rows,
            num_inputs,
            self.num_outputs,
            DTYPES[self.dtype],
        )
        self._native.functions.conure_linear(arguments, self._native.threads())
        return out

    @property
    def is_padded(self) -> bool:
        """Whether the inputs are extended by a zero."""
        return self._padding > 0

    def addresses(self) -> tuple[int, int, int]:
        """Return a `Product` of decoder.cpp, which does not extend inputs."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return self._packed.data_ptr(), bias, self.num_outputs

    def unpack(self) -> Tensor:
        """Return the weight, [N, K]."""
        weight = torch.empty(self.num_outputs, self.num_inputs + self._padding, dtype=self.dtype)
        self._native.functions.conure_unpack(
            self._packed.data_ptr(), weight.data_ptr(), self._row_words, self.num_outputs
        )
        return weight[:, : self.num_inputs].contiguous()
