"""Sums of bags are products of matrices, and read what they name alone."""

from __future__ import annotations

import pytest
import torch

from conure.kernels.bags import Bags, add_up, can_bag


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bags_are_a_product_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    table = torch.randn(200, 24).to(dtype)
    index = torch.stack([torch.randperm(200)[:70] for _ in range(6)]).view(2, 3, 70)
    weights = torch.rand(2, 3, 70).to(dtype)
    wanted = torch.einsum("...c,...ce->...e", weights.double(), table[index].double())
    found = add_up(table, Bags.of(index), weights)
    assert found.dtype == dtype
    assert (found.double() - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps / 2


def test_rows_that_no_bag_names_are_not_read() -> None:
    table = torch.full((10, 4), float("nan"), dtype=torch.bfloat16)
    table[[2, 5]] = 1.0
    found = add_up(table, Bags.of(torch.tensor([[2, 5, 2]])), torch.ones(1, 3).bfloat16())
    assert found.tolist() == [[3.0] * 4]


def test_wide_groups_and_wide_numbers_are_multiplied() -> None:
    assert can_bag(torch.zeros(2, 4, 64, dtype=torch.bfloat16))
    assert not can_bag(torch.zeros(2, 8, 64, dtype=torch.bfloat16))
    assert not can_bag(torch.zeros(2, 4, 64))
