"""Attention and the KV store on a CPU, by the C++ kernels.

The kernels read the arrays of a plan and the caches in place (`attention.cpp`). A cache has its
heads apart, so the tokens that a block holds for one head are contiguous. Float64, which the
kernels do not support, is computed by `reference`.

With `is_invariant` the result of a query depends only on what the query sees, bit by bit: the plan
must share nothing (`Planner(min_saved=...)`), and sums run over fixed tiles of a row's positions.

Shapes: as in `ops`.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .. import reference
from ..planning.plan import Plan
from . import cache_memory, library

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernels' numbers of data types, `Dtype` in simd.h."""
_ATTENTION: Final = struct.Struct("@P" + 4 * "Pqq" + "P8qff")
"""`AttentionArguments` in operations.h."""
_STORE: Final = struct.Struct("@PqqPqqPqqq")
"""`StoreArguments` in kv_store.cpp."""
_PLAN: Final = struct.Struct("@10P4q")
"""`Plan` in operations.h."""
_THREADS: Final = struct.Struct("@Pq")
"""`Threads` in parallel.h."""
NATIVE_PLAN: Final = "native"
"""The key of a packed plan in `Plan.derived`."""


class NativeLibrary:
    """The functions of the library of one instruction set."""

    def __init__(
        self, instructions: library.InstructionSet, *, prefers_pairs: bool | None = None
    ) -> None:
        """Load the library.

        Args:
            instructions: One of `library.supported()`.
            prefers_pairs: Multiply pairs of bfloat16 rather than floats; None uses
                `library.prefers_pairs`.

        Raises:
            LibraryUnavailableError: if there is none and it cannot be compiled.
        """
        functions = library.load(instructions)
        if prefers_pairs is None:
            prefers_pairs = library.prefers_pairs(instructions)
        self.prefers_pairs: Final = prefers_pairs
        self._parallel: Final = _parallel_function()
        for name in ("store", "rotate_store", "add_norm", "silu_mul", "linear", "sample"):
            _declare(functions, name, ctypes.c_char_p, ctypes.c_char_p)
        sizes = (ctypes.c_int64, ctypes.c_int64)
        for name in ("pack", "unpack"):
            _declare(functions, name, ctypes.c_void_p, ctypes.c_void_p, *sizes)
        functions.conure_packed_words.argtypes = sizes
        functions.conure_packed_words.restype = ctypes.c_int64
        _declare(functions, "attention", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        _declare(
            functions,
            "decoder",
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_void_p,
        )
        functions.conure_plan.argtypes = (ctypes.c_char_p,)
        functions.conure_plan.restype = ctypes.c_int64
        _declare(functions, "free_workspace", ctypes.c_void_p)
        functions.conure_new_workspace.restype = ctypes.c_void_p
        self.functions: Final = functions

    def threads(self) -> bytes:
        """Return `Threads` for a call: the threads that torch uses, and their number."""
        return _THREADS.pack(self._parallel, torch.get_num_threads())


class Workspace:
    """Memory of the attention kernel, kept from call to call; for one thread at a time."""

    def __init__(self, native: NativeLibrary) -> None:
        functions = native.functions
        self.address: Final[int] = functions.conure_new_workspace()
        weakref.finalize(self, functions.conure_free_workspace, self.address)


class CpuKernels:
    """CPU implementation; its workspace must be used by one thread at a time."""

    def __init__(self, native: NativeLibrary, *, is_invariant: bool = False) -> None:
        self._native: Final = native
        self._is_invariant: Final = is_invariant
        self._workspace: Final = Workspace(native)
        self._num_caches = 0

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
        """Attend by items; see `ops.AttentionOperations.attention`."""
        window = plan.effective_window(window)
        if query.dtype not in DTYPES:
            return reference.attention(
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
        if sinks is not None:
            sinks = sinks.float().contiguous()
        arguments = _ATTENTION.pack(
            plan_address(plan),
            query.data_ptr(),
            *query.stride()[:2],
            key_cache.data_ptr(),
            *key_cache.stride()[1:3],
            value_cache.data_ptr(),
            *value_cache.stride()[1:3],
            out.data_ptr(),
            *out.stride()[:2],
            0 if sinks is None else sinks.data_ptr(),
            query.shape[1],
            *key_cache.shape[2:],
            value_cache.shape[3],
            window or 0,
            DTYPES[query.dtype],
            self._is_invariant,
            self._native.prefers_pairs,
            scale,
            softcap or 0.0,
        )
        self._native.functions.conure_attention(
            arguments, self._native.threads(), self._workspace.address
        )
        return out

    def merge(self, outputs: Tensor, lse: Tensor, slots: Tensor, *, sinks: Tensor | None) -> Tensor:
        """Merge partials; see `ops.AttentionOperations.merge`."""
        return reference.merge(outputs, lse, slots, sinks=sinks)

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Write new keys and values to their slots; see `ops.AttentionOperations.store_kv`."""
        slots = slots.contiguous()
        for new, cache in ((key, key_cache), (value, value_cache)):
            new = new.to(cache.dtype)
            if new.stride(2) != 1:
                new = new.contiguous()
            size = cache.element_size()
            arguments = _STORE.pack(
                new.data_ptr(),
                *(size * stride for stride in new.stride()[:2]),
                cache.data_ptr(),
                *(size * stride for stride in cache.stride()[1:3]),
                slots.data_ptr(),
                *new.shape[:2],
                size * new.shape[2],
            )
            self._native.functions.conure_store(arguments, self._native.threads())

    def copy_blocks(self, caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks inside each cache; see `ops.AttentionOperations.copy_blocks`."""
        for cache in caches:
            cache.index_copy_(0, destination, cache.index_select(0, source))

    def new_cache(
        self, num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a cache whose heads are apart, so a block of one head is contiguous."""
        stored = cache_memory.zeros(
            heads, num_blocks * block_size * dim, dtype, number=self._num_caches
        )
        self._num_caches += 1
        return stored.view(heads, num_blocks, block_size, dim).permute(1, 2, 0, 3)


def _declare(functions: ctypes.CDLL, name: str, *types: Any) -> None:
    function = getattr(functions, f"conure_{name}")
    function.argtypes, function.restype = types, None


def _parallel_function() -> int:
    """Return the address of GOMP_parallel in torch's OpenMP library; 0 if it has none.

    GNU's and LLVM's libraries have it. The symbol is looked up in the libraries that torch
    depends on, because another copy would start its own threads.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def plan_address(plan: Plan) -> int:
    """Return the address of a `Plan` of operations.h, which all layers of a step share.

    `plan.derived` keeps the arrays alive whose addresses it contains.
    """
    found = plan.derived.get(NATIVE_PLAN)
    if found is None:
        tree = plan.tree
        arrays = [
            np.ascontiguousarray(array)
            for array in (
                plan.num_new,
                plan.kv_len,
                plan.tables,
                plan.query_start,
                tree.row_order,
                tree.first,
                tree.end,
                tree.begin_block,
                tree.end_block,
                tree.private_start_block,
            )
        ]
        assert all(array.dtype == np.int64 for array in arrays if array.ndim == 1)
        sizes = (plan.num_rows, len(tree.first), plan.tables.shape[1], plan.block_size)
        found = pack_plan([array.ctypes.data for array in arrays], sizes, arrays)
        plan.derived[NATIVE_PLAN] = found
    address: int = found[0]
    return address


def pack_plan(
    addresses: Sequence[int], sizes: Sequence[int], alive: object
) -> tuple[int, object, object]:
    """Return the address of a `Plan` of operations.h with these fields, and what keeps it alive."""
    packed = ctypes.create_string_buffer(_PLAN.pack(*addresses, *sizes))
    return ctypes.addressof(packed), packed, alive
