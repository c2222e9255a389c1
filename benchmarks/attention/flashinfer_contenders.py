"""FlashInfer's attention over the same tree, where it can be imported.

    flashinfer decode        paged decoding on tensor cores (FA2), no sharing
    flashinfer cascade       its multi-level wrapper as it comes: FA3 per level on Hopper
    flashinfer cascade fa2   the same levels and merges with FA2 forced, which packs the heads
                             of a group and splits long stretches

A cascade runs one kernel a level, from the leaves, and merges each level into the last. Kernels
that FlashInfer has not built yet are not built here: that takes minutes and is done by
`flashinfer_modules.py` before. Outputs are 16 bit between levels, as FlashInfer has it.

Knows FlashInfer 0.6 and 0.7, and scenes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .scene import Scene

WORKSPACE_BYTES = 128 * 2**20


class UnusableError(Exception):
    """FlashInfer, or a kernel of it, is not there; the message says which."""


class _Level(NamedTuple):
    """One level of the tree, or all of it, as FlashInfer's wrappers want it. All int32."""

    query_starts: Tensor
    """[nodes + 1], the requests under each node."""
    page_starts: Tensor
    """[nodes + 1]."""
    pages: Tensor
    last_page: Tensor
    """[nodes], tokens of the last page."""


def version() -> str:
    """Return the version of FlashInfer.

    Raises:
        UnusableError: if there is none.
    """
    return str(_library().__version__)


def _decode(scene: Scene) -> Callable[[int], Tensor]:
    library, row = _library(), scene.row
    _demand(prefill_module("fa2", scene.dtype, row.head_dim))
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(scene.device), "NHD", use_tensor_cores=True, backend="fa2"
    )
    whole = _level(scene, row.num_requests, 0, row.kv_len)
    wrapper.plan(
        whole.page_starts,
        whole.pages,
        whole.last_page,
        row.heads,
        row.kv_heads,
        row.head_dim,
        scene.block_size,
        q_data_type=scene.dtype,
        kv_data_type=scene.dtype,
    )
    return _attend(scene, wrapper)


def _cascade(scene: Scene) -> Callable[[int], Tensor]:
    library, row = _library(), scene.row
    levels = _levels(scene)
    backend = "fa3" if torch.cuda.get_device_capability(scene.device)[0] == 9 else "fa2"
    _demand(cascade_module())
    _demand(prefill_module(backend, scene.dtype, row.head_dim))
    wrapper = library.MultiLevelCascadeAttentionWrapper(
        len(levels), _workspace(scene.device), "NHD"
    )
    wrapper.plan(
        [level.query_starts for level in levels],
        [level.page_starts for level in levels],
        [level.pages for level in levels],
        [level.last_page for level in levels],
        row.heads,
        row.kv_heads,
        row.head_dim,
        scene.block_size,
        q_data_type=scene.dtype,
        kv_data_type=scene.dtype,
    )
    return _attend(scene, wrapper)


def _attend(scene: Scene, wrapper: Any) -> Callable[[int], Tensor]:
    """What a planned wrapper does for a layer."""
    caches = _plain_caches(scene)

    def attend(layer: int) -> Tensor:
        found = wrapper.run(scene.queries[layer], caches[layer])
        assert isinstance(found, Tensor)
        return found

    return attend


def _cascade_fa2(scene: Scene) -> Callable[[int], Tensor]:
    library, row = _library(), scene.row
    _demand(cascade_module())
    _demand(prefill_module("fa2", scene.dtype, row.head_dim))
    workspace = _workspace(scene.device)
    wrappers = []
    for level in _levels(scene):
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            *level,
            row.heads,
            row.kv_heads,
            row.head_dim,
            scene.block_size,
            q_data_type=scene.dtype,
            kv_data_type=scene.dtype,
        )
        wrappers.append(wrapper)
    caches = _plain_caches(scene)

    def attend(layer: int) -> Tensor:
        out, lse = wrappers[-1].run(scene.queries[layer], caches[layer], return_lse=True)
        for wrapper in wrappers[:-1]:
            part, part_lse = wrapper.run(scene.queries[layer], caches[layer], return_lse=True)
            library.merge_state_in_place(out, lse, part, part_lse)
        assert isinstance(out, Tensor)
        return out

    return attend


RIVALS: Final = {
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
    """Return FlashInfer's description of its paged attention without mask, window or cap."""
    _library()
    modules = importlib.import_module("flashinfer.jit.attention")
    dtypes = (dtype, dtype, dtype, torch.int32)
    return modules.gen_batch_prefill_module(
        backend, *dtypes, head_dim, head_dim, 0, False, False, False
    )


def cascade_module() -> Any:
    """Return FlashInfer's description of its merging kernels."""
    _library()
    return importlib.import_module("flashinfer.jit.cascade").gen_cascade_module()


def _demand(module: Any) -> None:
    """Demand that a module is built."""
    if not module.is_compiled:
        raise UnusableError(f"{module.name} is not built; flashinfer_modules.py builds it")


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _plain_caches(scene: Scene) -> list[tuple[Tensor, Tensor]]:
    """Return the caches as [N, block size, K, D] without gaps; a copy only where needed."""
    return [
        (keys.contiguous(), values.contiguous())
        for keys, values in zip(scene.keys, scene.values, strict=True)
    ]


def _levels(scene: Scene) -> list[_Level]:
    """Describe the tree level by level, root first."""
    row = scene.row
    if len(row.nodes) < 2:
        raise UnusableError("a cascade of one level is plain attention")
    ends = [0, *accumulate(row.tokens)]
    return [
        _level(scene, count, begin, end)
        for count, begin, end in zip(row.nodes, ends, ends[1:], strict=False)
    ]


def _level(scene: Scene, nodes: int, begin: int, end: int) -> _Level:
    """Describe `nodes` stretches of positions, from `begin` on and before `end`."""
    size = scene.block_size
    first, last = begin // size, -(-end // size)
    sharers = scene.row.num_requests // nodes
    tables = scene.tables.tables[::sharers]
    pages = [block for table in tables for block in table[first:last]]

    def int32(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=scene.device)

    return _Level(
        int32(list(range(0, scene.row.num_requests + 1, sharers))),
        int32(list(range(0, len(pages) + 1, last - first))),
        int32(pages),
        int32([end - (last - 1) * size] * nodes),
    )
