"""The product of one input equals that of torch, and other products are left to torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from conure.kernels.gpu import linear
from tests.kernels.implementations import TRITON_DEVICE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_outputs", "num_columns"), [(1, 8), (7, 1024), (66, 1032), (12, 9216)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_equals_that_of_torch(
    num_outputs: int, num_columns: int, dtype: torch.dtype, *, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_outputs)
    inputs, weight, bias = (
        torch.randn(*shape, generator=generator).to(TRITON_DEVICE, dtype)
        for shape in ((1, num_columns), (num_outputs, num_columns), (num_outputs,))
    )
    assert linear.is_supported(inputs, weight)
    found = linear.linear(inputs, weight, bias if has_bias else None)
    expected = functional.linear(
        inputs.double(), weight.double(), bias.double() if has_bias else None
    )
    assert found.dtype == dtype
    assert found.shape == expected.shape
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) < {torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize(
    ("num_inputs", "num_columns", "dtype"),
    [
        (2, 64, torch.float16),
        (0, 64, torch.float16),
        (1, 12, torch.float16),
        (1, 64, torch.float32),
    ],
)
def test_other_products_are_those_of_torch(
    num_inputs: int, num_columns: int, dtype: torch.dtype
) -> None:
    inputs = torch.randn(num_inputs, num_columns).to(TRITON_DEVICE, dtype)
    weight = torch.randn(5, num_columns).to(TRITON_DEVICE, dtype)
    assert not linear.is_supported(inputs, weight)
    assert torch.equal(linear.linear(inputs, weight, None), functional.linear(inputs, weight))
