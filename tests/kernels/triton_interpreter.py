"""Mends of Triton's interpreter; the tests of kernels and of the engine run kernels in it.

NumPy has no bfloat16, so the interpreter stores bfloat16 as uint16 bits. It converts them in
loads and stores, but not in products, where it multiplies the bits as integers without an error.
Our kernels compute in float32 and use bfloat16 only in `tl.dot`, so only this product is patched.
Products of two 16-bit floats are exact in float32, which is also what tensor cores add up.
float16 is patched the same way, because NumPy multiplies float16 matrices slowly. Casts to
bfloat16 truncate in the interpreter; they are patched to round to nearest, as on a GPU.

Triton 3.6 uses one-element arrays as loop bounds, which NumPy 2.4 and later reject.

Before each launch, and before each call of a function in a kernel, the interpreter searches all
members of `triton.language` for operations that it has not replaced yet. The search takes longer
than most kernels of the tests, so its result is kept. So are NumPy's types of Triton's types, for
which the interpreter builds a table each time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


@pytest.fixture(autouse=True, scope="session")
def interpreter_with_bfloat16() -> Iterator[None]:
    if find_spec("triton") is None:
        yield
        return
    language: Any = import_module("triton.language")
    interpreter: Any = import_module("triton.runtime.interpreter")
    halves = (language.bfloat16, language.float16)
    builder_type = interpreter.InterpreterBuilder
    multiply, cast = builder_type.create_dot, builder_type.cast_impl
    patch_rest = interpreter._patch_lang_tensor

    def as_float32(handle: Any) -> NDArray[np.float32]:
        if handle.dtype.scalar == language.bfloat16:
            bits: NDArray[np.uint32] = handle.data.astype(np.uint32) << 16
            return bits.view(np.float32)
        return np.asarray(handle.data, dtype=np.float32)

    def create_dot(builder: Any, a: Any, b: Any, added: Any, *options: Any) -> Any:
        if a.dtype.scalar not in halves or b.dtype.scalar not in halves:
            return multiply(builder, a, b, added, *options)
        product = as_float32(a) @ as_float32(b)
        return interpreter.TensorHandle(added.data + product, added.dtype.scalar)

    def cast_impl(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != language.float32 or target.scalar != language.bfloat16:
            return cast(builder, source, target)
        bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        stored = np.where(np.isnan(source.data), bits >> 16 | 0x40, nearest)
        return interpreter.TensorHandle(stored.astype(np.uint16), target.scalar)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch_rest(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_type, "create_dot", create_dot)
        patch.setattr(builder_type, "cast_impl", cast_impl)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        keep_search_results(patch, interpreter, language)
        yield


def keep_search_results(patch: pytest.MonkeyPatch, interpreter: Any, language: Any) -> None:
    """Keep what the interpreter would search for before each launch and for each number."""
    scalar_type = cache(interpreter._get_np_dtype)

    @cache
    def operations(module: Any) -> list[tuple[str, Any]]:
        members = inspect.getmembers(module)
        return [(name, each) for name, each in members if language.core.is_builtin(each)]

    def patch_operations(module: Any, builder: Any, scope: Any) -> None:
        found = operations(module)
        if not found or getattr(module, found[0][0]) is not found[0][1]:
            return  # replaced already
        for name, operation in found:
            interpreter._patch_attr(module, name, operation, builder, scope)

    def numpy_type(kind: Any) -> np.dtype[Any]:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else scalar_type(kind.scalar)

    patch.setattr(interpreter, "_patch_builtin", patch_operations)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
