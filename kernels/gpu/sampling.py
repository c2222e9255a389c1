"""Triton kernels that sample tokens: top-k, top-p and min-p without sorting, noise, largest sum.

`truncate_kernel` finds the smallest logit that each truncated row keeps. Logits are compared as
integers in the order of floats, and the threshold is found two bits at a time: a pass counts, or
weighs, the tokens of four ranges. `sample_kernel` adds the noise and takes the largest sum;
several programs share a row.

Weights are float32 and their sums float64. Noise and sums of scores are float64, as in
`sampling.ReferenceSampling`, so that a seed gives the same tokens on every device.

Invariants: truncation keeps at least one token. Of equal logits the ones with smaller ids are kept.

Shapes: S rows of scores - V tokens - N random rows - C truncated rows - P programs of a row.
"""
# Triton compiles kernels itself; type checkers do not implement its rules.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..truncation import Truncation

TRUNCATE_TILE: Final = 2048
"""Tokens that a program of `truncate_kernel` weighs at once."""
TRUNCATE_WARPS: Final = 16
SAMPLE_TILE: Final = 1024
"""Tokens that a program of `sample_kernel` processes at once."""
PROGRAMS: Final = 8
"""Programs that share a row of `sample_kernel`."""
KEEP_ALL: Final = -(2**31)
"""A threshold below every logit."""


class TritonSampling:
    """Sampling by Triton kernels; see `sampling.SamplingOperations`."""

    def sample(
        self,
        scores: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        noise_keys: Tensor,
        truncation: Truncation,
    ) -> Tensor:
        """See `sampling.SamplingOperations`."""
        num_rows, vocabulary, device = len(rows), scores.shape[1], scores.device
        thresholds = torch.full((num_rows,), KEEP_ALL, dtype=torch.int32, device=device)
        last_ties = torch.full((num_rows,), vocabulary, dtype=torch.int32, device=device)
        floors = torch.full((num_rows,), float("-inf"), dtype=torch.float64, device=device)
        if len(truncation.rows):
            truncate_kernel[(len(truncation.rows),)](
                *(scores, rows, temperatures, truncation.rows, truncation.top_k),
                *(truncation.top_p, truncation.min_p.log()),
                *(thresholds, last_ties, floors, vocabulary, scores.stride(0)),
                TILE=TRUNCATE_TILE,
                num_warps=TRUNCATE_WARPS,
            )
        best = torch.empty((num_rows, PROGRAMS), dtype=torch.float64, device=device)
        tokens = torch.empty((num_rows, PROGRAMS), dtype=torch.int64, device=device)
        sample_kernel[(num_rows, PROGRAMS)](
            *(scores, rows, temperatures, noise_keys, thresholds, last_ties, floors),
            *(best, tokens, vocabulary, scores.stride(0)),
            TILE=SAMPLE_TILE,
            num_warps=4,
        )
        return tokens.gather(1, best.argmax(dim=1, keepdim=True)).flatten()


