"""Attention over shared, paged keys and values: one signature for all implementations.

`implementation(name)` returns the `AttentionOperations` of one implementation. All
implementations have the same results (`reference` defines them), read the same caches and use
the same plan. The arguments are checked here.

    reference    plain torch, on any device, also in float64; slow
    cpu          C++ kernels, compiled for an instruction set of the processor
    invariant    like cpu, but bitwise independent of the rest of the step
    triton       GPU kernels: all ranges of a step in one launch
    flashinfer   FlashInfer's paged attention where it is installed, else triton; shares nothing

A KV cache is [N, B, K, D] and its first two dimensions flatten, so that consecutive blocks are
one contiguous range that is read in place. `new_cache` returns a cache in the layout that its
implementation reads fastest; each implementation accepts any layout. The operations have no
gradients and can be called in any grad mode.

Out of scope: models and contexts; a plan defines which queries read which blocks.

Shapes: T queries or new tokens - H query heads - K KV heads - D head dim - E value head dim -
B tokens of a block - N blocks - S partials - W maximum partials of one query.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from . import checks, reference
from .cpu import library
from .cpu.attention import CpuKernels, NativeLibrary
from .planning.plan import Plan

NAMES: Final = ("reference", "cpu", "invariant", "triton", "flashinfer")


class KernelBackend(Protocol):
    """The functions of an implementation; their arguments have been checked."""

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
        """Attend, write to `out` and return it."""
        ...

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
        """Merge partials."""
        ...

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Write new keys and values."""
        ...

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks."""
        ...

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Allocate a cache of zeros."""
        ...


@runtime_checkable
class ReplayableBackend(Protocol):
    """The function of implementations whose launches can be captured and replayed."""

    def prepare(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        window: int | None,
        may_grow: bool,
    ) -> Hashable:
        """Copy a step to the device; return the values that a launch depends on."""
        ...


def implementation(name: str, instructions: str = library.AUTO) -> AttentionOperations:
    """Return the operations of one implementation.

    Args:
        name: One of `NAMES`.
        instructions: Instruction set of a CPU, one of `library.NAMES`, or the fastest.

    Raises:
        ValueError: if `name` is not one of `NAMES`, or the processor lacks the instructions.
        LibraryUnavailableError: if the C++ kernels are needed and cannot be compiled.
    """
    if name == "reference":
        return AttentionOperations(name, reference)
    if name in ("cpu", "invariant"):
        native = NativeLibrary(library.find(instructions))
        return AttentionOperations(name, CpuKernels(native, is_invariant=name == "invariant"))
    if name == "triton":
        # Imported on demand: a machine without a GPU does not need triton.
        try:
            from .gpu.launcher import TritonKernels
        except ImportError as error:
            raise ValueError(f"implementation 'triton' cannot be loaded: {error}") from error
        return AttentionOperations(name, TritonKernels())
    if name == "flashinfer":
        try:
            from .gpu.flashinfer_backend import FlashInferKernels
        except ImportError as error:
            raise ValueError(f"implementation 'flashinfer' cannot be loaded: {error}") from error
        return AttentionOperations(name, FlashInferKernels())
    raise ValueError(f"implementation must be one of {', '.join(NAMES)}, got {name!r}")


def _without_gradients() -> contextlib.AbstractContextManager[None]:
    """Return inference mode, or a null context if it is on: entering takes microseconds."""
    return contextlib.nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()


