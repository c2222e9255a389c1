"""Triton's interpreter, mended for bfloat16.

NumPy has no bfloat16, and the interpreter keeps its bits in uint16. It knows that where it
loads and stores. It does not where it multiplies: there it takes the bits for numbers, which
gives garbage and no error. Our kernels compute in float32 and give bfloat16 to `tl.dot`
alone, so this is the one product to mend. Those of two 16-bit floats are exact in float32,
which is also what a tensor core adds up. float16 takes the same way, for NumPy multiplies its
matrices in software. And a cast to bfloat16 cuts bits off here; a GPU rounds to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conure.kernels import ops


@pytest.fixture(autouse=True, scope="session")
def interpreter_that_knows_bfloat16() -> Iterator[None]:
    language = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    halves = (language.bfloat16, language.float16)
    builder_type = interpreter.InterpreterBuilder
    multiply, cast = builder_type.create_dot, builder_type.cast_impl

    def widened(handle: Any) -> NDArray[np.float32]:
        if handle.dtype.scalar == language.bfloat16:
            bits: NDArray[np.uint32] = handle.data.astype(np.uint32) << 16
            return bits.view(np.float32)
        return np.asarray(handle.data, dtype=np.float32)

    def create_dot(builder: Any, a: Any, b: Any, added: Any, *options: Any) -> Any:
        if a.dtype.scalar not in halves or b.dtype.scalar not in halves:
            return multiply(builder, a, b, added, *options)
        product = widened(a) @ widened(b)
        return interpreter.TensorHandle(added.data + product, added.dtype.scalar)

    def cast_impl(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != language.float32 or target.scalar != language.bfloat16:
            return cast(builder, source, target)
        bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        kept = np.where(np.isnan(source.data), bits >> 16 | 0x40, nearest)
        return interpreter.TensorHandle(kept.astype(np.uint16), target.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_type, "create_dot", create_dot)
        patch.setattr(builder_type, "cast_impl", cast_impl)
        yield


@pytest.fixture(params=ops.NAMES)
def operations(request: pytest.FixtureRequest) -> ops.Operations:
    """Every implementation; Triton's kernels interpreted, or compiled where there is a GPU."""
    return ops.implementation(request.param)
