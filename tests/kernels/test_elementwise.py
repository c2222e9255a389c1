"""Elementwise operations: every implementation equals the definition.

Triton kernels run in its interpreter without a GPU, and are compiled for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conure.kernels import elementwise
from tests.kernels import implementations
from tests.kernels.implementations import TRITON_DEVICE

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Relative error: one rounding of the dtype."""


@pytest.fixture(scope="module", params=implementations.ELEMENTWISE_NAMES)
def operations(request: pytest.FixtureRequest) -> elementwise.ElementwiseOperations:
    return implementations.between_products(request.param)


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(TRITON_DEVICE, dtype)


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=15)
@given(tokens=st.integers(0, 5), width=st.integers(1, 300), seed=st.integers(0, 99))
def test_add_norm_equals_the_reference(
    operations: elementwise.ElementwiseOperations,
    dtype: torch.dtype,
    tokens: int,
    width: int,
    seed: int,
) -> None:
    hidden, delta = (random_tensor(tokens, width, dtype=dtype, seed=seed + i) for i in range(2))
    weight = random_tensor(width, dtype=dtype, seed=7)
    in_place = hidden.clone()
    result = operations.add_norm(in_place, delta, weight, 1e-5)
    assert_same(result, elementwise.ReferenceElementwise().add_norm(hidden, delta, weight, 1e-5))
    assert_same(in_place, hidden)


def test_add_norm_equals_two_steps_in_torch() -> None:
    hidden, delta = (random_tensor(4, 64, dtype=torch.float32, seed=i) for i in range(2))
    weight = random_tensor(64, dtype=torch.float32, seed=2)
    total = hidden + delta
    expected = torch.nn.functional.rms_norm(total, (64,), weight, 1e-5)
    assert_same(elementwise.ReferenceElementwise().add_norm(hidden, delta, weight, 1e-5), expected)
    assert torch.equal(hidden, total)


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=15)
@given(tokens=st.integers(0, 4), width=st.sampled_from((1, 7, 96, 1024, 1100)))
def test_silu_mul_equals_the_reference(
    operations: elementwise.ElementwiseOperations, dtype: torch.dtype, tokens: int, width: int
) -> None:
    mixed = 3 * random_tensor(tokens, 2 * width, dtype=dtype)
    gate, up = mixed.float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    assert_same(elementwise.ReferenceElementwise().silu_mul(mixed), expected)
    assert_same(operations.silu_mul(mixed), expected)


class RotateStoreArguments:
    """Arguments of one `rotate_store`."""

    def __init__(
        self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, tokens: int
    ) -> None:
        self.shape = (tokens, heads, kv_heads, dim)
        self.mixed = random_tensor(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        self.positions = torch.arange(tokens, device=TRITON_DEVICE) * 5 % 17
        self.slots = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:tokens]
        self.slots = self.slots.to(TRITON_DEVICE)
        angles = torch.rand(17, dim // 2, generator=torch.Generator().manual_seed(2)) * 6
        cos, sin = angles.cos(), angles.sin()
        self.angles = (
            torch.cat((cos, cos), -1).to(TRITON_DEVICE, dtype),
            torch.cat((-sin, sin), -1).to(TRITON_DEVICE, dtype),
        )
        self.head_norm = random_tensor(heads + kv_heads, dim, dtype=dtype, seed=3)

    def run(
        self, operations: elementwise.ElementwiseOperations, *, has_norm: bool, is_head_major: bool
    ) -> list[Tensor]:
        _, _, kv_heads, dim = self.shape
        caches = [torch.zeros(6, 4, kv_heads, dim) for _ in range(2)]
        if is_head_major:
            caches = [torch.zeros(kv_heads, 6, 4, dim).permute(1, 2, 0, 3) for _ in range(2)]
        keys, values = (cache.to(TRITON_DEVICE, self.mixed.dtype) for cache in caches)
        norm = self.head_norm if has_norm else None
        query = operations.rotate_store(
            self.mixed, self.positions, self.slots, self.angles, norm, 1e-6, (keys, values)
        )
        return [query, keys, values]


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=20)
@given(
    heads=st.sampled_from(((4, 2, 16), (1, 1, 2), (6, 3, 24), (8, 1, 64), (9, 9, 4))),
    tokens=st.integers(0, 5),
    has_norm=st.booleans(),
    is_head_major=st.booleans(),
)
def test_rotate_store_equals_the_reference(
    operations: elementwise.ElementwiseOperations,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    tokens: int,
    has_norm: bool,
    is_head_major: bool,
) -> None:
    arguments = RotateStoreArguments(dtype, *heads, tokens)
    result = arguments.run(operations, has_norm=has_norm, is_head_major=is_head_major)
    expected = arguments.run(
        elementwise.ReferenceElementwise(), has_norm=has_norm, is_head_major=is_head_major
    )
    for one, other in zip(result, expected, strict=True):
        assert_same(one, other)


