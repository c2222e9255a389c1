"""Fixtures of the kernels: every implementation, its device, and the compiler.

Compiling the kernels takes minutes, and needs another process. It runs in parallel with the other
tests, and the tests that wait for it run last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from conure.kernels import ops
from tests.kernels import implementations
from tests.kernels.random_trees import device_of
from tests.kernels.triton_interpreter import interpreter_with_bfloat16

__all__ = ["interpreter_with_bfloat16"]
HERE = Path(__file__).parent


@pytest.fixture(params=implementations.NAMES)
def operations(request: pytest.FixtureRequest) -> ops.AttentionOperations:
    """Every implementation. Triton kernels are interpreted, or compiled on a GPU."""
    return implementations.attention(request.param)


@pytest.fixture(params=[name for name in implementations.NAMES if name[:2] in ("cp", "in")])
def cpu_path(request: pytest.FixtureRequest) -> ops.AttentionOperations:
    """The C++ kernels for every instruction set of this processor."""
    return implementations.attention(request.param)


@pytest.fixture
def device(operations: ops.AttentionOperations) -> torch.device:
    """The device that an implementation computes on: a GPU for compiled kernels only."""
    return device_of(operations)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests that wait for the compiler after the other tests of this folder."""
    indices = [index for index, item in enumerate(items) if HERE in item.path.parents]
    ordered = sorted((items[index] for index in indices), key=waits_for_compiler)
    for index, item in zip(indices, ordered, strict=True):
        items[index] = item


def waits_for_compiler(item: pytest.Item) -> bool:
    return not {"machine_code", "ampere_code"}.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.fixture(autouse=True, scope="session")
def compiler(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., list[dict[str, Any]]] | None]:
    """Compile for sm_90 from the first test of this folder on, if a test needs the result.

    The function takes names of configurations. With another compute capability as second argument,
    it compiles when it is called.
    """
    pytest.importorskip("triton")
    items: list[Any] = [*filter(waits_for_compiler, request.session.items)]
    if not items:
        yield None
        return
    parameters = [each.callspec.params for each in items]
    names = max((each.get("machine_code", []) for each in parameters), key=len)
    with contextlib.ExitStack() as stack:
        # With several test processes, only the one that needs the result compiles.
        is_alone = "PYTEST_XDIST_WORKER" not in os.environ
        started = stack.enter_context(compiling(names)) if names and is_alone else None

        @cache
        def compiled() -> dict[str, dict[str, Any]]:
            return by_name(started or stack.enter_context(compiling(names)))

        def result(names: list[str], capability: int | None = None) -> list[dict[str, Any]]:
            if capability is None:
                return [compiled()[name] for name in names]
            with compiling([*names, "--capability", str(capability)]) as process:
                return [*by_name(process).values()]

        yield result


def by_name(process: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """Wait for a compiler; return what it compiled."""
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return {each["name"]: each for each in json.loads(output)}


@contextlib.contextmanager
def compiling(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Compile configurations in a separate process that ends with the block."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Import this checkout, even if another one is installed.
    environment["PYTHONPATH"] = str(HERE.parents[1])
    with subprocess.Popen(
        [sys.executable, str(HERE / "gpu" / "aot.py"), "--json", *arguments],
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
