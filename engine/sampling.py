"""Chooses the next token of each row from its logits.

Greedy rows take the largest logit. Others follow the Gumbel-max rule: the token whose
logit, after penalties, temperature and cuts, plus a noise of its own is largest is a draw
from the softmax of what the cuts left. The noise is a function of (seed, position, token)
computed from integers alone, so a draw depends neither on the other rows of the step nor on
how often a context was evicted and computed again: there is no state to lose.

Order of the steps, as in transformers: repetition, presence and frequency penalties; bias;
the row's mask, or else masks of end tokens; temperature; top-k; top-p; min-p. The repetition
penalty counts the whole context, the other two count what this Generate produced. Chances
that a row wants told are those of the logits as they came.

Knows ids, logits and `Sampling`; refuses to know text, stop strings and when a row is over.
Kept true: at least one token survives the cuts, and a row's result is the same in any batch.

Shapes: S sampling rows - V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .api import Chance, Sampling
from .runner import Row

Words = NDArray[np.uint64]

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[Row], eos_ids: Sequence[int]) -> list[int]:
    """Return the next id of each row.

    Args:
        logits: [S, V], any float dtype, on the CPU. Overwritten where a row is not plainly
            greedy.
        rows: The sampling rows in the order of `logits`, each with `sampling` set.
        eos_ids: Tokens that end a text; masked where a row's sampling says so.
    """
    sampled = [_sampling(row) for row in rows]
    if all(_is_plain(one, row) for one, row in zip(sampled, rows, strict=True)):
        return logits.argmax(dim=-1).tolist()
    scores = logits.float()
    told = {
        index: torch.log_softmax(scores[index], dim=-1)
        for index, one in enumerate(sampled)
        if one.logprobs is not None
    }
    for index, (one, row) in enumerate(zip(sampled, rows, strict=True)):
        _penalise(scores[index], one, row)
        _add_bias(scores[index], one)
        if row.mask is None:
            _mask_ends(scores[index], one, row, eos_ids)
        else:
            _allow(scores[index], row.mask)
    chosen: list[int] = scores.argmax(dim=-1).tolist()
    drawn = [index for index, one in enumerate(sampled) if one.temperature > 0]
    if drawn:
        picked = _draw(
            scores[drawn], [sampled[index] for index in drawn], [rows[index] for index in drawn]
        )
        for index, token in zip(drawn, picked, strict=True):
            chosen[index] = token
    for index, logprobs in told.items():
        rows[index].chance = _chance(logprobs, chosen[index], sampled[index].logprobs or 0)
    return chosen


def mix(words: Words) -> Words:
    """Return splitmix64's finaliser of each word: all bits of the input reach all of the output."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniforms(seed: int, stream: int, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in (0, 1) that only (seed, stream) decide, the same everywhere.

    Args:
        seed: Any integer; taken modulo 2**64.
        stream: Which of the seed's sequences, such as a position; modulo 2**64.
        count: Numbers wanted; number i does not depend on it.
    """
    key = mix(np.array([seed & _MASK], dtype=np.uint64) + np.uint64(_GOLDEN))
    key = mix(key ^ mix(np.array([(stream + 1) * _GOLDEN & _MASK], dtype=np.uint64)))
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    # 52 bits, so that adding a half is exact and neither 0 nor 1 comes out.
    bits = mix(counters + key) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _sampling(row: Row) -> Sampling:
    assert row.sampling is not None, "only sampling rows have logits"
    return row.sampling


def _is_plain(sampling: Sampling, row: Row) -> bool:
    """Say whether the largest logit is the answer as it stands."""
    return (
        sampling.temperature == 0
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and not sampling.ignore_eos
        and not sampling.logit_bias
        and sampling.logprobs is None
        and row.mask is None
        and len(row.ids) - row.num_prompt >= sampling.min_tokens
    )


def _penalise(scores: Tensor, sampling: Sampling, row: Row) -> None:
    """Lower, in place, the scores [V] of tokens that stand in the context already."""
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.ids)), dtype=torch.int64)
        found = scores[seen]
        factor = sampling.repetition_penalty
        scores[seen] = torch.where(found > 0, found / factor, found * factor)
    if sampling.presence_penalty == 0 and sampling.frequency_penalty == 0:
        return
    ids = torch.tensor(row.ids[row.num_prompt :], dtype=torch.int64)
    generated, counts = torch.unique(ids, return_counts=True)
    scores[generated] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _add_bias(scores: Tensor, sampling: Sampling) -> None:
    """Add, in place, what the caller wants added to the scores [V] of single tokens."""
    known = [(token, bias) for token, bias in sampling.logit_bias if token < len(scores)]
    if known:
        tokens, biases = zip(*known, strict=True)
        scores[list(tokens)] += torch.tensor(biases, dtype=scores.dtype)


def _allow(scores: Tensor, mask: bytes) -> None:
    """Make, in place, every token impossible whose bit is not set in the mask."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    width = min(len(bits), len(scores))
    scores[:width].masked_fill_(torch.from_numpy(bits[:width] == 0), float("-inf"))
    scores[width:] = float("-inf")