class AttentionOperations:
    """The operations of one implementation, with argument checks."""

    def __init__(self, name: str, kernels: KernelBackend) -> None:
        self.name: Final = name
        self._kernels: Final = kernels

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend every query to the positions of its context up to its own.

        The keys and values of the new tokens must have been stored. Slots outside the plan do
        not affect the result. An implementation may copy what it has read: after the first
        read, a cache must be written only by `store_kv` and `copy_blocks` of this object.

        Args:
            query: [T, H, D], rows in the plan's order; only the last dimension must be
                contiguous. Queries after those of the plan are padding: they attend to
                nothing, and their results are undefined.
            key_cache: [N, B, K, D] with consecutive blocks; K divides H.
            value_cache: [N, B, K, E].
            plan: Plan of this step.
            scale: Factor of the scores, above 0.
            window: Positions that a query sees, including its own; None for all.
            softcap: Scores become `softcap * tanh(scores / softcap)`.
            sinks: [H], one score per head that takes weight but has no value.
            out: [T, H, E] in the query's dtype, overwritten and returned; None allocates it.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
            UnsupportedShapeError: if the implementation does not support the size or the number of
                heads.
        """
        checks.check_attention(query, key_cache, value_cache, plan)
        checks.check_score_parameters(query, scale, window, softcap, sinks)
        shape = (query.shape[0], query.shape[1], value_cache.shape[3])
        if out is None:
            out = query.new_empty(shape)
        elif out.shape != shape or out.dtype != query.dtype:
            raise ValueError(
                f"out must be {list(shape)} {query.dtype}, got {list(out.shape)} {out.dtype}"
            )
        elif out.stride(2) != 1:
            raise ValueError(f"out must have contiguous vectors, got strides {out.stride()}")
        checks.check_one_device(
            query=query, key_cache=key_cache, value_cache=value_cache, sinks=sinks, out=out
        )
        with _without_gradients():
            return self._kernels.attention(
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

    def prepare(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        window: int | None = None,
        may_grow: bool = True,
    ) -> Hashable:
        """Do the host work of `attention`, so that a CUDA graph of it can be replayed.

        Copies a step's work table to the device, once per kind of layer. A graph that was
        captured with the same tensors is valid for any plan with at most as many queries for
        which this method returns the same value as before the capture. Outputs of queries
        outside the plan are not written. Without a device this method does nothing.

        Args:
            query: As in `attention`.
            key_cache: As in `attention`.
            value_cache: As in `attention`.
            plan: Plan of this step.
            window: As in `attention`.
            may_grow: Whether memory that graphs read may be replaced, which makes all of them
                invalid. Without it the result is None if the memory is too small.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
            UnsupportedShapeError: as in `attention`.
        """
        checks.check_attention(query, key_cache, value_cache, plan)
        checks.check_window(window)
        checks.check_one_device(query=query, key_cache=key_cache, value_cache=value_cache)
        if not isinstance(self._kernels, ReplayableBackend):
            return None
        return self._kernels.prepare(
            query, key_cache, value_cache, plan, window=window, may_grow=may_grow
        )

    def merge(
        self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Merge the partials of each query over disjoint ranges of its context.

        Args:
            outputs: [S, H, E] partials, each normalised.
            lse: [S, H] natural log of the sum of exponentials of each partial.
            slots: [T, W] int64 indices of the partials of each query, padded with -1; each
                query has at least one.
            sinks: [H] as in `attention`.

        Returns:
            [T, H, E] in float32, or in float64 if the partials are.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
        """
        if outputs.dim() != 3:
            raise ValueError(f"outputs must be [S, H, E], got {list(outputs.shape)}")
        if lse.shape != outputs.shape[:2]:
            raise ValueError(f"lse must be {list(outputs.shape[:2])}, got {list(lse.shape)}")
        if slots.dim() != 2 or slots.dtype != torch.int64:
            raise ValueError(f"slots must be [T, W] int64, got {list(slots.shape)} {slots.dtype}")
        for name, tensor in (("outputs", outputs), ("lse", lse)):
            checks.check_floats(name, tensor)
        checks.check_sinks(sinks, outputs.shape[1])
        checks.check_one_device(outputs=outputs, lse=lse, slots=slots, sinks=sinks)
        checks.check_range("slots", slots, -1, len(outputs))
        if slots.device.type == "cpu" and len(slots) and not (slots >= 0).any(dim=1).all():
            raise ValueError("slots must name at least one partial of each query")
        return self._kernels.merge(outputs, lse, slots, sinks=sinks)

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Write the keys and values of new tokens into the caches, in place.

        Args:
            key: [T, K, D] with any strides.
            value: [T, K, E].
            key_cache: [N, B, K, D] with consecutive blocks.
            value_cache: [N, B, K, E].
            slots: [T] int64, block * B + offset, each slot at most once. On a GPU they are not
                checked, and tokens with a slot outside the caches are not written.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
        """
        for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
            checks.check_layout(name, cache)
            if new.dim() != 3 or new.shape[1:] != cache.shape[2:]:
                raise ValueError(
                    f"{name} must be [T, {cache.shape[2]}, {cache.shape[3]}], got {list(new.shape)}"
                )
            if slots.shape != new.shape[:1] or slots.dtype != torch.int64:
                raise ValueError(
                    f"slots must be [{new.shape[0]}] int64, got {list(slots.shape)} {slots.dtype}"
                )
        if value_cache.shape[:3] != key_cache.shape[:3]:
            raise ValueError(
                f"value_cache must be {[*key_cache.shape[:3], 'E']}, got {list(value_cache.shape)}"
            )
        checks.check_one_device(
            key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots
        )
        checks.check_range("slots", slots, 0, key_cache.shape[0] * key_cache.shape[1])
        with _without_gradients():
            self._kernels.store_kv(key, value, key_cache, value_cache, slots)

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks inside each cache, in place.

        All sources are read before any destination is written.

        Args:
            caches: Any number of [N, B, K, D].
            source: [C] int64 blocks of every cache. On a GPU they are not checked, and pairs
                outside a cache are skipped.
            destination: [C] int64 blocks, each at most once.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
        """
        if source.dim() != 1 or source.dtype != torch.int64:
            raise ValueError(f"source must be [C] int64, got {list(source.shape)} {source.dtype}")
        if destination.shape != source.shape or destination.dtype != torch.int64:
            raise ValueError(
                f"destination must be {list(source.shape)} int64,"
                f" got {list(destination.shape)} {destination.dtype}"
            )
        for index, cache in enumerate(caches):
            if cache.dim() != 4:
                raise ValueError(f"caches[{index}] must be [N, B, K, D], got {list(cache.shape)}")
            if cache.device != source.device:
                raise ValueError(f"caches[{index}] is on {cache.device}, source on {source.device}")
        checks.check_one_device(source=source, destination=destination)
        num_blocks = min((len(cache) for cache in caches), default=0)
        if caches:
            checks.check_range("source", source, 0, num_blocks)
            checks.check_range("destination", destination, 0, num_blocks)
        if len(source):
            with _without_gradients():
                self._kernels.copy_blocks(caches, source, destination)

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return zeros [num_blocks, block_size, heads, dim] in this implementation's layout.

        Raises:
            ValueError: if a size is below 1 or `dtype` is not floating point.
        """
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "heads": heads, "dim": dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, got {dtype}")
        return self._kernels.new_cache(num_blocks, block_size, heads, dim, dtype)