@triton.jit
def truncate_kernel(
    scores: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    truncated: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    thresholds: tl.tensor,
    last_ties: tl.tensor,
    floors: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Find what one truncated row keeps.

    Args:
        scores: [S, V] float32.
        rows: [N] int64, rows of `scores`.
        temperatures: [N] float64.
        truncated: [C] int64, indices into `rows`.
        top_k: [C] int64.
        top_p: [C] float64.
        log_min_p: [C] float64, -inf for none.
        thresholds: [N] int32, written: ordered bits of the smallest logit that is kept.
        last_ties: [N] int32, written: the largest token of that logit that is kept.
        floors: [N] float64, written: the smallest score that min-p keeps.
        vocabulary: V.
        stride: Stride of rows of `scores`.
        TILE: Tokens that are processed at once.
    """
    number = tl.program_id(0)
    index = tl.load(truncated + number)
    row = scores + tl.load(rows + index) * stride
    temperature = tl.load(temperatures + index)
    columns = tl.arange(0, TILE)

    peaks = tl.full([TILE], float("-inf"), tl.float32)
    for begin in range(0, vocabulary, TILE):
        token = begin + columns
        peaks = tl.maximum(
            peaks, tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        )
    peak = tl.max(peaks, 0)
    floor = peak.to(tl.float64) / temperature + tl.load(log_min_p + number)
    tl.store(floors + index, floor)

    inverse = (1.0 / temperature).to(tl.float32)
    threshold = tl.full([], -(2**31), tl.int32)
    last = vocabulary
    count = tl.load(top_k + number)
    if count < vocabulary:
        threshold, last = _cut(  # pyright: ignore[reportGeneralTypeIssues]
            row, vocabulary, peak, inverse, threshold, last, count.to(tl.float64), False, TILE
        )
    share = tl.load(top_p + number)
    if share < 1.0:
        totals = tl.zeros([TILE], tl.float64)
        for begin in range(0, vocabulary, TILE):
            token = begin + columns
            _, weight = _weights(  # pyright: ignore[reportGeneralTypeIssues]
                row, token, vocabulary, peak, inverse, threshold, last, True
            )
            totals += weight.to(tl.float64)
        total = tl.sum(totals, 0)
        threshold, last = _cut(  # pyright: ignore[reportGeneralTypeIssues]
            row, vocabulary, peak, inverse, threshold, last, share * total, True, TILE
        )
    tl.store(thresholds + index, threshold)
    tl.store(last_ties + index, last)


@triton.jit
def _cut(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    threshold: tl.tensor,
    last: tl.tensor,
    target: tl.tensor,
    IS_WEIGHED: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return threshold and last tie of the fewest largest logits that reach a target.

    `target` is a number of tokens, or with `IS_WEIGHED` a sum of weights. Only tokens that the
    given threshold and tie keep are counted, and no others are kept.
    """
    columns = tl.arange(0, TILE)
    prefix = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float64)
    for level in range(16):
        shift = tl.full([], 30, tl.uint32) - 2 * tl.cast(level, tl.uint32)
        # Sums of the tokens with a digit of at least 1, 2 and 3. Each thread adds up its own
        # tokens; the sums of threads are added once for a digit.
        some, more, most = (
            tl.zeros([TILE], tl.float32),
            tl.zeros([TILE], tl.float32),
            tl.zeros([TILE], tl.float32),
        )
        for begin in range(0, vocabulary, TILE):
            order, weight = _weights(  # pyright: ignore[reportGeneralTypeIssues]
                row, begin + columns, vocabulary, peak, inverse, threshold, last, IS_WEIGHED
            )
            place = (order ^ -2147483648).to(tl.uint32, bitcast=True) >> shift
            weight = tl.where((place >> 2) == prefix, weight, 0.0)
            digit = place & 3
            some += tl.where(digit >= 1, weight, 0.0)
            more += tl.where(digit >= 2, weight, 0.0)
            most += tl.where(digit >= 3, weight, 0.0)
        reached_1 = above + tl.sum(some.to(tl.float64), 0)
        reached_2 = above + tl.sum(more.to(tl.float64), 0)
        reached_3 = above + tl.sum(most.to(tl.float64), 0)
        chosen = tl.where(
            reached_3 >= target, 3, tl.where(reached_2 >= target, 2, reached_1 >= target)
        )
        # Tokens of a larger digit.
        above = tl.where(
            chosen == 3,
            above,
            tl.where(chosen == 2, reached_3, tl.where(chosen == 1, reached_2, reached_1)),
        )
        prefix = prefix * 4 + chosen.to(tl.uint32)
    kept = prefix.to(tl.int32, bitcast=True) ^ -2147483648

    # Of the tokens with this logit, those with the smallest ids that are still needed.
    bits = tl.where(kept < 0, kept ^ 2147483647, kept)
    logit = bits.to(tl.float32, bitcast=True)
    each = tl.exp((logit - peak) * inverse).to(tl.float64) if IS_WEIGHED else 1.0
    needed = tl.maximum(tl.ceil((target - above) / tl.maximum(each, 1e-300)), 1.0)
    ties = tl.zeros([TILE], tl.int32)
    for begin in range(0, vocabulary, TILE):
        order, weight = _weights(  # pyright: ignore[reportGeneralTypeIssues]
            row, begin + columns, vocabulary, peak, inverse, threshold, last, False
        )
        ties += ((order == kept) & (weight > 0.0)).to(tl.int32)
    end = tl.where(kept == threshold, last, vocabulary)
    if tl.sum(ties, 0).to(tl.float64) > needed:
        end = _last_tie(  # pyright: ignore[reportGeneralTypeIssues]
            row, vocabulary, peak, inverse, threshold, last, kept, needed, TILE
        )
    # Sums of float32 may not reach the target: then everything that was kept is still kept.
    return tl.maximum(kept, threshold), tl.where(kept < threshold, last, end)


