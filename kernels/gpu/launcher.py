"""GPU implementation of the operations: work tables, launches, and memory reused between steps.

The work table of a layer group (`work_table`) is updated once per step, copied once from pinned
memory without waiting, and read by all its layers. Partials are in scratch memory that grows
when a step needs more; steps that `prepare` was called for have their own. `attention` allocates
only its output, reads nothing back and launches the same grids for any table. A CUDA graph of it
is therefore valid for other steps with at most as many queries, provided that `prepare` is called
before each replay and returns the same `GraphKey`.

Out of scope: rows.

Invariants: a table is not overwritten on the host before its copy has been read.

Shapes: T queries - H query heads - K KV heads - D, E head dims of keys, values - S slots of
partials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton.runtime import JITFunction

from ..checks import UnsupportedShapeError
from ..planning.plan import Plan
from . import attention, kv_cache, merge
from .configuration import (
    DEFAULT_TUNING,
    DTYPES,
    MAX_DIM,
    MAX_GROUP,
    MAX_SHARED_BYTES,
    MOVE_TILE,
    OVERLAP_CAPABILITY,
    SMALL_DEVICE_DIM,
    AttentionShape,
    AttentionTuning,
    AttentionVariant,
    attention_constants,
    attention_options,
    large_rows,
    launch_options,
    merge_constants,
    merge_heads,
    programs_per_processor,
    small_rows,
    store_constants,
)
from .work_table.builder import LayerGroup, WorkTableBuilder
from .work_table.table import MERGE_SIZE, TICKET_WORDS

# The launch arguments of a kernel differ from its Python signature.
_ATTEND: Final[Any] = attention.attend_kernel
_MERGE: Final[Any] = merge.merge_kernel
_STORE: Final[Any] = kv_cache.store_kv_kernel
_MOVE: Final[Any] = kv_cache.move_blocks_kernel

INTERPRETED: Final = not isinstance(attention.attend_kernel, JITFunction)
"""Whether Triton interprets the kernels on the CPU: `TRITON_INTERPRET` at its import."""
INTERPRETED_PROCESSORS: Final = 2
MERGE_PROGRAMS: Final = 16
"""Maximum programs of the merge kernel per multiprocessor."""
COPIES: Final = 2
"""Pinned tables used in turn, so that a step is planned while the last table is copied."""
RECORDED_PARTIALS: Final = 4096
"""Slots for partials that recorded steps have at least: several times what a step of 256 tokens
behind a deep tree needs. With `SPARE` they take 101 MB of each table for 32 heads of 128 numbers;
a model with a window has two tables."""
SPARE: Final = 1.5
"""Factor by which memory exceeds the need when it grows."""
LOG2_E: Final = 1.4426950408889634


class GraphKey(NamedTuple):
    """The values besides shapes that a captured launch depends on; capture again on a change."""

    large: int
    """Rows of large items in the table."""
    is_merged: bool
    """Whether partials are merged."""
    has_window: bool
    """Whether any row is longer than the window."""
    first_item: int
    """Index of the first item in the table."""
    memory: int
    """Number of times that the memory used by recorded launches was replaced."""


class _DeviceBuffers:
    """A work table on the device, and memory for the partials of its items."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.table = torch.empty(0, dtype=torch.int32, device=device)
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.lse = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(TICKET_WORDS, dtype=torch.int32, device=device)
        self.memory = 0
        """Number of times that a buffer was replaced."""
        self._pinned: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def fits(self, num_words: int, num_partials: int, value_dim: int) -> bool:
        """Return whether a step needs no other memory."""
        return (
            num_words <= len(self.table)
            and num_partials * value_dim <= len(self.partials)
            and num_partials <= len(self.lse)
        )

    def reserve_counters(self, num_rows: int) -> None:
        """Allocate zeros that count tickets and the partials of `num_rows` queries and heads."""
        if TICKET_WORDS + num_rows > len(self.counters):
            self.counters = self.counters.new_zeros(TICKET_WORDS + int(num_rows * SPARE))
            self.memory += 1

    def reserve(self, num_partials: int, value_dim: int) -> None:
        """Allocate memory for partials of `value_dim` numbers."""
        if num_partials * value_dim > len(self.partials) or num_partials > len(self.lse):
            num_partials = int(num_partials * SPARE)
            # If the memory for one of them is missing, both stay: recordings write to them.
            partials = self.partials.new_empty(num_partials * value_dim)
            lse = self.lse.new_empty(num_partials)
            self.partials, self.lse = partials, lse
            self.memory += 1

    def copy(self, words: Tensor) -> None:
        """Copy a table to the device, ordered after the work that reads the previous one."""
        if len(words) > len(self.table):
            self._reserve_table(int(len(words) * SPARE))
        if self.device.type != "cuda":
            self.table[: len(words)] = words
            return
        self._turn = (self._turn + 1) % COPIES
        self._copied[self._turn].synchronize()  # the last copy from here, two steps ago
        pinned = self._pinned[self._turn][: len(words)]
        pinned.copy_(words)
        self.table[: len(words)].copy_(pinned, non_blocking=True)
        self._copied[self._turn].record()

    def _reserve_table(self, num_words: int) -> None:
        """Allocate a table and its pinned copies. If memory is missing, all of them stay."""
        table = self.table.new_empty(num_words)
        if self.device.type == "cuda":
            pinned = [
                torch.empty(num_words, dtype=torch.int32, pin_memory=True) for _ in range(COPIES)
            ]
            # The class is untyped in torch.
            copied = [torch.cuda.Event() for _ in range(COPIES)]  # type: ignore[no-untyped-call]
            self._pinned, self._copied = pinned, copied
        self.table = table
        self.memory += 1


