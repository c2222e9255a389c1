"""Samples the next token of each row, on the device that holds the logits.

Greedy rows take the largest logit. Random rows are sampled by `conure.kernels.sampling`, with noise
that is a function of (seed, position, token). A sample therefore depends neither on the other rows
of the step, nor on the device, nor on how often a context was recomputed.

Operations run in the order of transformers: repetition penalty; presence and frequency
penalties, bias and banned tokens, which are all additions; masks; temperature; top-k; top-p;
min-p. Reported logprobs are those of the unmodified logits.

Out of scope: sampling parameters, which `batch` converts to a `LogitOpsBatch`.

Invariants: no operation waits for a result of the device, so a step can be queued after one
that is still running. Truncation keeps at least one token. A row gets -1 instead of a token if an
allowed logit is NaN, or none is above -inf.

Shapes: S rows - V tokens of the vocabulary - W bytes of a mask - E modified places - M masked,
N random, C truncated and L logprob rows.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from conure.kernels.sampling import ReferenceSampling, SamplingOperations, largest_tokens
from conure.kernels.truncation import Truncation

Array = TypeVar("Array")
"""A numpy array before the step is staged, a tensor of the device afterwards."""

_REFERENCE: Final = ReferenceSampling()


class LogitOpsBatch(NamedTuple, Generic[Array]):
    """Operations on logits [S, V], applied before sampling.

    A place is the flat index `row * V + token`. It occurs at most once per operation.
    """

    penalty_places: Array
    """[E] int64, places whose logit is divided by a factor, or multiplied if it is negative."""
    penalty_factors: Array
    """[E] float32."""
    bias_places: Array
    """[E] int64, places to which a bias is added."""
    bias_values: Array
    """[E] float32; -inf bans the token."""
    mask_rows: Array
    """[M] int64, rows with a mask."""
    masks: Array
    """[M, W] uint8, one bit per allowed token, little-endian. W is at least V / 8."""
    random_rows: Array
    """[N] int64, rows that noise decides."""
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


def sample_tokens(
    logits: Tensor,
    ops: LogitOpsBatch[Tensor] | None,
    num_top: int = 0,
    operations: SamplingOperations = _REFERENCE,
) -> Tensor:
    """Return the token of each row and the requested logprobs, in one vector.

    Args:
        logits: [S, V], any float dtype. May be overwritten if there are operations.
        ops: None takes the largest logits.
        num_top: Number of likeliest tokens to report, at most V.
        operations: Samples the tokens of random rows.

    Returns:
        Without operations [S] int64. Otherwise float64, so that one copy moves all results to
        the host: [S] tokens, [L] their logprobs, [L * num_top] logprobs of the likeliest tokens,
        likeliest first, and [L * num_top] these tokens.
    """
    if ops is None:
        return largest_tokens(logits)
    scores = logits.float()
    logprobs = None
    if len(ops.logprob_rows):
        logprobs = torch.log_softmax(scores.index_select(0, ops.logprob_rows), dim=-1)
    _modify_logits(scores, ops)
    tokens = _choose_tokens(scores, ops, operations)
    parts = [tokens]
    if logprobs is not None:
        reported = tokens.index_select(0, ops.logprob_rows)[:, None].clamp_(min=0)
        top_values, top_tokens = logprobs.topk(num_top)
        parts += [
            logprobs.gather(1, reported).flatten(),
            top_values.flatten(),
            top_tokens.flatten(),
        ]
    return torch.cat([part.double() for part in parts])


def _choose_tokens(
    scores: Tensor, ops: LogitOpsBatch[Tensor], operations: SamplingOperations
) -> Tensor:
    """Return the token of each row of modified scores [S, V]."""
    if not len(ops.random_rows):
        return largest_tokens(scores)
    truncation = Truncation(ops.truncated, ops.top_k, ops.top_p, ops.min_p)
    sampled = operations.sample(
        scores, ops.random_rows, ops.temperatures, ops.noise_keys, truncation
    )
    if len(sampled) == len(scores):
        return sampled
    return largest_tokens(scores).index_copy_(0, ops.random_rows, sampled)


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
