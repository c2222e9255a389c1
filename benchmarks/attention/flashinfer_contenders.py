"""FlashInfer's attention over the same tree, if FlashInfer can be imported.

    flashinfer decode        paged decoding on tensor cores (FA2), no sharing
    flashinfer cascade       its multi-level wrapper with defaults: FA3 per level on Hopper
    flashinfer cascade fa2   the same levels and merges with FA2, which packs the heads of a group
                             and splits long ranges

A cascade runs one kernel per level, from the leaves up, and merges each level into the result.
Kernels that FlashInfer has not compiled are not compiled here, because that takes minutes; see
`flashinfer_modules.py`. Outputs between levels are 16 bit, as in FlashInfer.

Supports FlashInfer 0.6 and 0.7.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .case import AttentionCase

WORKSPACE_BYTES = 128 * 2**20


class UnusableError(Exception):
    """FlashInfer or one of its kernels is not available."""


class _Level(NamedTuple):
    """One level of the tree, or all levels, as int32 arguments of FlashInfer's wrappers."""

    query_starts: Tensor
    """First request of each node, [nodes + 1]."""
    page_starts: Tensor
    """First page of each node, [nodes + 1]."""
    pages: Tensor
    last_page: Tensor
    """Tokens of the last page of each node, [nodes]."""


def version() -> str:
    """Return the version of FlashInfer.

    Raises:
        UnusableError: if FlashInfer is not installed.
    """
    return str(_library().__version__)


def _decode(case: AttentionCase) -> Callable[[int], Tensor]:
    library, row = _library(), case.row
    _require_built(prefill_module("fa2", case.dtype, row.head_dim))
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(case.device), "NHD", use_tensor_cores=True, backend="fa2"
    )
    request_level = _level(case, row.num_requests, 0, row.kv_len)
    wrapper.plan(
        request_level.page_starts,
        request_level.pages,
        request_level.last_page,
        row.heads,
        row.kv_heads,
        row.head_dim,
        case.block_size,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    return _attend(case, wrapper)


def _cascade(case: AttentionCase) -> Callable[[int], Tensor]:
    library, row = _library(), case.row
    levels = _levels(case)
    backend = "fa3" if torch.cuda.get_device_capability(case.device)[0] == 9 else "fa2"
    _require_built(cascade_module())
    _require_built(prefill_module(backend, case.dtype, row.head_dim))
    wrapper = library.MultiLevelCascadeAttentionWrapper(len(levels), _workspace(case.device), "NHD")
    wrapper.plan(
        [level.query_starts for level in levels],
        [level.page_starts for level in levels],
        [level.pages for level in levels],
        [level.last_page for level in levels],
        row.heads,
        row.kv_heads,
        row.head_dim,
        case.block_size,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    return _attend(case, wrapper)


def _attend(case: AttentionCase, wrapper: Any) -> Callable[[int], Tensor]:
    """Return a function that computes a layer with a planned wrapper."""
    caches = _plain_caches(case)

    def attend(layer: int) -> Tensor:
        result = wrapper.run(case.queries[layer], caches[layer])
        assert isinstance(result, Tensor)
        return result

    return attend


def _cascade_fa2(case: AttentionCase) -> Callable[[int], Tensor]:
    library, row = _library(), case.row
    _require_built(cascade_module())
    _require_built(prefill_module("fa2", case.dtype, row.head_dim))
    workspace = _workspace(case.device)
    wrappers = []
    for level in _levels(case):
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            *level,
            row.heads,
            row.kv_heads,
            row.head_dim,
            case.block_size,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )
        wrappers.append(wrapper)
    caches = _plain_caches(case)

    def attend(layer: int) -> Tensor:
        out, lse = wrappers[-1].run(case.queries[layer], caches[layer], return_lse=True)
        for wrapper in wrappers[:-1]:
            partial, partial_lse = wrapper.run(case.queries[layer], caches[layer], return_lse=True)
            library.merge_state_in_place(out, lse, partial, partial_lse)
        assert isinstance(out, Tensor)
        return out

    return attend


COMPETITORS: Final = {
    "flashinfer decode": _decode,
    "flashinfer cascade": _cascade,
    "flashinfer cascade fa2": _cascade_fa2,
}


@cache
def _library() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise UnusableError(f"flashinfer cannot be imported: {error}") from None


def prefill_module(backend: str, dtype: torch.dtype, head_dim: int) -> Any:
    """Return FlashInfer's build module of paged attention without mask, window or cap."""
    _library()
    modules = importlib.import_module("flashinfer.jit.attention")
    dtypes = (dtype, dtype, dtype, torch.int32)
    return modules.gen_batch_prefill_module(
        backend, *dtypes, head_dim, head_dim, 0, False, False, False
    )


def cascade_module() -> Any:
    """Return FlashInfer's build module of the merge kernels."""
    _library()
    return importlib.import_module("flashinfer.jit.cascade").gen_cascade_module()


def _require_built(module: Any) -> None:
    """Raise UnusableError unless a module is compiled."""
    if not module.is_compiled:
        raise UnusableError(f"{module.name} is not compiled; run flashinfer_modules.py first")


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _plain_caches(case: AttentionCase) -> list[tuple[Tensor, Tensor]]:
    """Return contiguous caches [N, block size, K, D], copied if necessary."""
    return [
        (keys.contiguous(), values.contiguous())
        for keys, values in zip(case.keys, case.values, strict=True)
    ]


def _levels(case: AttentionCase) -> list[_Level]:
    """Describe the tree level by level, root first."""
    row = case.row
    if len(row.nodes) < 2:
        raise UnusableError("a cascade of one level is plain attention")
    ends = [0, *accumulate(row.tokens)]
    return [
        _level(case, count, begin, end)
        for count, begin, end in zip(row.nodes, ends, ends[1:], strict=False)
    ]


def _level(case: AttentionCase, nodes: int, begin: int, end: int) -> _Level:
    """Describe the positions from `begin` to `end` of `nodes` nodes."""
    size = case.block_size
    first, last = begin // size, -(-end // size)
    sharers = case.row.num_requests // nodes
    tables = case.tables.tables[::sharers]
    pages = [block for table in tables for block in table[first:last]]

    def int32(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=case.device)

    return _Level(
        int32(list(range(0, case.row.num_requests + 1, sharers))),
        int32(list(range(0, len(pages) + 1, last - first))),
        int32(pages),
        int32([end - (last - 1) * size] * nodes),
    )
