"""The operations on a GPU: tables to the device, launches, memory that outlives a step.

The table of a kind of layer (`work`) is made or patched once a step and copied once, from
pinned memory, without waiting; all its layers read it. Parts lie in scratch memory that grows
when a step needs more and is then kept. `attention` allocates nothing else, reads nothing
back and launches the same grids whatever the table says, so that a CUDA graph of it holds
for other steps of as many queries, as long as `prepare` is called before each replay and
`Launch` stays the same.

Knows tensors and launches, no rows. Kept true: a table is not overwritten on the host before
its copy has been read.

Shapes: T queries - H query heads - K kv heads - D, E head dims of keys, values - S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton.runtime import JITFunction

from ..plan import Plan
from ..work import Kind, Work
from . import attention, caching, merging
from .configuration import (
    DTYPES,
    MAX_DIM,
    MAX_GROUP,
    MOVE_TILE,
    Shape,
    Variant,
    attention_constants,
    attention_options,
    large_rows,
    merge_constants,
    small_rows,
    store_constants,
)

# What a kernel takes at its launch is not what its signature says to a type checker.
_ATTEND: Final[Any] = attention.attend
_MERGE: Final[Any] = merging.merge
_STORE: Final[Any] = caching.store
_MOVE: Final[Any] = caching.move

INTERPRETED: Final = not isinstance(attention.attend, JITFunction)
"""Kernels run without a GPU, slowly: decided by `TRITON_INTERPRET` when triton was loaded."""
INTERPRETED_PROCESSORS: Final = 2
MERGE_PROGRAMS: Final = 8
"""Programs of the merge kernel, for each processor."""
COPIES: Final = 2
"""Pinned tables that take turns, so that a step is planned while the last is on its way."""
SPARE: Final = 1.5
"""Memory that must grow becomes this much larger than needed."""
LOG2_E: Final = 1.4426950408889634


class Launch(NamedTuple):
    """What a captured launch depends on besides shapes: capture again when it changes."""

    large: int
    """Rows of large items in the table."""
    is_merged: bool
    """Some query has several parts."""
    has_window: bool
    """Some row is longer than the window."""
    memory: int
    """Counts how often the memory behind a launch was replaced."""


class _Layer:
    """The device's side of one kind of layer."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        self.work = Work(kind)
        self.device = device
        self.plan: Plan | None = None
        """Whose table is on the device."""
        self.table = torch.empty(0, dtype=torch.int32, device=device)
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.lse = torch.empty(0, dtype=torch.float32, device=device)
        self.memory = 0
        self._pinned: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def prepare(self, plan: Plan, heads: int, value_dim: int) -> None:
        """Bring the table of a step to the device and make room for its parts."""
        if self.plan is not plan:
            self.work.update(plan)
            self._copy(torch.from_numpy(self.work.table))
            self.plan = plan
        size = self.work.num_parts * heads
        if size * value_dim > len(self.partials) or size > len(self.lse):
            size = int(size * SPARE)
            self.partials = self.partials.new_empty(size * value_dim)
            self.lse = self.lse.new_empty(size)
            self.memory += 1

    def _copy(self, words: Tensor) -> None:
        if len(words) > len(self.table):
            self.table = self.table.new_empty(int(len(words) * SPARE))
            self.memory += 1
            if self.device.type == "cuda":
                self._pinned = [
                    torch.empty(len(self.table), dtype=torch.int32, pin_memory=True)
                    for _ in range(COPIES)
                ]
                # torch leaves the class untyped.
                self._copied = [torch.cuda.Event() for _ in range(COPIES)]  # type: ignore[no-untyped-call]
        if self.device.type != "cuda":
            self.table[: len(words)] = words
            return
        self._turn = (self._turn + 1) % COPIES
        self._copied[self._turn].synchronize()  # the last copy from here, two steps ago
        pinned = self._pinned[self._turn][: len(words)]
        pinned.copy_(words)
        self.table[: len(words)].copy_(pinned, non_blocking=True)
        self._copied[self._turn].record()