class _DeviceWorkTable:
    """The work table of one layer group on the device.

    Steps that are replayed from a recording use their own buffers: a prompt that needs more
    memory than any decode step replaces no buffer that a recording reads.
    """

    def __init__(self, layers: LayerGroup, device: torch.device) -> None:
        self.work = WorkTableBuilder(layers)
        self.can_overlap = can_overlap(device)
        """Whether the small items can start while large ones run."""
        self.plan: Plan | None = None
        """Plan of the table on the device."""
        self.recorded = _DeviceBuffers(device)
        self.eager = _DeviceBuffers(device)
        self.current = self.eager

    def prepare(
        self, plan: Plan, heads: int, value_dim: int, *, is_recorded: bool, may_grow: bool = True
    ) -> bool:
        """Copy the table of a step to the device and allocate memory for its partials.

        A plan that was prepared for a recording stays in the buffers of recordings.

        Returns:
            False if the step does not fit into the buffers of recordings and they must not grow.
        """
        is_new = self.plan is not plan
        if is_new:
            self.work.update(plan)
            self.plan = plan
        num_partials = self.work.num_partials * heads
        num_rows = plan.num_queries * heads if self.work.layers.merges_in_attention else 0
        fits = may_grow or (
            self.recorded.fits(len(self.work.words), num_partials, value_dim)
            and TICKET_WORDS + num_rows <= len(self.recorded.counters)
        )
        is_recorded = is_recorded and fits
        if is_new or (is_recorded and self.current is not self.recorded):
            self.current = self.recorded if is_recorded else self.eager
            self.current.copy(torch.from_numpy(self.work.words))
        if self.current is self.recorded and num_partials > 0:
            num_partials = max(num_partials, RECORDED_PARTIALS * heads)
        self.current.reserve(num_partials, value_dim)
        self.current.reserve_counters(num_rows)
        return fits


