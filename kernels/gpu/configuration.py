"""Which tiles, warps and pipeline depths a kernel is compiled with, for which shapes.

Plain functions of shapes and dtypes: nothing is timed at run time, so that a launch never
waits for a search, CUDA graphs hold, and each choice can be compiled without a GPU.
`configurations` lists what is compiled for models as they are; tests check their registers.

Knows what fits an sm_90: 227 KB of shared memory, 255 registers, WGMMA from 64 rows on.

Shapes: G query heads per kv head - D, E head dims of keys, values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from . import attention, caching, merging

MAX_DIM: Final = 256
MAX_GROUP: Final = 128
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
TYPE_NAMES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
SMALL_ROWS: Final = 16
MERGE_HEADS: Final = 4
MERGE_PARTS: Final = 4
MOVE_TILE: Final = 1024


class Shape(NamedTuple):
    """What a layer's attention is compiled for."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    page: int


class Variant(NamedTuple):
    """What a layer's attention does besides."""

    has_window: bool = False
    has_cap: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Configuration:
    """One compilation of one kernel."""

    name: str
    kernel: Any
    """The jit function."""
    signature: dict[str, str]
    """Triton's type of every argument, in order; "constexpr" for constants."""
    constants: dict[str, Any]
    options: dict[str, int]
    """`num_warps` and `num_stages`."""
    aligned: tuple[str, ...] = field(default=())
    """Arguments that are divisible by 16: addresses, and distances in elements."""


def padded(size: int) -> int:
    """Return a size up to a power of two, at least what a tensor core takes."""
    return max(16, 1 << (size - 1).bit_length())


def small_rows(group: int) -> int:
    """Return the rows of a small item: one query at least."""
    return max(SMALL_ROWS, padded(group))


def large_rows(shape: Shape) -> int:
    """Return the rows of a large item at most, or 0 where all are small."""
    most = 64 if is_wide(shape) else 128
    if shape.dtype == torch.float32 and max(shape.dim, shape.value_dim) > 128:
        most = 0  # no number of warps has the registers
    return most if most > small_rows(shape.group) else 0


def is_wide(shape: Shape) -> bool:
    """Say whether the vectors of a head take so much room that tiles must be smaller."""
    widest = max(padded(shape.dim), padded(shape.value_dim))
    return shape.dtype == torch.float32 or widest > 128


def is_odd(shape: Shape) -> bool:
    """Say whether the group is no power of two: rows then take more registers."""
    return shape.group & (shape.group - 1) != 0


def attention_constants(shape: Shape, variant: Variant, large: int) -> dict[str, Any]:
    """Return the constants of `attention.attend`.

    Args:
        shape: Of the layer.
        variant: Of the layer.
        large: Rows of a large item: 0, 64 or 128.
    """
    tile = 32 if is_wide(shape) else 64
    # Page, keys and values take stages of their own: 5 keep two tiles of each on their way,
    # 3 one, where registers are short.
    is_short = is_wide(shape) or is_odd(shape)
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "DIM": shape.dim,
        "VALUE_DIM": shape.value_dim,
        "DIM_PAD": padded(shape.dim),
        "VALUE_PAD": padded(shape.value_dim),
        "PAGE": shape.page,
        "SMALL": small_rows(shape.group),
        "SMALL_TILE": tile,
        "SMALL_STAGES": 3 if is_short else 5,
        "LARGE": large,
        "LARGE_TILE": tile,
        "LARGE_STAGES": 2 if shape.dtype == torch.float32 else 3,
        "HAS_WINDOW": variant.has_window,
        "HAS_CAP": variant.has_cap,
        "HAS_SINKS": variant.has_sinks,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
    }


def attention_options(shape: Shape, large: int) -> dict[str, int]:
    """Return warps and stages of `attention.attend`."""
    is_heavy = large > 64 or (large > 0 and (is_odd(shape) or is_wide(shape)))
    return {"num_warps": 8 if is_heavy else 4, "num_stages": 3}


def merge_constants(
    heads: int, value_dim: int, *, has_sinks: bool, is_indexed: bool
) -> dict[str, Any]:
    """Return the constants of `merging.merge`."""
    return {
        "HEADS": heads,
        "HEAD_TILE": min(MERGE_HEADS, 1 << (heads - 1).bit_length()),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded(value_dim),
        "PARTS": MERGE_PARTS,
        "HAS_SINKS": has_sinks,
        "IS_INDEXED": is_indexed,
    }


def store_constants(kv_heads: int, dim: int, value_dim: int) -> dict[str, Any]:
    """Return the constants of `caching.store`."""
    return {
        "KV_HEADS": kv_heads,
        "HEADS_PAD": 1 << (kv_heads - 1).bit_length(),
        "DIM": dim,
        "DIM_PAD": padded(dim),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": padded(value_dim),
    }


