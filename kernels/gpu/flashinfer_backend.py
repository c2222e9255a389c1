"""Paged attention of FlashInfer, with the Triton kernels for everything that it does not support.

FlashInfer reads the whole context of each row and shares nothing. A comparison with it shows the
gain of sharing; it is also an alternative where contexts share nothing. A wrapper of FlashInfer is
planned once for each plan and kind of layer.

Out of scope: recorded steps. A recording would have to contain FlashInfer's plan. The engine
therefore uses the implementation `triton`.

Supports FlashInfer 0.6, its FA2 kernels.

Shapes: R rows - T queries - H query heads - K KV heads - D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import flashinfer  # type: ignore[import-not-found,unused-ignore]  # optional
import numpy as np
import torch
from torch import Tensor

from ..planning.plan import Plan
from .configuration import AttentionTuning

WORKSPACE_BYTES: Final = 128 * 2**20
"""Memory for FlashInfer's partial results, its recommended size."""
DTYPES: Final = (torch.bfloat16, torch.float16)
DIMS: Final = (64, 128, 256)


class _LayerKind(NamedTuple):
    """The properties of a layer for which a wrapper is planned, besides the plan of the step."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: torch.dtype
    device: torch.device


class FlashInferKernels:
    """FlashInfer's attention, and another implementation for the rest."""

    def __init__(self, fallback: Any = None) -> None:
        """Start without a workspace.

        Args:
            fallback: The `ops.KernelBackend` for everything else; None is the Triton one.
        """
        if fallback is None:
            from .launcher import TritonKernels

            fallback = TritonKernels(AttentionTuning())
        self._fallback: Final[Any] = fallback  # its protocol is in `ops`, which imports this module
        self._workspaces: dict[torch.device, Tensor] = {}
        self._wrappers: dict[_LayerKind, tuple[Plan, Any]] = {}

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        """Attend with FlashInfer if it supports the shapes; see `ops.AttentionOperations`."""
        if sinks is not None or not _is_supported(query, key_cache, value_cache):
            result: Tensor = self._fallback.attention(
                query,
                key_cache,
                value_cache,
                plan,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                out=out,
            )
            return result
        kind = _LayerKind(
            query.shape[1],
            key_cache.shape[2],
            query.shape[2],
            scale,
            plan.effective_window(window),
            softcap,
            query.dtype,
            query.device,
        )
        wrapper = self._planned(kind, plan)
        num = plan.num_queries
        out[:num] = wrapper.run(query[:num].contiguous(), (key_cache, value_cache))
        return out

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
        """See `ops.AttentionOperations.merge`."""
        merged: Tensor = self._fallback.merge(outputs, lse, slots, sinks=sinks)
        return merged

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """See `ops.AttentionOperations.store_kv`."""
        self._fallback.store_kv(key, value, key_cache, value_cache, slots)

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """See `ops.AttentionOperations.copy_blocks`."""
        self._fallback.copy_blocks(caches, source, destination)

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """See `ops.AttentionOperations.new_cache`."""
        cache: Tensor = self._fallback.new_cache(num_blocks, block_size, heads, dim, dtype)
        return cache

    def _planned(self, kind: _LayerKind, plan: Plan) -> Any:
        """Return a wrapper that is planned for a step."""
        planned, wrapper = self._wrappers.get(kind, (None, None))
        if wrapper is None:
            workspace = self._workspaces.get(kind.device)
            if workspace is None:
                workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=kind.device)
                self._workspaces[kind.device] = workspace
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa2"
            )
        if planned is not plan:
            blocks = -(-plan.kv_len // plan.block_size)
            starts = np.concatenate(([0], np.cumsum(blocks)))
            is_used = np.arange(plan.tables.shape[1]) < blocks[:, None]
            wrapper.plan(
                _int32(plan.query_start[: plan.num_rows + 1]),
                _int32(starts),
                _int32(plan.tables[is_used]).to(kind.device),
                _int32((plan.kv_len - 1) % plan.block_size + 1),
                kind.heads,
                kind.kv_heads,
                kind.dim,
                plan.block_size,
                causal=True,
                sm_scale=kind.scale,
                # FlashInfer's window does not count the query's own position.
                window_left=-1 if kind.window is None else kind.window - 1,
                logits_soft_cap=kind.softcap,
                q_data_type=kind.dtype,
                kv_data_type=kind.dtype,
            )
            self._wrappers[kind] = plan, wrapper
        return wrapper


def _is_supported(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Return whether FlashInfer's FA2 computes these shapes."""
    return (
        query.dtype in DTYPES
        and key_cache.dtype == value_cache.dtype == query.dtype
        and query.shape[2] in DIMS
        and value_cache.shape[3] == query.shape[2]
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
    )


def _int32(numbers: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))
