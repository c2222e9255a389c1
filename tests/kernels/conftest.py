"""Triton's interpreter, mended for bfloat16 and new releases of NumPy; its compiler, beside it.

NumPy has no bfloat16, and the interpreter keeps its bits in uint16. It knows that where it
loads and stores. It does not where it multiplies: there it takes the bits for numbers, which
gives garbage and no error. Our kernels compute in float32 and give bfloat16 to `tl.dot`
alone, so this is the one product to mend. Those of two 16-bit floats are exact in float32,
which is also what a tensor core adds up. float16 takes the same way, for NumPy multiplies its
matrices in software. And a cast to bfloat16 cuts bits off here; a GPU rounds to the nearest.

Triton 3.6 makes a loop's bound of an array of one number, which NumPy forbids from 2.4 on.

Compiling every kernel takes as long as all other tests together, and needs another process.
It runs beside them, and the tests that wait for it come last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conure.kernels import ops

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def interpreter_that_knows_bfloat16() -> Iterator[None]:
    language = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    halves = (language.bfloat16, language.float16)
    builder_type = interpreter.InterpreterBuilder
    multiply, cast = builder_type.create_dot, builder_type.cast_impl
    patch_rest = interpreter._patch_lang_tensor

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

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch_rest(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_type, "create_dot", create_dot)
        patch.setattr(builder_type, "cast_impl", cast_impl)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield


@pytest.fixture(params=ops.NAMES)
def operations(request: pytest.FixtureRequest) -> ops.Operations:
    """Every implementation; Triton's kernels interpreted, or compiled where there is a GPU."""
    return ops.implementation(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what waits for the compiler behind the other tests of this folder."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    mine = sorted((items[place] for place in places), key=waits_for_compiler)
    for place, item in zip(places, mine, strict=True):
        items[place] = item


def waits_for_compiler(item: pytest.Item) -> bool:
    return "machine_code" in getattr(item, "fixturenames", ())


@pytest.fixture(autouse=True, scope="session")
def compiler(request: pytest.FixtureRequest) -> Iterator[Callable[[], list[dict[str, Any]]] | None]:
    """Compile for an sm_90 from this folder's first test on, if one is to ask what came out."""
    pytest.importorskip("triton")
    if not any(map(waits_for_compiler, request.session.items)):
        yield None
        return
    with contextlib.ExitStack() as stack:
        # Of several processes of tests one will ask, and the others have work for the cores.
        is_alone = "PYTEST_XDIST_WORKER" not in os.environ
        begun = stack.enter_context(compiling()) if is_alone else None

        def result() -> list[dict[str, Any]]:
            process = begun or stack.enter_context(compiling())
            shown, complaints = process.communicate()
            assert process.returncode == 0, complaints
            found: list[dict[str, Any]] = json.loads(shown)
            return found

        yield result


@contextlib.contextmanager
def compiling() -> Iterator[subprocess.Popen[str]]:
    """The compiler in a process of its own, which ends with the block."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # This checkout, wherever another one is installed.
    environment["PYTHONPATH"] = str(HERE.parents[1] / ".src")
    with subprocess.Popen(
        [sys.executable, str(HERE / "aot.py"), "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its workers end with it
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
