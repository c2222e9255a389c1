"""Fixtures of the engine's tests. Some run GPU kernels in Triton's interpreter."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tests.kernels.triton_interpreter import interpreter_with_bfloat16

__all__ = ["interpreter_with_bfloat16"]


@pytest.fixture
def high_descriptor() -> Iterator[int]:
    """A file descriptor that `select` does not accept. The test opens and closes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2_000:
        pytest.skip("the system allows too few file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_000), hard))
    yield 1_500
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
