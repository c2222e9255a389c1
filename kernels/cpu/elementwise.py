"""The operations between matrix products on a CPU, by the C++ kernels.

Shapes: as in `conure.kernels.elementwise`.
"""

from __future__ import annotations

import struct
from typing import Final

from torch import Tensor

from .attention import DTYPES, NativeLibrary

_NORM: Final = struct.Struct("@4P3qf")
"""`NormArguments` in operations.h."""
_GATE: Final = struct.Struct("@2P3q")
"""`GateArguments` in operations.h."""
_ROTATE: Final = struct.Struct("@7P" + 2 * "Pqq" + "5qf")
"""`RotateArguments` in operations.h."""


class CpuElementwise:
    """The operations for float32, bfloat16 and float16."""

    def __init__(self, native: NativeLibrary) -> None:
        self._native: Final = native

    def add_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `ElementwiseOperations`."""
        out = hidden.new_empty(hidden.shape)
        addresses = (hidden.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr())
        arguments = _NORM.pack(*addresses, *hidden.shape, DTYPES[hidden.dtype], eps)
        self._native.functions.conure_add_norm(arguments, self._native.threads())
        return out

    def rotate_store(
        self,
        mixed: Tensor,
        positions: Tensor,
        slots: Tensor,
        angles: tuple[Tensor, Tensor],
        head_norm: Tensor | None,
        eps: float,
        caches: tuple[Tensor, Tensor],
    ) -> Tensor:
        """See `ElementwiseOperations`."""
        keys, values = caches
        kv_heads, dim = keys.shape[2:]
        heads = mixed.shape[1] // dim - 2 * kv_heads
        query = mixed.new_empty(len(mixed), heads, dim)
        arguments = _ROTATE.pack(
            mixed.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            angles[0].data_ptr(),
            angles[1].data_ptr(),
            0 if head_norm is None else head_norm.data_ptr(),
            query.data_ptr(),
            keys.data_ptr(),
            *keys.stride()[1:3],
            values.data_ptr(),
            *values.stride()[1:3],
            len(mixed),
            heads,
            kv_heads,
            dim,
            DTYPES[mixed.dtype],
            eps,
        )
        self._native.functions.conure_rotate_store(arguments, self._native.threads())
        return query

    def silu_mul(self, mixed: Tensor) -> Tensor:
        """See `ElementwiseOperations`."""
        num_tokens, width = mixed.shape[0], mixed.shape[1] // 2
        out = mixed.new_empty(num_tokens, width)
        arguments = _GATE.pack(
            mixed.data_ptr(), out.data_ptr(), num_tokens, width, DTYPES[mixed.dtype]
        )
        self._native.functions.conure_silu_mul(arguments, self._native.threads())
        return out