class TritonKernels:
    """GPU implementation. It owns memory for tables and partials, so it serves one stream."""

    def __init__(self, tuning: AttentionTuning = DEFAULT_TUNING) -> None:
        """Start without tables; `tuning` differs only in benchmarks."""
        self._tuning = tuning
        self._tables: dict[tuple[torch.device, LayerGroup], _DeviceWorkTable] = {}
        self._addresses: dict[tuple[int, ...], Tensor] = {}

    def prepare(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        window: int | None,
        may_grow: bool = True,
    ) -> GraphKey | None:
        """Copy a step's table to the device; see `ops.AttentionOperations.prepare`."""
        _check_shapes(query, key_cache, value_cache)
        device_table = self._device_table(query, key_cache, value_cache, plan, window)
        if not device_table.prepare(
            plan, query.shape[1], value_cache.shape[3], is_recorded=True, may_grow=may_grow
        ):
            return None
        work = device_table.work
        has_window = work.layers.window is not None
        memory = device_table.recorded.memory
        return GraphKey(work.large, work.is_merged, has_window, work.first_item, memory)

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
        """Compute the items of the table, then merge; see `ops.AttentionOperations.attention`."""
        _check_shapes(query, key_cache, value_cache)
        window = plan.effective_window(window)
        device_table = self._device_table(query, key_cache, value_cache, plan, window)
        heads, value_dim = query.shape[1], value_cache.shape[3]
        device_table.prepare(plan, heads, value_dim, is_recorded=False)
        buffers = device_table.current
        shape = _shape(query, key_cache, value_cache)
        variant = AttentionVariant(window is not None, softcap is not None, sinks is not None)
        work = device_table.work
        # The kernel needs an address; it is not read without sinks.
        sinks = buffers.lse if sinks is None else sinks.to(torch.float32).contiguous()
        sizes = (work.large, 0) if work.large else (0,)
        overlaps = len(sizes) > 1 and device_table.can_overlap
        for large in sizes:
            constants = attention_constants(shape, variant, large, self._tuning, overlaps=overlaps)
            _ATTEND[(work.num_programs(large),)](
                *(out, buffers.partials, buffers.lse, query, key_cache, value_cache),
                *(buffers.table, work.first_item, buffers.counters, sinks),
                scale * LOG2_E if softcap is None else scale * 2 * LOG2_E / softcap,
                0.0 if softcap is None else softcap * LOG2_E,
                *(out.stride(0), out.stride(1), query.stride(0), query.stride(1)),
                *(key_cache.stride(1), key_cache.stride(2)),
                *(value_cache.stride(1), value_cache.stride(2)),
                **constants,
                **attention_options(shape, large, self._tuning),
                **launch_options(constants),
            )
        if work.is_merged:
            _MERGE[(_merge_programs(len(query), heads, value_dim, work.layers.processors),)](
                out,
                buffers.partials,
                buffers.lse,
                buffers.table,
                sinks,
                min(len(query), work.first_item // MERGE_SIZE),
                0,
                out.stride(0),
                out.stride(1),
                **merge_constants(
                    heads,
                    value_dim,
                    has_sinks=variant.has_sinks,
                    is_indexed=False,
                ),
                num_warps=4,
            )
        return out

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
        """Merge partials by their LSE in float32; see `ops.AttentionOperations.merge`."""
        _check_dtype("outputs", outputs)
        _check_device("outputs", outputs)
        heads, value_dim = outputs.shape[1:]
        out = outputs.new_empty((len(slots), heads, value_dim), dtype=torch.float32)
        outputs, lse, slots = outputs.contiguous(), lse.contiguous(), slots.contiguous()
        _MERGE[(_merge_programs(len(slots), heads, value_dim, _processors(outputs.device)),)](
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
        """Write new keys and values to their slots; see `ops.AttentionOperations.store_kv`."""
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
        """Copy whole blocks inside each cache; see `ops.AttentionOperations.copy_blocks`."""
        sizes: dict[tuple[torch.device, int, int], list[Tensor]] = {}
        for cache in caches:
            _check_device("caches", cache)
            size = cache[0].numel() * cache.element_size() if len(cache) else 0
            if not cache.is_contiguous() or size % 4 or cache.data_ptr() % 16:
                # Another layout. torch reads all sources before it writes, too.
                cache.index_copy_(0, destination, cache.index_select(0, source))
            elif size:
                sizes.setdefault((cache.device, len(cache), size // 4), []).append(cache)
        for (device, _, words), same_size in sizes.items():
            self._move(same_size, source.to(device), destination.to(device), words)

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a cache on the device with contiguous blocks."""
        device = "cpu" if INTERPRETED else "cuda"
        return torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device)

    def _move(self, caches: list[Tensor], source: Tensor, destination: Tensor, words: int) -> None:
        """Copy blocks of `words` int32 words through scratch memory."""
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

    def _device_table(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        window: int | None,
    ) -> _DeviceWorkTable:
        """Return the device table of a layer, which `prepare` updates to the plan."""
        shape = _shape(query, key_cache, value_cache)
        layers = LayerGroup(
            kv_heads=shape.kv_heads,
            group=shape.group,
            window=plan.effective_window(window),
            small=small_rows(shape.group),
            large=large_rows(shape, self._tuning),
            processors=_processors(query.device),
            programs=(
                programs_per_processor(shape, 0),
                programs_per_processor(shape, 64),
                programs_per_processor(shape, 128),
            ),
            max_items_per_program=self._tuning.max_items_per_program,
            merges_in_attention=self._tuning.merges_in_attention,
        )
        device_table = self._tables.get((query.device, layers))
        if device_table is None:
            device_table = self._tables[query.device, layers] = _DeviceWorkTable(
                layers, query.device
            )
        return device_table


def _shape(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> AttentionShape:
    _, page, kv_heads, dim = key_cache.shape
    group = query.shape[1] // kv_heads
    return AttentionShape(query.dtype, kv_heads, group, dim, value_cache.shape[3], page)


def _merge_programs(num_queries: int, heads: int, value_dim: int, processors: int) -> int:
    """Return the programs of a merge launch: one for each tile of heads, up to what fits."""
    num_tiles = num_queries * -(-heads // merge_heads(heads, value_dim))
    return max(1, min(num_tiles, processors * MERGE_PROGRAMS))


def can_overlap(device: torch.device) -> bool:
    """Return whether a launch can begin while the previous one runs; the interpreter's cannot."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY


def max_dim(device: torch.device) -> int:
    """Return the largest head size for which a device has enough shared memory."""
    if INTERPRETED:
        return MAX_DIM
    # torch does not declare this property.
    properties: Any = torch.cuda.get_device_properties(device)
    has_much = properties.shared_memory_per_block_optin >= MAX_SHARED_BYTES
    return MAX_DIM if has_much else SMALL_DEVICE_DIM


def _processors(device: torch.device) -> int:
    if INTERPRETED:
        return INTERPRETED_PROCESSORS
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors


def _check_shapes(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Check for shapes, a dtype and a device that the kernels support."""
    _check_dtype("query", query)
    _check_device("query", query)
    for name, dim in (("query", query.shape[2]), ("value_cache", value_cache.shape[3])):
        if dim > SMALL_DEVICE_DIM and dim > (most := max_dim(query.device)):
            raise UnsupportedShapeError(
                f"{name} has head size {dim}, 'triton' supports at most {most} on this device"
            )
    group = query.shape[1] // key_cache.shape[2]
    if group > MAX_GROUP:
        raise UnsupportedShapeError(
            f"query has {group} heads per KV head, 'triton' supports at most {MAX_GROUP}"
        )


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} is {tensor.dtype}, 'triton' supports bfloat16, float16 and float32"
        )


def _check_device(name: str, tensor: Tensor) -> None:
    expected = "cpu" if INTERPRETED else "cuda"
    if tensor.device.type != expected:
        raise ValueError(f"{name} is on {tensor.device}, but 'triton' runs on {expected}")
