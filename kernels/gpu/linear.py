"""Products of few inputs with a weight matrix, which are bound by reading the weight.

A program computes `OUTPUTS` outputs of all inputs. Its threads read the same columns of each of
these rows of the weight, 16 bytes at a time, and hold one sum per row of the weight and input; the
sums of threads are added at the end. Matrix libraries use tensor cores, which need tiles of 64
inputs, and reach 60 to 95 % of the bandwidth of an H200 with one input.

Shapes: T inputs - N outputs - K columns of the weight.
"""
# Triton compiles kernels itself; type checkers do not implement its rules.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

MAX_INPUTS: Final = 4
"""Inputs up to which a product is bound by reading the weight; more need tensor cores."""
OUTPUTS: Final = 4
"""Outputs of a program."""
STEP: Final = 1024
"""Columns that a program reads at once: 8 of each thread."""
WARPS: Final = 4


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `inputs @ weight.T + bias`, by the kernel or by torch.

    Args:
        inputs: [T, K].
        weight: [N, K].
        bias: [N].

    Returns:
        [T, N] in the dtype of the inputs.
    """
    if is_supported(inputs, weight):
        return linear_of_few(inputs, weight, bias)
    return functional.linear(inputs, weight, bias)


def is_supported(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes this product: few inputs of 16-bit floats."""
    return (
        inputs.dtype in (torch.bfloat16, torch.float16)
        and 0 < len(inputs) <= MAX_INPUTS
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0
    )


def linear_of_few(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, *, outputs: int = OUTPUTS
) -> Tensor:
    """Return `inputs @ weight.T + bias` by the kernel, with float32 sums.

    Args:
        inputs: [T, K], of at most `MAX_INPUTS` rows.
        weight: [N, K] contiguous, K divisible by 8.
        bias: [N].
        outputs: Outputs of a program; a benchmark compares them.

    Returns:
        [T, N] in the dtype of the inputs.
    """
    inputs = inputs.contiguous()
    num_outputs, num_columns = weight.shape
    out = inputs.new_empty(len(inputs), num_outputs)
    linear_kernel[(triton.cdiv(num_outputs, outputs),)](
        out,
        inputs,
        weight,
        inputs if bias is None else bias,
        num_outputs,
        # The kernel has a sum for each of a power of two of inputs.
        INPUTS=triton.next_power_of_2(len(inputs)),
        NUM_INPUTS=len(inputs),
        COLUMNS=num_columns,
        OUTPUTS=outputs,
        STEP=STEP,
        HAS_BIAS=bias is not None,
        num_warps=WARPS,
    )
    return out


@triton.jit
def linear_kernel(
    out: tl.tensor,
    inputs: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    num_outputs: tl.tensor,
    INPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Compute `OUTPUTS` outputs of all inputs.

    Args:
        out: [T, N], written.
        inputs: [T, K].
        weight: [N, K].
        bias: [N]; read only with `HAS_BIAS`.
        num_outputs: N.
        INPUTS: T rounded up to a power of 2.
        NUM_INPUTS: T.
        COLUMNS: K.
        OUTPUTS: Outputs of a program.
        STEP: Columns that are read at once.
        HAS_BIAS: Whether a bias is added.
    """
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = (rows < num_outputs)[:, None, None]
    # The last dimension is what a thread loads at once, so that no sum crosses threads.
    columns = tl.arange(0, STEP // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    at = weight + rows.to(tl.int64)[:, None, None] * COLUMNS + columns[None, :, :]
    total = tl.zeros([INPUTS, OUTPUTS, STEP // 8], tl.float32)
    number = tl.arange(0, INPUTS)
    for begin in tl.range(0, COLUMNS, STEP):
        if COLUMNS % STEP == 0:
            w = tl.load(at + begin, mask=is_row, other=0.0)
        else:
            is_column = (begin + columns < COLUMNS)[None, :, :]
            w = tl.load(at + begin, mask=is_row & is_column, other=0.0)
        w = w.to(tl.float32)
        for index in tl.static_range(NUM_INPUTS):
            if COLUMNS % STEP == 0:
                x = tl.load(inputs + index * COLUMNS + begin + columns)
            else:
                is_column = begin + columns < COLUMNS
                x = tl.load(inputs + index * COLUMNS + begin + columns, mask=is_column, other=0.0)
            part = tl.sum(w * x.to(tl.float32)[None, :, :], 2)
            total += tl.where(number[:, None, None] == index, part[None, :, :], 0.0)
    result = tl.sum(total, 2)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=rows < num_outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + number[:, None] * num_outputs + rows[None, :],
        result.to(out.dtype.element_ty),
        mask=(number < NUM_INPUTS)[:, None] & (rows < num_outputs)[None, :],
    )