def _chance(logprobs: Tensor, token: int, num_top: int) -> Chance:
    """Return what a row wants told about its token, from logprobs [V]."""
    top: list[tuple[int, float]] = []
    if num_top:
        values, tokens = logprobs.topk(min(num_top, len(logprobs)))
        top = list(zip(tokens.tolist(), values.tolist(), strict=True))
    return Chance(float(logprobs[token]), top)


def _mask_ends(scores: Tensor, sampling: Sampling, row: Row, eos_ids: Sequence[int]) -> None:
    """Make, in place, the tokens impossible that may not end the text yet, or ever."""
    is_early = len(row.ids) - row.num_prompt < sampling.min_tokens
    masked = [*eos_ids] if is_early or sampling.ignore_eos else []
    if is_early:
        masked += [token for token in sampling.stop_token_ids if 0 <= token < len(scores)]
    if masked:
        scores[masked] = float("-inf")


def _draw(scores: Tensor, sampled: Sequence[Sampling], rows: Sequence[Row]) -> list[int]:
    """Return one draw for each row of [S, V] scores with a temperature above 0."""
    temperature = torch.tensor([one.temperature for one in sampled], dtype=torch.float64)
    scores = scores.double() / temperature[:, None]
    cut = [index for index, one in enumerate(sampled) if _has_cut(one)]
    if cut:
        scores[cut] = _cut(scores[cut], [sampled[index] for index in cut])
    width = scores.shape[1]
    noise = np.stack(
        [uniforms(one.seed, len(row.ids), width) for one, row in zip(sampled, rows, strict=True)]
    )
    gumbel = torch.from_numpy(-np.log(-np.log(noise)))
    return (scores + gumbel).argmax(dim=-1).tolist()


def _has_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _cut(scores: Tensor, sampled: Sequence[Sampling]) -> Tensor:
    """Return [S, V] scores with -inf for what top-k, top-p and min-p leave out."""
    width = scores.shape[1]
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([one.top_k if one.top_k > 0 else width for one in sampled])
    ordered = ordered.masked_fill(torch.arange(width) >= top_k[:, None], float("-inf"))
    # A token goes when those before it already make up top_p: the first never does.
    weights = torch.softmax(ordered, dim=-1)
    before = weights.cumsum(dim=-1) - weights
    top_p = torch.tensor([one.top_p for one in sampled], dtype=torch.float64)[:, None]
    drop = (before >= top_p) & (top_p < 1)
    drop[:, 0] = False
    min_p = torch.tensor([one.min_p for one in sampled], dtype=torch.float64)[:, None]
    drop |= weights < min_p * weights[:, :1]
    kept = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(kept).scatter_(1, tokens, kept)
