"""FlashInfer's arguments, checked by a double that implements the documented interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from conure.kernels import ops, reference
from conure.kernels.planning.plan import Plan, build_plan

pytest.importorskip("triton")
BLOCK = 4
LENGTHS, NUM_NEW = (9, 4, 14, 6), (1, 4, 3, 1)
MODULE = "conure.kernels.gpu.flashinfer_backend"


class PagedWrapperDouble:
    """FlashInfer 0.6's wrapper, in torch; only the arguments that the backend may use."""

    num_planned = 0

    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend == "fa2"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        type(self).num_planned += 1
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(each.dtype == torch.int32 for each in tables)
        assert causal
        self._tables, self._page = tables, page_size
        self._shape = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._scale, self._window, self._cap = sm_scale, window_left, logits_soft_cap
        self._dtypes = (q_data_type, kv_data_type)

    def run(self, query: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        starts, page_starts, pages, last = (each.tolist() for each in self._tables)
        assert query.is_contiguous()
        assert query.shape == (starts[-1], self._shape[0], self._shape[2])
        assert (query.dtype, caches[0].dtype) == self._dtypes
        out = torch.empty_like(query)
        group = self._shape[0] // self._shape[1]
        for row in range(len(last)):
            begin, end = starts[row], starts[row + 1]
            used = pages[page_starts[row] : page_starts[row + 1]]
            length = (len(used) - 1) * self._page + last[row]
            keys, values = (
                cache[used].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
                for cache in caches
            )
            scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys) * self._scale
            if self._cap:
                scores = self._cap * torch.tanh(scores / self._cap)
            at = torch.arange(length - (end - begin), length)[:, None]
            distance = at - torch.arange(length)[None]
            hidden = distance < 0
            if self._window >= 0:
                hidden |= distance > self._window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khe->qhe", weights, values).to(out.dtype)
        return out


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PagedWrapperDouble]]:
    """Install the double as `flashinfer`."""
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PagedWrapperDouble
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    PagedWrapperDouble.num_planned = 0
    yield PagedWrapperDouble
    sys.modules.pop(MODULE, None)


class Refusing:
    """A fallback that must not attend."""

    def attention(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("FlashInfer supports these shapes")


def step() -> Plan:
    """Return a step of rows that share their first block, with prompts and decoding rows."""
    tables, free = [], 1
    for length in LENGTHS:
        width = -(-length // BLOCK)
        tables.append([0, *range(free, free + width - 1)])
        free += width - 1
    return build_plan([*NUM_NEW], [*LENGTHS], tables, block_size=BLOCK, min_saved=0)


def arguments(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries with two padding rows, keys and values."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(sum(NUM_NEW) + 2, 4, dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, 12, BLOCK, 2, dim, generator=generator).to(dtype)
    return query, keys, values


def exact(query: Tensor, keys: Tensor, values: Tensor, plan: Plan, **options: Any) -> Tensor:
    num = plan.num_queries
    result = reference.attention(
        query[:num].double(),
        keys.double(),
        values.double(),
        plan,
        out=torch.empty(num, *query.shape[1:], dtype=torch.float64),
        **options,
    )
    return result.float()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "changes", [{}, {"window": 3}, {"softcap": 5.0}, {"window": 5, "softcap": 2.0}]
)
def test_flashinfer_receives_the_same_attention(changes: dict[str, Any]) -> None:
    from conure.kernels.gpu.flashinfer_backend import FlashInferKernels

    options: dict[str, Any] = {"scale": 0.2, "window": None, "softcap": None, **changes}
    operations = ops.AttentionOperations("flashinfer", FlashInferKernels(Refusing()))
    query, keys, values = arguments(torch.float16, 64)
    plan = step()
    found = operations.attention(query, keys, values, plan, **options)
    expected = exact(query, keys, values, plan, sinks=None, **options)
    assert (found[: plan.num_queries].float() - expected).abs().max() < 5e-3


def test_wrapper_is_planned_once_for_a_step(library: type[PagedWrapperDouble]) -> None:
    from conure.kernels.gpu.flashinfer_backend import FlashInferKernels

    operations = ops.AttentionOperations("flashinfer", FlashInferKernels(Refusing()))
    query, keys, values = arguments(torch.bfloat16, 64)
    plan = step()
    for _ in range(3):
        operations.attention(query, keys, values, plan, scale=0.1)
    assert library.num_planned == 1
    operations.attention(query, keys, values, plan, scale=0.1, window=4)
    assert library.num_planned == 2
    operations.attention(query, keys, values, step(), scale=0.1)
    assert library.num_planned == 3


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("dtype", "dim", "has_sinks"),
    [(torch.float32, 64, False), (torch.bfloat16, 48, False), (torch.bfloat16, 64, True)],
)
def test_other_shapes_run_on_the_fallback(dtype: torch.dtype, dim: int, has_sinks: bool) -> None:
    from conure.kernels.gpu.flashinfer_backend import FlashInferKernels

    operations = ops.AttentionOperations("flashinfer", FlashInferKernels(reference))
    query, keys, values = arguments(dtype, dim)
    plan, sinks = step(), torch.ones(4) if has_sinks else None
    query = query[: plan.num_queries]
    found = operations.attention(query, keys, values, plan, scale=0.2, sinks=sinks)
    options: dict[str, Any] = {"scale": 0.2, "window": None, "softcap": None, "sinks": sinks}
    assert (found.float() - exact(query, keys, values, plan, **options)).abs().max() < 2e-2


@pytest.mark.usefixtures("library")
def test_installed_library_is_used() -> None:
    assert ops.implementation("flashinfer").name == "flashinfer"


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ValueError, match="'flashinfer' cannot be loaded"):
        ops.implementation("flashinfer")
