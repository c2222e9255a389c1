"""Samples the next token of each row, on the device that holds the logits.

Greedy rows take the largest logit. Random rows use the Gumbel-max trick: after penalties,
temperature and truncation, noise is added to each logit, and the token with the largest sum is
a sample from the softmax. The noise is a function of (seed, position, token), computed from
integers (splitmix64: Steele, Lea and Flood, OOPSLA'14). So a sample depends neither on the other
rows of the step, nor on the device, nor on how often a context was recomputed.

Operations run in the order of transformers: repetition penalty; presence and frequency
penalties, bias and banned tokens, which are all additions; masks; temperature; top-k; top-p;
min-p. Reported logprobs are those of the unmodified logits.

Out of scope: rows and their sampling parameters, which `batch` turns into a `LogitOpsBatch`.

Invariants: no operation waits for a result of the device, so a step can be queued after one
that is still running. Truncation keeps at least one token.

Shapes: S rows - V tokens of the vocabulary - W bytes of a mask - E modified places - M masked,
N random, C truncated and L logprob rows.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Array = TypeVar("Array")
"""A numpy array before the step is staged, a tensor of the device afterwards."""

_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
"""2**64 / phi. Constants are written as the signed numbers with the same bits."""
_ROUNDS: Final = (
    (30, 0xBF58476D1CE4E5B9 - 2**64),
    (27, 0x94D049BB133111EB - 2**64),
    (31, 1),
)
"""Rounds of splitmix64's finaliser: bits to shift, factor to multiply by."""


class LogitOpsBatch(NamedTuple, Generic[Array]):
    """Operations on logits [S, V] before the largest one is taken.

    A place is `row * V + token`, and occurs at most once per operation.
    """

    penalty_places: Array
    """[E] int64, places whose logit is divided by a factor, or multiplied if it is negative."""
    penalty_factors: Array
    """[E] float32."""
    bias_places: Array
    """[E] int64, places whose logit is added to."""
    bias_values: Array
    """[E] float32; -inf bans the token."""
    mask_rows: Array
    """[M] int64, rows with a mask."""
    masks: Array
    """[M, W] uint8, one bit per allowed token, little-endian. W is at least V / 8."""
    random_rows: Array
    """[N] int64, rows with a temperature above 0."""
    temperatures: Array
    """[N] float64."""
    noise_keys: Array
    """[N] int64, hashes of seed and position."""
    truncated: Array
    """[C] int64, indices of the random rows with top-k, top-p or min-p."""
    top_k: Array
    """[C] int64, at least 1."""
    top_p: Array
    """[C] float64."""
    min_p: Array
    """[C] float64."""
    logprob_rows: Array
    """[L] int64, rows that report logprobs."""


def sample_tokens(logits: Tensor, ops: LogitOpsBatch[Tensor] | None, num_top: int = 0) -> Tensor:
    """Return the token of each row and the requested logprobs, in one vector.

    Args:
        logits: [S, V], any float dtype. May be overwritten if there are operations.
        ops: None takes the largest logits.
        num_top: Number of likeliest tokens to report, at most V.

    Returns:
        Without operations [S] int64. Otherwise float64, so that one copy moves all results to
        the host: [S] tokens, [L] their logprobs, [L * num_top] logprobs of the likeliest tokens,
        likeliest first, and [L * num_top] these tokens.
    """
    if ops is None:
        return logits.argmax(dim=-1)
    scores = logits.float()
    logprobs = None
    if len(ops.logprob_rows):
        logprobs = torch.log_softmax(scores.index_select(0, ops.logprob_rows), dim=-1)
    _modify_logits(scores, ops)
    tokens = scores.argmax(dim=-1)
    if len(ops.random_rows):
        tokens.index_copy_(
            0, ops.random_rows, _sample_random(scores.index_select(0, ops.random_rows), ops)
        )
    parts = [tokens]
    if logprobs is not None:
        reported = tokens.index_select(0, ops.logprob_rows)[:, None]
        top_values, top_tokens = logprobs.topk(num_top)
        parts += [
            logprobs.gather(1, reported).flatten(),
            top_values.flatten(),
            top_tokens.flatten(),
        ]
    return torch.cat([part.double() for part in parts])


def noise(keys: Tensor, count: int) -> Tensor:
    """Return `count` numbers in (0, 1) for each key, the same on every device.

    Args:
        keys: [N] int64.
        count: Numbers per key. The i-th number does not depend on it.

    Returns:
        [N, count] float64.
    """
    words = torch.arange(1, count + 1, device=keys.device).mul_(_GOLDEN) + keys[:, None]
    buffer = torch.empty_like(words)
    for shift, factor in _ROUNDS:
        # Unsigned shift: the mask removes the copies of the sign bit.
        torch.bitwise_right_shift(words, shift, out=buffer).bitwise_and_(2 ** (64 - shift) - 1)
        words.bitwise_xor_(buffer)
        if factor != 1:
            words.mul_(factor)
    # 52 bits, so that adding a half is exact and the result is neither 0 nor 1.
    words.bitwise_right_shift_(12).bitwise_and_(2**52 - 1)
    return words.double().add_(0.5).mul_(2.0**-52)


def _modify_logits(scores: Tensor, ops: LogitOpsBatch[Tensor]) -> None:
    """Apply penalties, biases and masks to scores [S, V], in place."""
    flat = scores.view(-1)
    if len(ops.penalty_places):
        values, factors = flat.index_select(0, ops.penalty_places), ops.penalty_factors
        penalized = torch.where(values > 0, values / factors, values * factors)
        flat.index_copy_(0, ops.penalty_places, penalized)
    if len(ops.bias_places):
        biased = flat.index_select(0, ops.bias_places) + ops.bias_values
        flat.index_copy_(0, ops.bias_places, biased)
    if len(ops.mask_rows):
        bit_indices = torch.arange(8, dtype=torch.uint8, device=scores.device)
        bits = (ops.masks[:, :, None] >> bit_indices) & 1
        banned = (bits == 0).flatten(1)[:, : scores.shape[1]]
        masked = scores.index_select(0, ops.mask_rows).masked_fill_(banned, float("-inf"))
        scores.index_copy_(0, ops.mask_rows, masked)


def _sample_random(scores: Tensor, ops: LogitOpsBatch[Tensor]) -> Tensor:
    """Return a sampled token [N] for each row of scores [N, V]."""
    scores = scores.double() / ops.temperatures[:, None]
    if len(ops.truncated):
        scores.index_copy_(0, ops.truncated, _truncate(scores.index_select(0, ops.truncated), ops))
    gumbel = noise(ops.noise_keys, scores.shape[1]).log_().neg_().log_().neg_()
    return scores.add_(gumbel).argmax(dim=-1)


def _truncate(scores: Tensor, ops: LogitOpsBatch[Tensor]) -> Tensor:
    """Return scores [C, V] with -inf for the tokens that top-k, top-p and min-p exclude."""
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    beyond_top_k = torch.arange(scores.shape[1], device=scores.device) >= ops.top_k[:, None]
    ordered = ordered.masked_fill(beyond_top_k, float("-inf"))
    # A token is excluded if the tokens before it reach top_p; the first never is.
    weights = torch.softmax(ordered, dim=-1)
    before = weights.cumsum(dim=-1) - weights
    top_p = ops.top_p[:, None]
    excluded = (before >= top_p) & (top_p < 1)
    excluded[:, 0] = False
    excluded |= weights < ops.min_p[:, None] * weights[:, :1]
    remaining = ordered.masked_fill(excluded, float("-inf"))
    return torch.empty_like(remaining).scatter_(1, tokens, remaining)
