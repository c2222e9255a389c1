"""Attention over shared, paged keys and values: one signature per operation.

`implementation(name)` picks who computes; callers hold the `Operations` it returns and pass
it down. All implementations mean the same (`reference` defines what), read the same caches
and obey the same plan. Here arguments are checked, once for all of them.

    reference    plain torch, float64-able, slow
    cpu          fast torch: each shared stretch once, packed heads, one softmax
    invariant    as cpu, but the same bits for a query whatever else is in the step
    triton       kernels for a GPU: all stretches of a step in one launch

Knows no model and no context: a plan says which queries read which blocks. A key/value
cache is [N, B, K, D] whose first two dimensions flatten, so that blocks that follow each
other in memory are one stretch that is read in place; `new_cache` returns one in the layout
that its implementation reads fastest, and each implementation takes any. Nothing here knows
gradients, so it does not matter in which of torch's modes an operation is called.

Shapes: T queries or new tokens - H query heads - K kv heads - D head dim - E value head dim -
B tokens of a block - N blocks - S parts - W most parts of one query.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from . import arguments, cpu, reference
from .invariant import Invariant
from .plan import Plan

NAMES: Final = ("reference", "cpu", "invariant", "triton")


class Kernels(Protocol):
    """What a file of implementations defines; arguments are checked before."""

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
        """Attend, write to `out`, return it."""
        ...

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
        """Put parts together."""
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
class Replayable(Protocol):
    """What an implementation defines whose launches can be captured and replayed."""

    def prepare(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Plan,
        *,
        window: int | None,
    ) -> Hashable:
        """Bring a step to the device; say what a launch depends on."""
        ...


def implementation(name: str) -> Operations:
    """Return the operations of one implementation.

    Raises:
        ValueError: if `name` is not one of `NAMES`.
    """
    if name == "reference":
        return Operations(name, reference)
    if name == "cpu":
        return Operations(name, cpu.Cpu())
    if name == "invariant":
        return Operations(name, Invariant())
    if name == "triton":
        # Loaded where it is asked for: a machine without a GPU needs no triton.
        try:
            from .gpu.gpu import Gpu
        except ImportError as error:
            raise ValueError(f"implementation 'triton' cannot be loaded: {error}") from error
        return Operations(name, Gpu())
    raise ValueError(f"implementation must be one of {', '.join(NAMES)}, got {name!r}")


def _without_gradients() -> contextlib.AbstractContextManager[None]:
    """Return inference mode, or nothing where a step is in it: to enter costs microseconds."""
    return contextlib.nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()


class Operations:
    """The operations of one implementation, arguments checked."""

    def __init__(self, name: str, kernels: Kernels) -> None:
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

        The new tokens' keys and values must be stored before. Slots that the plan does not
        name are never read into a result, whatever they hold. An implementation may keep
        copies of what it has read: from then on a cache is written by `store_kv` and
        `copy_blocks` of these operations alone.

        Args:
            query: [T, H, D], rows in the plan's order; strides are free but for the last.
                What lies behind the plan's queries fills a step up: it attends to nothing, and
                its part of the result means nothing.
            key_cache: [N, B, K, D] with K a divisor of H, blocks that follow each other.
            value_cache: [N, B, K, E].
            plan: Of this step's rows.
            scale: Factor of the scores.
            window: Positions that a query sees, its own included; None sees all.
            softcap: Scores become `softcap * tanh(scores / softcap)`.
            sinks: [H], one score per head that takes weight and has no value.
            out: [T, H, E] in the query's dtype, overwritten; None makes one.

        Returns:
            [T, H, E] in the query's dtype; `out` if it was given.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
        """
        arguments.check_attention(query, key_cache, value_cache, plan)
        arguments.check_variants(query, scale, window, softcap, sinks)
        shape = (query.shape[0], query.shape[1], value_cache.shape[3])
        if out is None:
            out = query.new_empty(shape)
        elif out.shape != shape or out.dtype != query.dtype:
            raise ValueError(
                f"out must be {list(shape)} {query.dtype}, got {list(out.shape)} {out.dtype}"
            )
        elif out.stride(2) != 1:
            raise ValueError(f"out must have vectors in one stretch, got strides {out.stride()}")
        arguments.check_one_device(
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
    ) -> Hashable:
        """Do what `attention` does on the host, so that a CUDA graph of it can be replayed.

        A step's tables go to the device; each kind of layer needs them once. A graph that was
        captured with the same tensors is good for any plan of at most as many queries for
        which this returns what it returned before the capture. Outputs of queries that the
        plan does not have are left as they are. Without a device this does nothing.

        Args:
            query: As in `attention`; it may have more tokens than the plan.
            key_cache: As in `attention`.
            value_cache: As in `attention`.
            plan: Of this step's rows.
            window: As in `attention`.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
        """
        arguments.check_attention(query, key_cache, value_cache, plan)
        arguments.check_window(window)
        arguments.check_one_device(query=query, key_cache=key_cache, value_cache=value_cache)
        if not isinstance(self._kernels, Replayable):
            return None
        return self._kernels.prepare(query, key_cache, value_cache, plan, window=window)

    def merge(
        self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Put together what each query found in disjoint stretches of its context.

        Args:
            outputs: [S, H, E] parts, each normalised for itself.
            lse: [S, H] natural log of the sum of the exponentials behind each part.
            slots: [T, W] int64 below S, the parts of each query; -1 fills up, one is a part at
                least.
            sinks: [H] as in `attention`.

        Returns:
            [T, H, E] in float32, or float64 where the parts are.

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
            arguments.check_floats(name, tensor)
        arguments.check_sinks(sinks, outputs.shape[1])
        arguments.check_one_device(outputs=outputs, lse=lse, slots=slots, sinks=sinks)
        arguments.check_range("slots", slots, -1, len(outputs))
        if slots.device.type == "cpu" and len(slots) and not (slots >= 0).any(dim=1).all():
            raise ValueError("slots must name one part of each query at least")
        return self._kernels.merge(outputs, lse, slots, sinks=sinks)

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Write the keys and values of new tokens into the caches, in place.

        Args:
            key: [T, K, D], strides are free.
            value: [T, K, E].
            key_cache: [N, B, K, D], blocks that follow each other.
            value_cache: [N, B, K, E].
            slots: [T] int64, block * B + offset, each slot at most once. On a GPU the host does
                not read them; what lies outside of the caches is not written there.

        Raises:
            ValueError: if an argument does not fit the others; the message names it.
        """
        for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
            arguments.check_layout(name, cache)
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
        arguments.check_one_device(
            key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots
        )
        arguments.check_range("slots", slots, 0, key_cache.shape[0] * key_cache.shape[1])
        with _without_gradients():
            self._kernels.store_kv(key, value, key_cache, value_cache, slots)

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks inside each cache, in place; no pairs is a no-op.

        All sources are read before any destination is written.

        Args:
            caches: Any number of [N, B, K, D].
            source: [C] int64 blocks of every cache. On a GPU the host does not read them, and
                pairs that are outside of a cache are left out there.
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
        arguments.check_one_device(source=source, destination=destination)
        num_blocks = min((len(cache) for cache in caches), default=0)
        if caches:
            arguments.check_range("source", source, 0, num_blocks)
            arguments.check_range("destination", destination, 0, num_blocks)
        if len(source):
            with _without_gradients():
                self._kernels.copy_blocks(caches, source, destination)

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return zeros [num_blocks, block_size, heads, dim] in this implementation's layout.

        Raises:
            ValueError: if a size is below 1 or `dtype` no floating point; the message names it.
        """
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "heads": heads, "dim": dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point, got {dtype}")
        return self._kernels.new_cache(num_blocks, block_size, heads, dim, dtype)