def test_rotation_equals_rotary_embedding_of_transformers() -> None:
    llama: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
    arguments = RotateStoreArguments(torch.float32, 4, 2, 16, 5)
    query, keys, values = arguments.run(
        elementwise.ReferenceElementwise(), has_norm=False, is_head_major=False
    )
    cos, sin = (table[arguments.positions][None].clone() for table in arguments.angles)
    sin[..., :8] *= -1
    heads = arguments.mixed.view(1, 5, 8, 16).transpose(1, 2)
    rotated = llama.apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], cos, sin)
    assert_same(query, rotated[0][0].transpose(0, 1))
    assert_same(keys.flatten(0, 1)[arguments.slots], rotated[1][0].transpose(0, 1))
    assert_same(values.flatten(0, 1)[arguments.slots], heads[0, 6:].transpose(0, 1))


def test_unknown_implementation_raises_an_error() -> None:
    with pytest.raises(ValueError, match="must be one of reference, cpu, triton, got 'fast'"):
        elementwise.implementation("fast")


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from conure.kernels.gpu import elementwise as kernels

P, I, F = "*bf16", "i32", "fp32"
turn = dict(mixed=P, positions="*i64", slots="*i64", cos=P, sin=P, head_norm=P, query=P, keys=P,
            values=P, key_slot=I, key_head=I, value_slot=I, value_head=I, eps=F)
shape = dict(NUM_HEADS=32, KV_HEADS=8, HALF=64, BLOCK=64,
             HEADS_PER_PROGRAM=kernels.HEADS_PER_PROGRAM)
cases = [
    (kernels.add_norm_kernel, dict(hidden=P, delta=P, weight=P, out=P, width=I, eps=F),
     dict(BLOCK=4096), kernels.add_norm_warps(4096)),
    (kernels.rotate_store_kernel, turn, dict(shape, HAS_NORM=False), 4),
    (kernels.rotate_store_kernel, turn, dict(shape, HAS_NORM=True), 4),
    (kernels.silu_mul_kernel, dict(mixed=P, out=P, width=I),
     dict(TILE_COLUMNS=kernels.TILE_COLUMNS), 4),
]
for kernel, types, constants, warps in cases:
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    even = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items() if kind != F}
    built = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    ptx = built.asm["ptx"]
    print(json.dumps({
        "name": kernel.__name__,
        "cubin": len(built.asm["cubin"]),
        "shared": built.metadata.shared,
        "wide_loads": ptx.count("ld.global.v4") + ptx.count("ld.global.v2"),
        "spills": ".local" in ptx,
    }))
"""


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    process = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    built = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(built) == 4
    for kernel in built:
        assert kernel["cubin"] > 0
        assert not kernel["spills"], kernel
        assert kernel["wide_loads"] > 0, kernel
        assert kernel["shared"] <= 1024, kernel
