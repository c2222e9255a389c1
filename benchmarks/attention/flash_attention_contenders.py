"""FlashAttention 3 over paged keys and values, if vLLM's build of it can be imported.

    fa3 paged    every request reads its whole context; the fastest kernel without sharing

The folder named by CONURE_FA3 holds vLLM 0.26's package. Only its attention is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from .case import AttentionCase
from .flashinfer_contenders import UnusableError


def _paged(case: AttentionCase) -> Callable[[int], Tensor]:
    attention = _library()
    row, device = case.row, case.device

    def int32(numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    starts = int32(list(range(row.num_requests + 1)))
    lengths = int32([row.kv_len] * row.num_requests)
    tables = int32(case.tables.tables)
    caches = [
        (keys.contiguous(), values.contiguous())
        for keys, values in zip(case.keys, case.values, strict=True)
    ]

    def attend(layer: int) -> Tensor:
        keys, values = caches[layer]
        result = attention(
            case.queries[layer],
            keys,
            values,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=row.kv_len,
            seqused_k=lengths,
            softmax_scale=case.scale,
            causal=True,
            block_table=tables,
            fa_version=3,
        )
        assert isinstance(result, Tensor)
        return result

    return attend


@cache
def _library() -> Callable[..., Any]:
    """Return the function of FlashAttention 3.

    Raises:
        UnusableError: if vLLM's package or its FlashAttention 3 is missing.
    """
    folder = os.environ.get("CONURE_FA3")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        module: Any = import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UnusableError(f"FlashAttention 3 cannot be imported: {error}") from None
    if not module.FA3_AVAILABLE:
        raise UnusableError(f"FlashAttention 3: {module.FA3_UNAVAILABLE_REASON}")
    function: Callable[..., Any] = module.flash_attn_varlen_func
    return function


COMPETITORS: Final = {"fa3 paged": _paged}