class Gpu:
    """The implementation. It keeps memory for tables and parts, so it serves one stream."""

    def __init__(self) -> None:
        self._layers: dict[tuple[torch.device, Kind], _Layer] = {}
        self._addresses: dict[tuple[int, ...], Tensor] = {}

    def prepare(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        window: int | None,
    ) -> Launch:
        """Bring a step's table to the device; see `ops.Operations.prepare`."""
        _check_shapes(query, key_cache, value_cache)
        layer = self._layer(query, key_cache, value_cache, plan, window)
        work = layer.work
        has_window = work.kind.window is not None
        return Launch(work.large, work.num_merges > 0, has_window, layer.memory)

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
        """Run the items of the plan's table, then merge; see `ops.Operations.attention`."""
        _check_shapes(query, key_cache, value_cache)
        window = plan.binding(window)
        layer = self._layer(query, key_cache, value_cache, plan, window)
        heads, value_dim = query.shape[1], value_cache.shape[3]
        shape = _shape(query, key_cache, value_cache)
        variant = Variant(window is not None, softcap is not None, sinks is not None)
        large = layer.work.large
        # An address is passed in any case; without sinks nothing reads it.
        sinks = layer.lse if sinks is None else sinks.to(torch.float32).contiguous()
        _ATTEND[(layer.work.programs,)](
            out,
            layer.partials,
            layer.lse,
            query,
            key_cache,
            value_cache,
            layer.table,
            sinks,
            scale * LOG2_E if softcap is None else scale * 2 * LOG2_E / softcap,
            0.0 if softcap is None else softcap * LOG2_E,
            out.stride(0),
            out.stride(1),
            query.stride(0),
            query.stride(1),
            key_cache.stride(1),
            key_cache.stride(2),
            value_cache.stride(1),
            value_cache.stride(2),
            **attention_constants(shape, variant, large),
            **attention_options(shape, large),
        )
        if layer.work.num_merges:
            _MERGE[(layer.work.kind.processors * MERGE_PROGRAMS,)](
                out,
                layer.partials,
                layer.lse,
                layer.table,
                sinks,
                0,
                0,
                out.stride(0),
                out.stride(1),
                **merge_constants(heads, value_dim, has_sinks=variant.has_sinks, is_indexed=False),
                num_warps=4,
            )
        return out

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
        """Merge parts by their LSE in float32; see `ops.Operations.merge`."""
        _check_dtype("outputs", outputs)
        _check_device("outputs", outputs)
        heads, value_dim = outputs.shape[1:]
        out = outputs.new_empty((len(slots), heads, value_dim), dtype=torch.float32)
        outputs, lse, slots = outputs.contiguous(), lse.contiguous(), slots.contiguous()
        _MERGE[(_processors(outputs.device) * MERGE_PROGRAMS,)](
            out,
            outputs,
            lse,
            slots,
            lse if sinks is None else sinks.to(torch.float32).contiguous(),
            len(slots),
            slots.shape[1],
            out.stride(0),
            out.stride(1),
            **merge_constants(heads, value_dim, has_sinks=sinks is not None, is_indexed=True),
            num_warps=4,
        )
        return out

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Write new keys and values to their slots; see `ops.Operations.store_kv`."""
        _check_device("key_cache", key_cache)
        if not len(slots):
            return
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        _STORE[(len(slots),)](
            key,
            value,
            key_cache,
            value_cache,
            slots.contiguous(),
            key_cache.shape[0] * key_cache.shape[1],
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            key_cache.stride(1),
            key_cache.stride(2),
            value_cache.stride(1),
            value_cache.stride(2),
            **store_constants(key_cache.shape[2], key_cache.shape[3], value_cache.shape[3]),
            num_warps=4,
        )

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks inside each cache; see `ops.Operations.copy_blocks`."""
        sizes: dict[tuple[torch.device, int, int], list[Tensor]] = {}
        for cache in caches:
            _check_device("caches", cache)
            size = cache[0].numel() * cache.element_size() if len(cache) else 0
            if not cache.is_contiguous() or size % 4 or cache.data_ptr() % 16:
                # A layout of others: torch reads all sources before it writes, too.
                cache.index_copy_(0, destination, cache.index_select(0, source))
            elif size:
                sizes.setdefault((cache.device, len(cache), size // 4), []).append(cache)
        for (device, _, words), alike in sizes.items():
            self._move(alike, source.to(device), destination.to(device), words)

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a cache on the device in which a block is one stretch."""
        device = "cpu" if INTERPRETED else "cuda"
        return torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device)

    def _move(self, caches: list[Tensor], source: Tensor, destination: Tensor, words: int) -> None:
        """Copy blocks of `words` int32 words by way of scratch memory."""
        key = tuple(cache.data_ptr() for cache in caches)
        addresses = self._addresses.get(key)
        if addresses is None:
            addresses = torch.tensor(key, dtype=torch.int64, device=source.device)
            self._addresses[key] = addresses
        scratch = torch.empty(
            len(caches) * len(source) * words, dtype=torch.int32, device=source.device
        )
        grid = (len(source), -(-words // MOVE_TILE), len(caches))
        source, destination = source.contiguous(), destination.contiguous()
        for to_scratch in (True, False):
            _MOVE[grid](
                addresses,
                scratch,
                source,
                destination,
                len(source),
                len(caches[0]),
                words,
                TO_SCRATCH=to_scratch,
                TILE=MOVE_TILE,
                num_warps=4,
            )

    def _layer(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Plan, window: int | None
    ) -> _Layer:
        """Return the layer's kind with the plan's table on the device."""
        shape = _shape(query, key_cache, value_cache)
        kind = Kind(
            kv_heads=shape.kv_heads,
            group=shape.group,
            window=plan.binding(window),
            small=small_rows(shape.group),
            large=large_rows(shape),
            processors=_processors(query.device),
        )
        layer = self._layers.get((query.device, kind))
        if layer is None:
            layer = self._layers[query.device, kind] = _Layer(kind, query.device)
        layer.prepare(plan, query.shape[1], shape.value_dim)
        return layer


def _shape(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Shape:
    _, page, kv_heads, dim = key_cache.shape
    group = query.shape[1] // kv_heads
    return Shape(query.dtype, kv_heads, group, dim, value_cache.shape[3], page)


def _processors(device: torch.device) -> int:
    if INTERPRETED:
        return INTERPRETED_PROCESSORS
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors


def _check_shapes(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Refuse what no kernel is compiled for."""
    _check_dtype("query", query)
    _check_device("query", query)
    for name, dim in (("query", query.shape[2]), ("value_cache", value_cache.shape[3])):
        if dim > MAX_DIM:
            raise ValueError(f"{name} has head size {dim}, 'triton' takes at most {MAX_DIM}")
    group = query.shape[1] // key_cache.shape[2]
    if group > MAX_GROUP:
        raise ValueError(f"query has {group} heads per kv head, 'triton' takes {MAX_GROUP}")


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}, 'triton' takes bfloat16, float16 and float32")


def _check_device(name: str, tensor: Tensor) -> None:
    wanted = "cpu" if INTERPRETED else "cuda"
    if tensor.device.type != wanted:
        raise ValueError(f"{name} is on {tensor.device}, 'triton' runs on {wanted} here")
