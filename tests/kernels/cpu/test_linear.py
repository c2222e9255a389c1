"""Products with packed weights, for every instruction set of this processor."""

from __future__ import annotations

import pytest
import torch

from conure.kernels.cpu import library
from conure.kernels.cpu.attention import NativeLibrary
from conure.kernels.cpu.linear import PackedLinear

VARIANTS = [
    (each.name, prefers_pairs)
    for each in library.supported()
    for prefers_pairs in (False, True)
    if not prefers_pairs or each.name.endswith("bf16")
]


@pytest.fixture(params=VARIANTS, ids=str)
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    name, prefers_pairs = request.param
    return NativeLibrary(library.find(name), prefers_pairs=prefers_pairs)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 6, 7, 16, 70])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (64, 32), (259, 96), (130, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_rounded_once(
    native: NativeLibrary,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(num_rows)
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    inputs = torch.randn(num_rows, num_inputs).to(dtype)
    packed = PackedLinear(native, weight, bias)
    expected = inputs.double() @ weight.double().T + (0 if bias is None else bias.double())
    result = packed(inputs)
    assert result.dtype == dtype
    assert result.shape == expected.shape
    # Sums of 100 terms of unit scale carry an absolute error of about 1e-5 as well.
    error = (result.double() - expected).abs()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-24
    assert (error <= expected.abs() * rounding + 3e-5).all()
    assert torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_other_rows(native: NativeLibrary, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    packed = PackedLinear(native, torch.randn(200, 300).to(dtype), None)
    inputs = torch.randn(40, 300).to(dtype)
    together = packed(inputs)
    for num in (1, 2, 3, 4, 5, 6, 13):
        assert torch.equal(torch.cat([packed(part) for part in torch.split(inputs, num)]), together)
