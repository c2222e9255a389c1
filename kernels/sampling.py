"""Sampling of tokens from scores: temperature, top-k, top-p, min-p and noise.

A random row takes the token with the largest sum of score and noise (the Gumbel-max trick), which
is a sample from the softmax. The noise is a function of a key and the token, computed from integers
(splitmix64: Steele, Lea and Flood, OOPSLA'14), so a sample depends neither on other rows nor on the
device.

`implementation(name)` returns `reference`, in plain torch, or `cpu` or `triton`, which do not sort.

Shapes: S rows of scores - V tokens of the vocabulary - N random rows - C truncated rows.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from .cpu import library
from .cpu.attention import NativeLibrary
from .cpu.sampling import CpuSampling
from .truncation import Truncation

NAMES: Final = ("reference", "cpu", "triton")

_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
"""2**64 / phi. Constants are written as the signed numbers with the same bits."""
_ROUNDS: Final = (
    (30, 0xBF58476D1CE4E5B9 - 2**64),
    (27, 0x94D049BB133111EB - 2**64),
    (31, 1),
)
"""Rounds of splitmix64's finaliser: bits to shift, factor to multiply by."""

LEAST_TEMPERATURE: Final = 1e-30
"""Scores divided by a smaller temperature may exceed float32. Noise cannot change an order then."""

_BLOCK: Final = 2_048
"""Scores of a row among which the position of the largest one is searched."""

NO_TOKEN: Final = -1
"""Instead of a token: no token can be sampled from the scores."""


class SamplingOperations(Protocol):
    """The function of an implementation."""

    def sample(
        self,
        scores: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        noise_keys: Tensor,
        truncation: Truncation,
    ) -> Tensor:
        """Return a token for each random row, without waiting for the device.

        Args:
            scores: [S, V] float32; -inf bans a token.
            rows: [N] int64, rows of `scores`.
            temperatures: [N] float64, at least `LEAST_TEMPERATURE`.
            noise_keys: [N] int64.
            truncation: Restrictions of some rows. At least one token of each row remains; of
                equal scores, smaller tokens come first.

        Returns:
            [N] int64; `NO_TOKEN` for a row with a score that is NaN, or with -inf only.
        """
        ...


def implementation(name: str, instructions: str = library.AUTO) -> SamplingOperations:
    """Return the operations of one implementation.

    Args:
        name: One of `NAMES`.
        instructions: Instruction set of the CPU kernels, see `library.find`.

    Raises:
        ValueError: if `name` is not one of `NAMES`, or the processor does not have the instruction
            set.
        LibraryUnavailableError: if the CPU kernels cannot be compiled.
    """
    if name == "reference":
        return ReferenceSampling()
    if name == "cpu":
        return CpuSampling(NativeLibrary(library.find(instructions)))
    if name == "triton":
        # Imported on demand: a machine without a GPU does not need triton.
        from .gpu.sampling import TritonSampling

        return TritonSampling()
    raise ValueError(f"implementation must be one of {', '.join(NAMES)}, got {name!r}")


class ReferenceSampling:
    """The operations in plain torch, in float64."""

    def sample(
        self,
        scores: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        noise_keys: Tensor,
        truncation: Truncation,
    ) -> Tensor:
        """See `SamplingOperations`."""
        chosen = scores.index_select(0, rows).double() / temperatures[:, None]
        if len(truncation.rows):
            cut = _truncate(chosen.index_select(0, truncation.rows), truncation)
            chosen.index_copy_(0, truncation.rows, cut)
        gumbel = noise(noise_keys, chosen.shape[1]).log_().neg_().log_().neg_()
        return largest_tokens(chosen.add_(gumbel))


def largest_tokens(scores: Tensor) -> Tensor:
    """Return the token of the largest score in each row.

    Args:
        scores: [S, V], any float dtype.

    Returns:
        [S] int64; `NO_TOKEN` for a row with a score that is NaN, or with -inf only.
    """
    values, tokens = _first_maxima(scores)
    return tokens.masked_fill_((values > float("-inf")).logical_not_(), NO_TOKEN)


def _first_maxima(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row and its first position, [S] each. NaN is the largest.

    On a CPU, torch finds the largest number of a row several times as fast as its position, and
    `argmax` of 16-bit numbers takes five times as long as `max`. So the position is searched in one
    block of the row.
    """
    num_rows, size = scores.shape
    num_whole = size // _BLOCK
    if scores.device.type != "cpu" or num_rows == 1:
        return scores.max(dim=1)
    if num_whole == 0:
        wide = scores.float() if scores.dtype.itemsize < 4 else scores
        tokens = wide.argmax(dim=1)
        return scores.gather(1, tokens[:, None]).view(-1), tokens
    whole = scores[:, : num_whole * _BLOCK].view(num_rows, num_whole, _BLOCK)
    maxima = whole.amax(dim=2)
    if size % _BLOCK:
        rest = scores[:, num_whole * _BLOCK :].amax(dim=1, keepdim=True)
        maxima = torch.cat((maxima, rest), dim=1)
    start = maxima.max(dim=1).indices.mul_(_BLOCK).clamp_(max=size - _BLOCK)
    values, offsets = scores.gather(1, start[:, None] + torch.arange(_BLOCK)).max(dim=1)
    return values, start + offsets


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


def _truncate(scores: Tensor, truncation: Truncation) -> Tensor:
    """Return scores [C, V] with -inf for the tokens that top-k, top-p and min-p exclude."""
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    beyond_top_k = torch.arange(scores.shape[1], device=scores.device) >= truncation.top_k[:, None]
    ordered = ordered.masked_fill(beyond_top_k, float("-inf"))
    # A token is excluded if the tokens before it reach top_p; the first never is.
    weights = torch.softmax(ordered, dim=-1)
    before = weights.cumsum(dim=-1) - weights
    top_p = truncation.top_p[:, None]
    excluded = (before >= top_p) & (top_p < 1)
    excluded[:, 0] = False
    excluded |= weights < truncation.min_p[:, None] * weights[:, :1]
    remaining = ordered.masked_fill(excluded, float("-inf"))
    return torch.empty_like(remaining).scatter_(1, tokens, remaining)