def configurations() -> tuple[Configuration, ...]:
    """Return what models as they are compile: every head size, row class, page and variant."""
    bf16 = torch.bfloat16
    plain = Variant()
    found = [
        _attend(Shape(bf16, 8, 4, 128, 128, page), plain, large)
        for page in (16, 64)
        for large in (0, 64, 128)
    ]
    found += [
        _attend(Shape(bf16, 8, group, 128, 128, 16), plain, large)
        for group in (1, 2, 5, 7, 8, 16)
        for large in (64, 128)
    ]
    found += [
        _attend(shape, plain, large)
        for dim, value_dim in ((64, 64), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256))
        for shape in (Shape(bf16, 8, 4, dim, value_dim, 16),)
        for large in (0, 64, 128)
        if large <= large_rows(shape)
    ]
    found += [
        _attend(shape, plain, large)
        for dtype in (torch.float16, torch.float32)
        for dim in (64, 128, 256)
        for shape in (Shape(dtype, 8, 4, dim, dim, 16),)
        for large in (0, 64)
        if large <= large_rows(shape)
    ]
    found += [
        _attend(Shape(bf16, 8, 4, dim, dim, 16), variant, large)
        for dim, variant in (
            (128, Variant(has_window=True)),
            (256, Variant(has_cap=True)),
            (256, Variant(has_window=True, has_cap=True)),
            (64, Variant(has_sinks=True)),
            (64, Variant(has_window=True, has_sinks=True)),
        )
        for large in (0, 64)
    ]
    found += [_merge(bf16, 32, dim) for dim in (64, 80, 128, 256)]
    found += [_store(bf16, 8, 128, 128), _store(bf16, 8, 192, 128), *_moves()]
    return tuple(found)


def _attend(shape: Shape, variant: Variant, large: int) -> Configuration:
    element = f"*{TYPE_NAMES[shape.dtype]}"
    pointers = {
        "out": element,
        "partials": "*fp32",
        "lse": "*fp32",
        "query": element,
        "keys": element,
        "values": element,
        "table": "*i32",
        "sinks": "*fp32",
    }
    names = [name for name in attention.attend.arg_names if name.endswith("stride")]
    kind = "".join(
        word for word, on in zip(("-window", "-cap", "-sinks"), variant, strict=True) if on
    )
    name = (
        f"attend-{element[1:]}-group{shape.group}-{shape.dim}x{shape.value_dim}"
        f"-page{shape.page}-rows{small_rows(shape.group)}+{large}{kind}"
    )
    return _configuration(
        name,
        attention.attend,
        {**pointers, "scale": "fp32", "cap": "fp32", **dict.fromkeys(names, "i32")},
        attention_constants(shape, variant, large),
        attention_options(shape, large),
        (*pointers, *names),
    )


def _merge(dtype: torch.dtype, heads: int, value_dim: int) -> Configuration:
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
        merging.merge,
        {**pointers, **dict.fromkeys(numbers, "i32")},
        merge_constants(heads, value_dim, has_sinks=False, is_indexed=False),
        {"num_warps": 4, "num_stages": 2},
        (*pointers, "out_stride", "out_head_stride"),
    )


def _store(dtype: torch.dtype, kv_heads: int, dim: int, value_dim: int) -> Configuration:
    element = f"*{TYPE_NAMES[dtype]}"
    pointers = dict.fromkeys(("key", "value", "key_cache", "value_cache"), element)
    arguments = caching.store.arg_names
    numbers = [name for name in arguments if name.endswith(("from", "stride"))]
    return _configuration(
        f"store-{element[1:]}-{kv_heads}x{dim}x{value_dim}",
        caching.store,
        {**pointers, "slots": "*i64", "num_slots": "i32", **dict.fromkeys(numbers, "i32")},
        store_constants(kv_heads, dim, value_dim),
        {"num_warps": 4, "num_stages": 1},
        (*pointers, "slots", *numbers),
    )


def _moves() -> list[Configuration]:
    indices = dict.fromkeys(("addresses", "source", "destination"), "*i64")
    pointers = {**indices, "scratch": "*i32"}
    numbers = dict.fromkeys(("num_pairs", "num_blocks", "size"), "i32")
    return [
        _configuration(
            f"move-{'from' if to_scratch else 'to'}-blocks",
            caching.move,
            {**pointers, **numbers},
            {"TO_SCRATCH": to_scratch, "TILE": MOVE_TILE},
            {"num_warps": 4, "num_stages": 1},
            (*pointers, "size"),
        )
        for to_scratch in (True, False)
    ]


def _configuration(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    aligned: tuple[str, ...],
) -> Configuration:
    signature = {
        argument: "constexpr" if argument in constants else types[argument]
        for argument in kernel.arg_names
    }
    return Configuration(name, kernel, signature, constants, options, aligned)
