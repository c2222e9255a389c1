"""Chooses the next token of each row on the device where its logits lie.

Greedy rows take the largest logit. Others follow the Gumbel-max rule: the token whose
logit, after penalties, temperature and cuts, plus a noise of its own is largest is a draw
from the softmax of what the cuts left. The noise is a function of (seed, position, token)
computed from integers alone (splitmix64: Steele, Lea and Flood, OOPSLA'14), so a draw depends
neither on the other rows of the step, nor on the device, nor on how often a context was
evicted and computed again.

Order of the steps, as in transformers: repetition penalty; presence and frequency
penalties, bias and banned tokens, which are all additions; masks; temperature; top-k; top-p;
min-p. Chances that a row wants told are those of the logits as they came.

Knows tensors; refuses to know rows and what their sampling says, which `sampling` has turned
into `Edits`. Kept true: nothing here asks the device for a number, so a step can be queued
behind one that still runs; at least one token survives the cuts.

Shapes: S rows - V tokens of the vocabulary - W bytes of a mask - E edited places -
M masked, N drawn, C cut and L told rows.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Array = TypeVar("Array")
"""Of numpy before the step is staged, a tensor of the device behind it."""

_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
"""2**64 / phi; constants are written as the signed numbers with the same bits."""
_ROUNDS: Final = (
    (30, 0xBF58476D1CE4E5B9 - 2**64),
    (27, 0x94D049BB133111EB - 2**64),
    (31, 1),
)
"""Of splitmix64's finaliser: how far a word is shifted, and by what it is multiplied then."""


class Edits(NamedTuple, Generic[Array]):
    """What is to be done with logits [S, V] besides taking the largest.

    Places are `row * V + token`, each at most once.
    """

    factored: Array
    """[E] int64 places whose logit is divided by a factor, or multiplied where negative."""
    factors: Array
    """[E] float32."""
    raised: Array
    """[E] int64 places to which something is added."""
    raises: Array
    """[E] float32, -inf bans."""
    masked: Array
    """[M] int64 rows with a mask."""
    masks: Array
    """[M, W] uint8, one bit per token that may be chosen, little-endian; W is V / 8 or more."""
    drawn: Array
    """[N] int64 rows with a temperature."""
    temperatures: Array
    """[N] float64."""
    keys: Array
    """[N] int64, what seed and position make of the noise."""
    cut: Array
    """[C] int64, which of the drawn are cut."""
    top_k: Array
    """[C] int64, at least 1."""
    top_p: Array
    """[C] float64."""
    min_p: Array
    """[C] float64."""
    told: Array
    """[L] int64 rows that want to know chances."""


def choose(logits: Tensor, edits: Edits[Tensor] | None, num_top: int = 0) -> Tensor:
    """Return the token of each row and the chances that were asked for, in one vector.

    Args:
        logits: [S, V], any float dtype. Overwritten in float32, if there are edits.
        edits: None takes the largest logits.
        num_top: Likeliest tokens to be told, at most V.

    Returns:
        Without edits [S] int64; else float64, so that one copy brings all of it home: [S]
        tokens, [L] logprobs of those, [L * num_top] logprobs of the likeliest, likeliest
        first, and [L * num_top] which these are.
    """
    if edits is None:
        return logits.argmax(dim=-1)
    scores = logits.float()
    logprobs = None
    if len(edits.told):
        logprobs = torch.log_softmax(scores.index_select(0, edits.told), dim=-1)
    _edit(scores, edits)
    chosen = scores.argmax(dim=-1)
    if len(edits.drawn):
        chosen.index_copy_(0, edits.drawn, _draw(scores.index_select(0, edits.drawn), edits))
    parts = [chosen]
    if logprobs is not None:
        mine = chosen.index_select(0, edits.told)[:, None]
        values, tokens = logprobs.topk(num_top)
        parts += [logprobs.gather(1, mine).flatten(), values.flatten(), tokens.flatten()]
    return torch.cat([part.double() for part in parts])


def noise(keys: Tensor, count: int) -> Tensor:
    """Return numbers in (0, 1), `count` for each key, the same on every device.

    Args:
        keys: [N] int64.
        count: Numbers of a key; number i does not depend on it.

    Returns:
        [N, count] float64.
    """
    words = torch.arange(1, count + 1, device=keys.device).mul_(_GOLDEN) + keys[:, None]
    spare = torch.empty_like(words)
    for shift, factor in _ROUNDS:
        # Shifted as if the words had no sign.
        torch.bitwise_right_shift(words, shift, out=spare).bitwise_and_(2 ** (64 - shift) - 1)
        words.bitwise_xor_(spare)
        if factor != 1:
            words.mul_(factor)
    # 52 bits, so that adding a half is exact and neither 0 nor 1 comes out.
    words.bitwise_right_shift_(12).bitwise_and_(2**52 - 1)
    return words.double().add_(0.5).mul_(2.0**-52)


def _edit(scores: Tensor, edits: Edits[Tensor]) -> None:
    """Apply what does not depend on chance to scores [S, V], in place."""
    flat = scores.view(-1)
    if len(edits.factored):
        found = flat.index_select(0, edits.factored)
        factors = edits.factors
        flat.index_copy_(
            0, edits.factored, torch.where(found > 0, found / factors, found * factors)
        )
    if len(edits.raised):
        flat.index_copy_(0, edits.raised, flat.index_select(0, edits.raised) + edits.raises)
    if len(edits.masked):
        places = torch.arange(8, dtype=torch.uint8, device=scores.device)
        bits = (edits.masks[:, :, None] >> places) & 1
        banned = (bits == 0).flatten(1)[:, : scores.shape[1]]
        held = scores.index_select(0, edits.masked).masked_fill_(banned, float("-inf"))
        scores.index_copy_(0, edits.masked, held)


def _draw(scores: Tensor, edits: Edits[Tensor]) -> Tensor:
    """Return one draw [N] for each row of scores [N, V]."""
    scores = scores.double() / edits.temperatures[:, None]
    if len(edits.cut):
        scores.index_copy_(0, edits.cut, _cut(scores.index_select(0, edits.cut), edits))
    gumbel = noise(edits.keys, scores.shape[1]).log_().neg_().log_().neg_()
    return scores.add_(gumbel).argmax(dim=-1)


def _cut(scores: Tensor, edits: Edits[Tensor]) -> Tensor:
    """Return scores [C, V] with -inf for what top-k, top-p and min-p leave out."""
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    beyond = torch.arange(scores.shape[1], device=scores.device) >= edits.top_k[:, None]
    ordered = ordered.masked_fill(beyond, float("-inf"))
    # A token goes when those before it already make up top_p: the first never does.
    weights = torch.softmax(ordered, dim=-1)
    before = weights.cumsum(dim=-1) - weights
    top_p = edits.top_p[:, None]
    drop = (before >= top_p) & (top_p < 1)
    drop[:, 0] = False
    drop |= weights < edits.min_p[:, None] * weights[:, :1]
    kept = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(kept).scatter_(1, tokens, kept)
