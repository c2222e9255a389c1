"""A device that records, on the CPU: the discipline of recorded steps without a GPU.

`record` runs a function once and records each torch operator that it calls, with its
arguments as they were: tensors by identity, numbers by value. A replay runs those operators
again and puts their results into the very tensors of the recording. Python is not run again,
so whatever came to the function otherwise than through a tensor that stayed where it is has
the value of the recording for ever, just as in a CUDA graph.

`Dense` is attention by a table on the device, in plain torch, with no shape but those of its
arguments: what a recording may hold, written to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor

from conure.engine.runner.backend import Backend
from conure.engine.runner.cuda_graphs import Record
from conure.kernels import elementwise, ops, reference, sampling
from conure.kernels.planning.plan import Plan

READS = ("_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero", "_unique2")
"""Operators by which the host waits for the device."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes operators while it is entered."""

    def __init__(self, *, forbids: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._forbids = forbids
        self._patch = pytest.MonkeyPatch()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if self._forbids and name in READS:
            raise RuntimeError(f"operation not permitted when a step is recorded: {name}")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {
            one.untyped_storage().data_ptr()
            for one in tree_flatten((args, kwargs))[0]
            if isinstance(one, Tensor)
        }
        made = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
        # What lies in memory that was given is a view, or was written in place.
        fresh = [one.untyped_storage().data_ptr() not in given for one in made]

        def again() -> None:
            found = [
                one for one in tree_flatten(func(*args, **kwargs))[0] if isinstance(one, Tensor)
            ]
            for target, result, is_fresh in zip(made, found, fresh, strict=True):
                if is_fresh:
                    target.copy_(result)

        self.steps.append(again)
        return out

    def __enter__(self) -> Recording:
        """Note launches of interpreted Triton kernels, too: to torch these are nothing."""
        launch = GridExecutor.__call__

        def noted(executor: Any, *args: Any, **options: Any) -> None:
            def again() -> None:
                # Operators that the interpreter runs on its arguments are not part of the kernels.
                with _disable_current_modes():
                    launch(executor, *args, **options)

            again()
            self.steps.append(again)

        self._patch.setattr(GridExecutor, "__call__", noted)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch's
        self._patch.undo()


@dataclass
class Recorder:
    """Records as `graphs.Record` does; counts what it does."""

    num_recorded: int = 0
    num_replayed: int = 0
    forbids: bool = True
    """Refuse to record what makes the host wait."""

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        function()  # once outside, as CUDA graphs need it
        recording = Recording(forbids=self.forbids)
        with recording:
            out = function()
        # A replay has to make all that it returns: nothing of this run may be left.
        out.fill_(float("nan"))
        self.num_recorded += 1

        def replay() -> Tensor:
            self.num_replayed += 1
            for step in recording.steps:
                step()
            return out

        return replay


class Dense:
    """Attention that reads a table on the device; see `ops.Kernels`.

    The table of a kind of layer lies in memory that grows when it must: then a recording that
    reads the former one is of no use. A step that was not prepared reads a separate table.
    """

    def __init__(self, *, num_rows: int = 8, num_blocks: int = 8) -> None:
        self._size = (num_rows, 1 + num_blocks)
        self._tables: dict[int | None, Tensor] = {}
        self._plans: dict[int | None, Plan] = {}
        self.num_grown = 0

    def prepare(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        window: int | None,
        may_grow: bool = True,
    ) -> int:
        """Write [T, 1 + W]: the position of each query, and the blocks before it."""
        if self._plans.get(window) is plan:
            return self.num_grown
        needed = self._table_of(plan)
        found = self._tables.get(window, torch.zeros(*self._size, dtype=torch.int64))
        expected = needed.shape
        if expected[0] > found.shape[0] or expected[1] > found.shape[1]:
            self.num_grown += 1
            shape = [max(a, b) for a, b in zip(expected, found.shape, strict=True)]
            found = torch.zeros(*shape, dtype=torch.int64)
        found.zero_()
        found[: expected[0], : expected[1]] = needed
        self._tables[window], self._plans[window] = found, plan
        return self.num_grown

    def _table_of(self, plan: Plan) -> Tensor:
        """Return the table of a plan as a new tensor, which no recording reads."""
        rows = np.repeat(np.arange(plan.num_rows), plan.num_new)
        width = -(-int(plan.kv_len.max()) // plan.block_size)
        blocks = plan.tables[rows, :width].clip(0)
        return torch.from_numpy(np.concatenate((plan.positions[:, None], blocks), axis=1))

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
        assert sinks is None
        if self._plans.get(window) is plan:
            table = self._tables[window][: len(query)]
        else:
            table = self._table_of(plan)
        group = query.shape[1] // key_cache.shape[2]
        shape = (len(table), (table.shape[1] - 1) * plan.block_size)
        keys, values = (
            cache.index_select(0, table[:, 1:].flatten())
            .view(*shape, *cache.shape[2:])
            .repeat_interleave(group, dim=2)
            .float()
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,qkhd->qhk", query.float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = torch.arange(shape[1], device=query.device)[None]
        hidden = seen > table[:, :1]
        if window is not None:
            hidden = hidden | (seen <= table[:, :1] - window)
        weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), dim=-1)
        out.copy_(torch.einsum("qhk,qkhe->qhe", weights, values))
        return out

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
        return reference.merge(outputs, lse, slots, sinks=sinks)

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
        value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        reference.copy_blocks(caches, source, destination)

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        return reference.new_cache(num_blocks, block_size, heads, dim, dtype)


def interpreted(record: Record | None) -> Backend:
    """Return the backend of a GPU, its kernels interpreted on the CPU."""
    return Backend(
        torch.device("cpu"),
        ops.implementation("triton"),
        fused=elementwise.implementation("triton"),
        sampling=sampling.implementation("triton"),
        record=record,
    )


def late(found: Tensor) -> Callable[[], Tensor]:
    """Bring results home as a device does: what is waited for is what they were."""
    kept = found.clone()
    return lambda: kept


def backend(record: Record | None, dense: Dense | None = None, *, is_late: bool = False) -> Backend:
    """Return an accelerator's backend that computes on the CPU."""
    dense = dense or Dense()
    return Backend(
        torch.device("cpu"),
        ops.AttentionOperations("dense", dense),
        fused=elementwise.implementation("reference"),
        record=record,
        copy_to_host=late if is_late else None,
    )
