"""Each fused operation does what its definition does, by every implementation.

Triton kernels run under its interpreter where there is no GPU, and are compiled for one.
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

from conure.kernels import fused

# Compiled kernels run on a GPU, interpreted ones here.
DEVICE = "cuda" if os.environ.get("TRITON_INTERPRET") == "0" else "cpu"
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Relative; a rounding of the dtype more or less."""


@pytest.fixture(scope="module")
def triton() -> fused.Fused:
    pytest.importorskip("triton")
    return fused.implementation("triton")


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def same(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(0, 5), width=st.integers(1, 300), seed=st.integers(0, 99))
def test_the_norm_of_a_sum(
    triton: fused.Fused, dtype: torch.dtype, tokens: int, width: int, seed: int
) -> None:
    hidden, delta = (some(tokens, width, dtype=dtype, seed=seed + i) for i in range(2))
    weight = some(width, dtype=dtype, seed=7)
    mine = hidden.clone()
    got = triton.add_norm(mine, delta, weight, 1e-5)
    same(got, fused.Reference().add_norm(hidden, delta, weight, 1e-5))
    same(mine, hidden)


def test_the_norm_of_a_sum_is_what_torch_computes_in_two_steps() -> None:
    hidden, delta = (some(4, 64, dtype=torch.float32, seed=i) for i in range(2))
    weight = some(64, dtype=torch.float32, seed=2)
    total = hidden + delta
    wanted = torch.nn.functional.rms_norm(total, (64,), weight, 1e-5)
    same(fused.Reference().add_norm(hidden, delta, weight, 1e-5), wanted)
    assert torch.equal(hidden, total)


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(0, 4), width=st.sampled_from((1, 7, 96, 1024, 1100)))
def test_the_gate(triton: fused.Fused, dtype: torch.dtype, tokens: int, width: int) -> None:
    mixed = 3 * some(tokens, 2 * width, dtype=dtype)
    gate, up = mixed.float().chunk(2, dim=-1)
    wanted = (torch.nn.functional.silu(gate) * up).to(dtype)
    same(fused.Reference().gate(mixed), wanted)
    same(triton.gate(mixed), wanted)


class Turning:
    """Arguments of one `rotate_store`, with caches whose heads lie apart or together."""

    def __init__(
        self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, tokens: int
    ) -> None:
        self.shape = (tokens, heads, kv_heads, dim)
        self.mixed = some(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        self.positions = torch.arange(tokens, device=DEVICE) * 5 % 17
        self.slots = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:tokens]
        self.slots = self.slots.to(DEVICE)
        angles = torch.rand(17, dim // 2, generator=torch.Generator().manual_seed(2)) * 6
        cos, sin = angles.cos(), angles.sin()
        self.angles = (
            torch.cat((cos, cos), -1).to(DEVICE, dtype),
            torch.cat((-sin, sin), -1).to(DEVICE, dtype),
        )
        self.head_norm = some(heads + kv_heads, dim, dtype=dtype, seed=3)

    def run(self, who: fused.Fused, *, has_norm: bool, apart: bool) -> list[Tensor]:
        _, _, kv_heads, dim = self.shape
        caches = [torch.zeros(6, 4, kv_heads, dim) for _ in range(2)]
        if apart:
            caches = [torch.zeros(kv_heads, 6, 4, dim).permute(1, 2, 0, 3) for _ in range(2)]
        keys, values = (cache.to(DEVICE, self.mixed.dtype) for cache in caches)
        norm = self.head_norm if has_norm else None
        query = who.rotate_store(
            self.mixed, self.positions, self.slots, self.angles, norm, 1e-6, (keys, values)
        )
        return [query, keys, values]


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=20, deadline=None)
@given(
    heads=st.sampled_from(((4, 2, 16), (1, 1, 2), (6, 3, 24), (8, 1, 64), (9, 9, 4))),
    tokens=st.integers(0, 5),
    has_norm=st.booleans(),
    apart=st.booleans(),
)
def test_turning_and_storing(
    triton: fused.Fused,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    tokens: int,
    has_norm: bool,
    apart: bool,
) -> None:
    turning = Turning(dtype, *heads, tokens)
    got = turning.run(triton, has_norm=has_norm, apart=apart)
    wanted = turning.run(fused.Reference(), has_norm=has_norm, apart=apart)
    for one, other in zip(got, wanted, strict=True):
        same(one, other)


def test_turning_is_the_rotary_embedding_of_transformers() -> None:
    llama: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
    turning = Turning(torch.float32, 4, 2, 16, 5)
    query, keys, values = turning.run(fused.Reference(), has_norm=False, apart=False)
    cos, sin = (table[turning.positions][None].clone() for table in turning.angles)
    sin[..., :8] *= -1
    heads = turning.mixed.view(1, 5, 8, 16).transpose(1, 2)
    turned = llama.apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], cos, sin)
    same(query, turned[0][0].transpose(0, 1))
    same(keys.flatten(0, 1)[turning.slots], turned[1][0].transpose(0, 1))
    same(values.flatten(0, 1)[turning.slots], heads[0, 6:].transpose(0, 1))


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of reference, triton, got 'fast'"):
        fused.implementation("fast")


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from conure.kernels.gpu import fused as kernels

P, I, F = "*bf16", "i32", "fp32"
turn = dict(mixed=P, positions="*i64", slots="*i64", cos=P, sin=P, head_norm=P, query=P, keys=P,
            values=P, key_slot=I, key_head=I, value_slot=I, value_head=I, eps=F)
shape = dict(NUM_HEADS=32, KV_HEADS=8, HALF=64, BLOCK=64, HEADS=kernels.HEADS)
cases = [
    (kernels.add_norm_kernel, dict(hidden=P, delta=P, weight=P, out=P, width=I, eps=F),
     dict(BLOCK=4096), kernels.add_norm_warps(4096)),
    (kernels.rotate_store_kernel, turn, dict(shape, HAS_NORM=False), 4),
    (kernels.rotate_store_kernel, turn, dict(shape, HAS_NORM=True), 4),
    (kernels.gate_kernel, dict(mixed=P, out=P, width=I), dict(TILE=kernels.TILE), 4),
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


def test_the_kernels_compile_for_sm_90_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    built = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(built) == 4
    for kernel in built:
        assert kernel["cubin"] > 0
        assert not kernel["spills"], kernel
        assert kernel["wide_loads"] > 0, kernel
        assert kernel["shared"] <= 1024, kernel
