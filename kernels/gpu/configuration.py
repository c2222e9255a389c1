"""Tile sizes, warps and pipeline depths of the kernels, by shape and dtype.

These are plain functions of shapes and dtypes. Nothing is tuned at run time, so a launch never
waits for a search, CUDA graphs stay valid, and each choice can be compiled without a GPU.
`configurations` lists what common models compile; tests check registers and instructions.

The choices are made for sm_90: 227 KB of shared memory, 255 registers per thread, WGMMA from 64
rows on. The kernels compile for sm_80, too, where they have not run.

Shapes: G query heads per KV head - D, E head dims of keys, values.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch

from . import attention, kv_cache, merge, sampling

MAX_DIM: Final = 256
MAX_GROUP: Final = 128
LEAST_CAPABILITY: Final = (8, 0)
"""Compute capability that the kernels need, for products of bfloat16."""
OVERLAP_CAPABILITY: Final = (9, 0)
"""Compute capability that programmatic dependent launch needs."""
MAX_SHARED_BYTES: Final = 160 * 1024
"""Bound of the shared memory of a program. Devices of compute capability 8.0 have 163 KiB for it,
of 9.0 and 10.0 227 KiB."""
SMALL_SHARED_BYTES: Final = 99 * 1024
"""Shared memory for a program on devices of 8.6, 8.9 and 12.0."""
SMALL_DEVICE_DIM: Final = 128
"""Largest head size on a device with less shared memory than `MAX_SHARED_BYTES`."""
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
TYPE_NAMES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
SMALL_ROWS: Final = 16
WIDE_REGISTERS: Final = 200
"""Registers per thread of small items with wide heads, of which two programs run at once."""
MERGE_NUMBERS: Final = 512
"""Numbers that a merge program computes: 4 for each of its threads, which one load reads."""
MOVE_TILE: Final = 1024


class AttentionShape(NamedTuple):
    """The shapes that attention is compiled for."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    page: int


class AttentionTuning(NamedTuple):
    """Choices of the attention kernel that a GPU decides; a benchmark compares them.

    Pages, keys and values take separate pipeline stages. With five stages, three copies are in
    flight while a tile is multiplied; with three there are none, in half the shared memory.
    """

    small_warps: int = 4
    """Warps of items that read few queries: with 2, fewer results cross warps."""
    small_stages: int = 5
    """Pipeline stages of items that read few queries."""
    large_stages: int = 5
    """Pipeline stages of items that read many queries."""
    large_tile: int = 64
    """Maximum keys of a tile of items that read many queries."""
    tile_of_64_rows: int = 32
    """Maximum keys of a tile of items with 64 rows, of which two share a processor."""
    max_large_rows: int = 128
    """Maximum rows of a large item: 64 runs two programs on a processor, 128 one."""
    max_items_per_program: int = 2
    """Maximum items for each program: more of them balance better, fewer start less often."""
    merges_in_attention: bool = False
    """Whether the program that writes the last partial of a query merges them, without another
    launch."""
    overlaps_sizes: bool = True
    """Whether small items start while large ones run (programmatic dependent launch)."""


DEFAULT_TUNING: Final = AttentionTuning()


class AttentionVariant(NamedTuple):
    """The optional features of a layer's attention."""

    has_window: bool = False
    has_cap: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class KernelConfiguration:
    """One compilation of a kernel."""

    name: str
    kernel: Any
    """The jit function."""
    signature: dict[str, str]
    """Triton's type of every argument, in order; "constexpr" for constants."""
    constants: dict[str, Any]
    options: dict[str, int]
    """`num_warps`, `num_stages`, `maxnreg` and `launch_pdl`."""
    aligned: tuple[str, ...] = field(default=())
    """Arguments that are divisible by 16: addresses, and strides in elements."""
    shape: AttentionShape | None = None
    """The shape of an attention kernel; None for other kernels."""

    @property
    def large(self) -> int:
        """Rows of the large items that an attention kernel computes, 0 for small ones."""
        return int(self.constants["ROWS"]) if self.constants["IS_LARGE"] else 0


