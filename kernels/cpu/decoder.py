"""A Llama-like decoder in one call of the C++ kernels, from token ids to the last norm.

Computes the same as the operations of `linear`, `elementwise` and `attention` one by one, in
float32 or bfloat16.

Shapes: as in `decoder.cpp`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..planning.plan import Plan
from .attention import DTYPES, NativeLibrary, Workspace, plan_address
from .linear import PackedLinear

_LAYER: Final = struct.Struct("@" + 4 * "PPq" + "5Pq")
"""`Layer` in decoder.cpp."""
_DECODER: Final = struct.Struct("@5P11qff")
"""`DecoderArguments` in decoder.cpp."""
_STEP: Final = struct.Struct("@10P2q")
"""`StepArguments` in decoder.cpp."""
_NO_WINDOW: Final = 2**62


class NativeLayer(NamedTuple):
    """The weights and caches of one layer."""

    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    head_norm: Tensor | None
    """[H + K, D], or None for no norm of heads."""
    norm_after_attention: Tensor
    """[W]."""
    norm_after_mlp: Tensor
    """[W], the norm before the next layer."""
    caches: tuple[Tensor, Tensor]
    """Keys and values, [N, B, K, D], with the same strides in all layers."""
    window: int | None


class NativeDecoder:
    """All layers of a decoder and its embedding; used by one thread at a time."""

    def __init__(
        self,
        native: NativeLibrary,
        layers: Sequence[NativeLayer],
        embedding: Tensor,
        first_norm: Tensor,
        angles: tuple[Tensor, Tensor],
        *,
        eps: float,
        scale: float,
        is_invariant: bool,
    ) -> None:
        """Take the layers.

        Args:
            native: The library.
            layers: All layers, of the same shape.
            embedding: [V, W].
            first_norm: [W], the norm before the first layer.
            angles: Cosines and sines, as in `elementwise.rotate_store`.
            eps: Epsilon of all norms.
            scale: Factor of the scores.
            is_invariant: See `attention`.
        """
        first = layers[0]
        keys = first.caches[0]
        kv_heads, dim = keys.shape[2:]
        query_width, width, inner = (
            product.num_inputs for product in (first.out, first.qkv, first.down)
        )
        self._native: Final = native
        self._num_tokens: Final = len(embedding)
        self._workspace: Final = Workspace(native)
        self._widths: Final = (
            width,
            width,
            max(first.qkv.num_outputs, first.gate_up.num_outputs),
            max(2 * query_width, inner),
            width,
        )
        self._dtype: Final = embedding.dtype
        widest = max(query_width, width, inner)
        self._wide_width: Final = widest if first.qkv.is_widened else None
        packed = ctypes.create_string_buffer(b"".join(map(_pack, layers)))
        # Keeps what the arguments point to.
        self._alive: Final = (tuple(layers), embedding, first_norm, angles, packed)
        self._arguments: Final = _DECODER.pack(
            ctypes.addressof(packed),
            *(table.data_ptr() for table in (*angles, embedding, first_norm)),
            len(layers),
            width,
            inner,
            query_width // dim,
            kv_heads,
            dim,
            *keys.stride()[1:3],
            DTYPES[embedding.dtype],
            is_invariant,
            native.prefers_pairs,
            eps,
            scale,
        )

    def __call__(self, ids: Tensor, positions: Tensor, slots: Tensor, plan: Plan) -> Tensor:
        """Return the norm after the last layer, [T, W].

        Args:
            ids: [T] int64.
            positions: [T] int64.
            slots: [T] int64 slots of the new keys and values.
            plan: Plan of the step.

        Raises:
            IndexError: if an id is not in the vocabulary.
        """
        num = len(ids)
        lowest, highest = map(int, torch.aminmax(ids))
        if lowest < 0 or highest >= self._num_tokens:
            raise IndexError(
                f"token ids must be from 0 to {self._num_tokens - 1}, got {lowest} to {highest}"
            )
        hidden, normed, *scratch = (
            torch.empty(num, width, dtype=self._dtype) for width in self._widths
        )
        wide = None if self._wide_width is None else torch.empty(num, self._wide_width)
        step = _STEP.pack(
            plan_address(plan),
            *(each.data_ptr() for each in (ids, positions, slots, hidden, normed, *scratch)),
            0 if wide is None else wide.data_ptr(),
            num,
            int(plan.kv_len.max()),
        )
        self._native.functions.conure_decoder(
            self._arguments, step, self._native.threads(), self._workspace.address
        )
        return normed


def _pack(layer: NativeLayer) -> bytes:
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return _LAYER.pack(
        *(field for product in products for field in product.addresses()),
        0 if layer.head_norm is None else layer.head_norm.data_ptr(),
        layer.norm_after_attention.data_ptr(),
        layer.norm_after_mlp.data_ptr(),
        *(cache.data_ptr() for cache in layer.caches),
        _NO_WINDOW if layer.window is None else layer.window,
    )