@triton.jit
def _last_tie(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    threshold: tl.tensor,
    last: tl.tensor,
    kept: tl.tensor,
    needed: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the last of the first `needed` tokens of a logit."""
    columns = tl.arange(0, TILE)
    seen = tl.full([], 0, tl.int32)
    end = tl.full([], -1, tl.int32)
    for begin in range(0, vocabulary, TILE):
        token = begin + columns
        order, weight = _weights(  # pyright: ignore[reportGeneralTypeIssues]
            row, token, vocabulary, peak, inverse, threshold, last, False
        )
        is_tie = (order == kept) & (weight > 0.0)
        rank = seen + tl.cumsum(is_tie.to(tl.int32), 0)
        is_kept = is_tie & (rank.to(tl.float64) <= needed)
        end = tl.maximum(end, tl.max(tl.where(is_kept, token, -1), 0))
        seen += tl.sum(is_tie.to(tl.int32), 0)
    return end


@triton.jit
def _weights(
    row: tl.tensor,
    token: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    threshold: tl.tensor,
    last: tl.tensor,
    IS_WEIGHED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the ordered bits of tokens, and their weights: 0 if they are not kept."""
    score = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
    order = _ordered(score)
    is_kept = _is_kept(order, token, threshold, last) & (token < vocabulary)
    if IS_WEIGHED:
        weight = tl.where(is_kept, tl.exp((score - peak) * inverse), 0.0)
    else:
        weight = tl.where(is_kept, 1.0, 0.0)
    return order, weight


@triton.jit
def _ordered(score: tl.tensor) -> tl.tensor:
    """Return int32 that are in the order of the floats; both zeros are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 2147483647, bits)


@triton.jit
def _is_kept(
    order: tl.tensor, token: tl.tensor, threshold: tl.tensor, last: tl.tensor
) -> tl.tensor:
    return (order > threshold) | ((order == threshold) & (token <= last))


@triton.jit
def sample_kernel(
    scores: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    noise_keys: tl.tensor,
    thresholds: tl.tensor,
    last_ties: tl.tensor,
    floors: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Take the largest sum of score and noise in a part of one row.

    Args:
        scores: [S, V] float32.
        rows: [N] int64.
        temperatures: [N] float64.
        noise_keys: [N] int64.
        thresholds: [N] int32, see `truncate_kernel`.
        last_ties: [N] int32.
        floors: [N] float64.
        best: [N, P] float64, written.
        tokens: [N, P] int64, written: the token of each sum; -1 if the part has a NaN, or nothing
            but -inf.
        vocabulary: V.
        stride: Stride of rows of `scores`.
        TILE: Tokens that are processed at once.
    """
    index = tl.program_id(0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    row = scores + tl.load(rows + index) * stride
    temperature = tl.load(temperatures + index)
    threshold, last = tl.load(thresholds + index), tl.load(last_ties + index)
    floor = tl.load(floors + index)
    key = tl.load(noise_keys + index)
    columns = tl.arange(0, TILE)

    largest = tl.full([], float("-inf"), tl.float64)
    chosen = tl.full([], -1, tl.int64)
    nans = tl.zeros([TILE], tl.int32)
    # Parts are consecutive: of parts with equal sums, the first one has the smallest token.
    size = tl.cdiv(tl.cdiv(vocabulary, TILE), parts) * TILE
    for begin in range(part * size, tl.minimum(vocabulary, (part + 1) * size), TILE):
        token = begin + columns
        logit = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        nans |= (logit != logit).to(tl.int32)
        score = logit.to(tl.float64) / temperature
        is_kept = _is_kept(_ordered(logit), token, threshold, last)
        is_kept &= (score >= floor) & (token < vocabulary)
        total = tl.where(is_kept, score + _gumbel(key, token), float("-inf"))
        peak = tl.max(total, 0)
        winner = tl.min(tl.where(total == peak, token, 2147483647), 0)
        is_larger = peak > largest
        chosen = tl.where(is_larger, winner.to(tl.int64), chosen)
        largest = tl.where(is_larger, peak, largest)
    # NaN is the best of all parts.
    has_nan = tl.max(nans, 0) > 0
    chosen = tl.where(has_nan, -1, chosen)
    largest = tl.where(has_nan, float("nan"), largest)
    tl.store(best + index * parts + part, largest)
    tl.store(tokens + index * parts + part, chosen)


@triton.jit
def _gumbel(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return Gumbel noise in float64: splitmix64 of key and token, as `sampling.noise`."""
    # The constants are the signed numbers with the same bits.
    word = (token.to(tl.int64) + 1) * -7046029254386353131 + key
    word = (word ^ ((word >> 30) & 17179869183)) * -4658895280553007687
    word = (word ^ ((word >> 27) & 137438953471)) * -7723592293110705685
    word = word ^ ((word >> 31) & 8589934591)
    uniform = (((word >> 12) & 4503599627370495).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))