def padded_size(size: int) -> int:
    """Return a size rounded up to a power of 2, at least 16 for tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


def small_rows(group: int) -> int:
    """Return the rows of a small item: one query at least."""
    return max(SMALL_ROWS, padded_size(group))


def large_rows(shape: AttentionShape, tuning: AttentionTuning = DEFAULT_TUNING) -> int:
    """Return the maximum rows of a large item, or 0 if all items are small."""
    rows = min(tuning.max_large_rows, 64 if is_wide(shape) else 128)
    if shape.dtype == torch.float32 and max(shape.dim, shape.value_dim) > 128:
        rows = 0  # registers do not suffice with any number of warps
    return rows if rows > small_rows(shape.group) else 0


def is_wide(shape: AttentionShape) -> bool:
    """Return whether head vectors are so large that tiles must be smaller."""
    widest = max(padded_size(shape.dim), padded_size(shape.value_dim))
    return shape.dtype == torch.float32 or widest > 128


def has_odd_group(shape: AttentionShape) -> bool:
    """Return whether the group is not a power of 2: rows then need more registers."""
    return shape.group & (shape.group - 1) != 0


def attention_constants(
    shape: AttentionShape,
    variant: AttentionVariant,
    large: int,
    tuning: AttentionTuning = DEFAULT_TUNING,
    *,
    overlaps: bool = False,
) -> dict[str, Any]:
    """Return the constants of `attention.attend_kernel`.

    Args:
        shape: Shape of the layer.
        variant: Features of the layer.
        large: Rows of the large items that the launch computes: 64 or 128; 0 for the small ones.
        tuning: Choices that a benchmark compares.
        overlaps: Whether the step has items of both sizes, and the device can begin a launch while
            the previous one runs.
    """
    is_exact = shape.dtype == torch.float32  # no tensor cores: registers are scarce
    if large:
        rows = large
        tile, stages = _large_tile(shape, large, tuning), tuning.large_stages
    else:
        rows, tile = small_rows(shape.group), _small_tile(shape, variant)
        # As many bytes in flight with smaller tiles, or where a processor runs one program that
        # reads small head vectors.
        is_short = tile < _full_tile(shape)
        is_alone = programs_per_processor(shape, 0) == 1 and max(shape.dim, shape.value_dim) <= 64
        stages = tuning.small_stages + 2 * is_short + 2 * is_alone
    overlaps = overlaps and tuning.overlaps_sizes
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "DIM": shape.dim,
        "VALUE_DIM": shape.value_dim,
        "DIM_PAD": padded_size(shape.dim),
        "VALUE_PAD": padded_size(shape.value_dim),
        "PAGE": shape.page,
        "ROWS": rows,
        "TILE": tile,
        "STAGES": (2 if large else 3) if is_exact else stages,
        "IS_LARGE": large > 0,
        "HAS_WINDOW": variant.has_window,
        "HAS_CAP": variant.has_cap,
        "HAS_SINKS": variant.has_sinks,
        "MERGES": tuning.merges_in_attention,
        "LEADS": overlaps and large > 0,
        "FOLLOWS": overlaps and not large,
        "THREADS": 32 * attention_options(shape, large, tuning)["num_warps"],
        "PRECISION": "ieee" if is_exact else "tf32",
    }


def _small_tile(shape: AttentionShape, variant: AttentionVariant) -> int:
    """Return the keys of a tile of a small item."""
    # The addresses of an odd group's rows take registers, and so do a window and sinks together:
    # with tiles of 64 keys others spill.
    has_both = variant.has_window and variant.has_sinks
    is_short = (has_odd_group(shape) or has_both) and shape.dtype != torch.float32
    return 32 if is_short else _full_tile(shape)


def _full_tile(shape: AttentionShape) -> int:
    """Return the keys of a tile for which heads of this size leave registers."""
    return 32 if is_wide(shape) else 64


def _large_tile(shape: AttentionShape, large: int, tuning: AttentionTuning) -> int:
    """Return the keys of a tile of a large item; no register is spilled."""
    if is_wide(shape) or (large > 64 and has_odd_group(shape)):
        return 32
    if large > 64 or is_heavy(shape, large) or max(shape.dim, shape.value_dim) <= 64:
        return min(64, tuning.large_tile)
    return min(tuning.tile_of_64_rows, tuning.large_tile)


def is_heavy(shape: AttentionShape, rows: int) -> bool:
    """Return whether items of `rows` rows need the registers of eight warps."""
    return rows > 64 or (rows == 64 and (has_odd_group(shape) or is_wide(shape)))


def attention_options(
    shape: AttentionShape, large: int, tuning: AttentionTuning = DEFAULT_TUNING
) -> dict[str, int]:
    """Return warps and stages of `attention.attend_kernel`, for large or (0) small items."""
    rows = large or small_rows(shape.group)
    num_warps = 8 if is_heavy(shape, rows) else 4 if large else tuning.small_warps
    options = {"num_warps": num_warps, "num_stages": 3}
    is_exact = shape.dtype == torch.float32
    if not large and not is_exact and is_wide(shape) and not is_heavy(shape, rows):
        # Otherwise the compiler limits registers to 168, so that three programs fit, and spills.
        options["maxnreg"] = WIDE_REGISTERS
    return options


def programs_per_processor(shape: AttentionShape, large: int) -> int:
    """Return how many programs of `attention.attend_kernel` a multiprocessor runs at once.

    `large` is the rows of large items, or 0 for the launch of small ones.

    If not all programs of a launch fit at once, the last ones start when the others end, and the
    step takes twice as long. Registers are the limit, and in the shapes below shared memory;
    `test_machine_code` compares this with compiled code.
    """
    rows = large or small_rows(shape.group)
    if is_heavy(shape, rows):
        return 1
    if rows == 64 or is_wide(shape):
        return 2
    return 4 if max(shape.dim, shape.value_dim) <= 64 else 3


def launch_options(constants: dict[str, Any]) -> dict[str, bool]:
    """Return the option of a launch that begins while the previous kernel runs."""
    return {"launch_pdl": True} if constants["FOLLOWS"] else {}


def merge_constants(
    heads: int, value_dim: int, *, has_sinks: bool, is_indexed: bool
) -> dict[str, Any]:
    """Return the constants of `merge.merge_kernel`."""
    return {
        "HEADS": heads,
        "HEAD_TILE": merge_heads(heads, value_dim),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded_size(value_dim),
        "HAS_SINKS": has_sinks,
        "IS_INDEXED": is_indexed,
    }


def merge_heads(heads: int, value_dim: int) -> int:
    """Return the heads that a merge program computes."""
    return min(max(1, MERGE_NUMBERS // padded_size(value_dim)), 1 << (heads - 1).bit_length())


def store_constants(kv_heads: int, dim: int, value_dim: int) -> dict[str, Any]:
    """Return the constants of `kv_cache.store_kv_kernel`."""
    return {
        "KV_HEADS": kv_heads,
        "HEADS_PAD": 1 << (kv_heads - 1).bit_length(),
        "DIM": dim,
        "DIM_PAD": padded_size(dim),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded_size(value_dim),
    }


def configurations() -> tuple[KernelConfiguration, ...]:
    """Return the compilations of common models: head sizes, item sizes, pages and variants."""
    bf16 = torch.bfloat16
    plain = AttentionVariant()
    result = [
        _attend(AttentionShape(bf16, 8, 4, 128, 128, page), plain, large)
        for page in (16, 64)
        for large in (0, 64, 128)
    ]
    result += [
        _attend(AttentionShape(bf16, 8, group, 128, 128, 16), plain, large)
        for group in (1, 2, 5, 7, 8, 16)
        for large in (0, 64, 128)
    ]
    result += [
        _attend(shape, plain, large)
        for group, dim in ((48, 128), (71, 64), (128, 128))
        for shape in (AttentionShape(bf16, 1, group, dim, dim, 16),)
        for large in dict.fromkeys((0, large_rows(shape)))
    ]
    result += [
        _attend(shape, plain, large)
        for dim, value_dim in ((64, 64), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256))
        for shape in (AttentionShape(bf16, 8, 4, dim, value_dim, 16),)
        for large in (0, 64, 128)
        if large <= large_rows(shape)
    ]
    result += [
        _attend(shape, plain, large)
        for dtype in (torch.float16, torch.float32)
        for dim in (64, 128, 256)
        for shape in (AttentionShape(dtype, 8, 4, dim, dim, 16),)
        for large in (0, 64)
        if large <= large_rows(shape)
    ]
    result += [
        _attend(AttentionShape(bf16, 8, 4, dim, dim, 16), variant, large)
        for dim, variant in (
            (128, AttentionVariant(has_window=True)),
            (256, AttentionVariant(has_cap=True)),
            (256, AttentionVariant(has_window=True, has_cap=True)),
            (64, AttentionVariant(has_sinks=True)),
            (64, AttentionVariant(has_window=True, has_sinks=True)),
        )
        for large in (0, 64)
    ]
    tuning = DEFAULT_TUNING._replace(merges_in_attention=True)
    result += [
        _attend(AttentionShape(bf16, 8, 4, dim, dim, 16), plain, large, tuning)
        for dim in (64, 128)
        for large in (0, 64, 128)
    ]
    result += [
        _attend(AttentionShape(bf16, 8, 4, 128, 128, 16), plain, large, overlaps=True)
        for large in (0, 64, 128)
    ]
    result += [_merge(bf16, 32, dim) for dim in (64, 80, 128, 256)]
    result += [_store(bf16, 8, 128, 128), _store(bf16, 8, 192, 128), *_moves()]
    result += [_truncate(), _sample()]
    return tuple(result)


def _attend(
    shape: AttentionShape,
    variant: AttentionVariant,
    large: int,
    tuning: AttentionTuning = DEFAULT_TUNING,
    *,
    overlaps: bool = False,
) -> KernelConfiguration:
    element = f"*{TYPE_NAMES[shape.dtype]}"
    pointers = {
        "out": element,
        "partials": "*fp32",
        "lse": "*fp32",
        "query": element,
        "keys": element,
        "values": element,
        "table": "*i32",
        "counters": "*i32",
        "sinks": "*fp32",
    }
    names = [name for name in attention.attend_kernel.arg_names if name.endswith("stride")]
    kind = "".join(
        word for word, on in zip(("-window", "-cap", "-sinks"), variant, strict=True) if on
    )
    name = (
        f"attend-{element[1:]}-group{shape.group}-{shape.dim}x{shape.value_dim}"
        f"-page{shape.page}-rows{large or small_rows(shape.group)}{kind}"
        f"{'-merges' if tuning.merges_in_attention else ''}{'-overlaps' if overlaps else ''}"
    )
    constants = attention_constants(shape, variant, large, tuning, overlaps=overlaps)
    configuration = _configuration(
        name,
        attention.attend_kernel,
        {
            **pointers,
            "first_item": "i32",
            "scale": "fp32",
            "cap": "fp32",
            **dict.fromkeys(names, "i32"),
        },
        constants,
        {**attention_options(shape, large, tuning), **launch_options(constants)},
        (*pointers, "first_item", *names),
    )
    return replace(configuration, shape=shape)


def _merge(dtype: torch.dtype, heads: int, value_dim: int) -> KernelConfiguration:
    pointers = {
        "out": f"*{TYPE_NAMES[dtype]}",
        "partials": "*fp32",
        "lse": "*fp32",
        "table": "*i32",
        "sinks": "*fp32",
    }
    numbers = ("num_queries", "width", "out_stride", "out_head_stride")
    return _configuration(
        f"merge-{TYPE_NAMES[dtype]}-{heads}x{value_dim}",
        merge.merge_kernel,
        {**pointers, **dict.fromkeys(numbers, "i32")},
        merge_constants(heads, value_dim, has_sinks=False, is_indexed=False),
        {"num_warps": 4, "num_stages": 2},
        (*pointers, "out_stride", "out_head_stride"),
    )


def _store(dtype: torch.dtype, kv_heads: int, dim: int, value_dim: int) -> KernelConfiguration:
    element = f"*{TYPE_NAMES[dtype]}"
    pointers = dict.fromkeys(("key", "value", "key_cache", "value_cache"), element)
    arguments = kv_cache.store_kv_kernel.arg_names
    numbers = [name for name in arguments if name.endswith(("from", "stride"))]
    return _configuration(
        f"store-{element[1:]}-{kv_heads}x{dim}x{value_dim}",
        kv_cache.store_kv_kernel,
        {**pointers, "slots": "*i64", "num_slots": "i32", **dict.fromkeys(numbers, "i32")},
        store_constants(kv_heads, dim, value_dim),
        {"num_warps": 4, "num_stages": 1},
        (*pointers, "slots", *numbers),
    )


def _moves() -> list[KernelConfiguration]:
    indices = dict.fromkeys(("addresses", "source", "destination"), "*i64")
    pointers = {**indices, "scratch": "*i32"}
    numbers = dict.fromkeys(("num_pairs", "num_blocks", "size"), "i32")
    return [
        _configuration(
            f"move-{'from' if to_scratch else 'to'}-blocks",
            kv_cache.move_blocks_kernel,
            {**pointers, **numbers},
            {"TO_SCRATCH": to_scratch, "TILE": MOVE_TILE},
            {"num_warps": 4, "num_stages": 1},
            (*pointers, "size"),
        )
        for to_scratch in (True, False)
    ]


def _truncate() -> KernelConfiguration:
    pointers = {
        "scores": "*fp32",
        "rows": "*i64",
        "temperatures": "*fp64",
        "truncated": "*i64",
        "top_k": "*i64",
        "top_p": "*fp64",
        "log_min_p": "*fp64",
        "thresholds": "*i32",
        "last_ties": "*i32",
        "floors": "*fp64",
    }
    return _configuration(
        "truncate",
        sampling.truncate_kernel,
        {**pointers, "vocabulary": "i32", "stride": "i32"},
        {"TILE": sampling.TRUNCATE_TILE},
        {"num_warps": sampling.TRUNCATE_WARPS, "num_stages": 3},
        (*pointers, "stride"),
    )


def _sample() -> KernelConfiguration:
    pointers = {
        "scores": "*fp32",
        "rows": "*i64",
        "temperatures": "*fp64",
        "noise_keys": "*i64",
        "thresholds": "*i32",
        "last_ties": "*i32",
        "floors": "*fp64",
        "best": "*fp64",
        "tokens": "*i64",
    }
    return _configuration(
        "sample",
        sampling.sample_kernel,
        {**pointers, "vocabulary": "i32", "stride": "i32"},
        {"TILE": sampling.SAMPLE_TILE},
        {"num_warps": 4, "num_stages": 3},
        (*pointers, "stride"),
    )


def _configuration(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    aligned: tuple[str, ...],
) -> KernelConfiguration:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(kernel.fn).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    constants = {**defaults, **constants}
    signature = {
        argument: "constexpr" if argument in constants else types[argument]
        for argument in kernel.arg_names
    }
    return KernelConfiguration(name, kernel, signature, constants, options, aligned)
