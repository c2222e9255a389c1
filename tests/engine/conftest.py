"""Fixtures of the engine's tests, which run GPU kernels in Triton's interpreter."""

from __future__ import annotations

from tests.kernels.triton_interpreter import interpreter_with_bfloat16

__all__ = ["interpreter_with_bfloat16"]
