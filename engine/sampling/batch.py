"""Turns the sampling parameters of a step's rows into arrays, and results back into ids.

`make_batch` writes each row's `SamplingParams`, mask and token counts into the arrays that
`sampler` applies on the device; `unpack` reads the results. A step whose rows all take the
largest unmodified logit needs neither.

The repetition penalty counts the whole context; presence and frequency penalties count what
this Generate produced. A mask already covers end tokens. Without a mask, end tokens are banned
until `min_tokens` are generated, or always under `ignore_eos`.

Out of scope: text, stop strings and the end of an output.

Invariants: a row's result is the same in every batch; no state is kept between steps.

Shapes: S sampling rows - V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conure.kernels.sampling import LEAST_TEMPERATURE

from ..protocol import SamplingParams, TokenLogprob
from ..runner.base import ScheduledSequence
from .sampler import LogitOpsBatch, sample_tokens
from .token_counts import TokenBiases, TokenCounts, has_penalty

Words: TypeAlias = NDArray[np.uint64]
Arrays: TypeAlias = dict[str, NDArray[Any]]
"""Fields of a `LogitOpsBatch` by name."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
_BANNED: Final = float("-inf")
_LEAST_PENALTY: Final = 1e-6
"""Smaller repetition penalties act as this one: a logit divided by them may be infinite."""


class SamplingBatch(NamedTuple):
    """The logit operations of a step's rows."""

    ops: LogitOpsBatch[NDArray[Any]]
    num_top: int
    """The largest number of likeliest tokens that a row reports."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[ScheduledSequence], eos_ids: Sequence[int]) -> list[int]:
    """Return the next id of each row, sampled on the CPU.

    Args:
        logits: [S, V], any float dtype, on the CPU. Overwritten unless all rows are greedy and
            unmodified.
        rows: The sampling rows in the order of `logits`, each with `sampling` set.
        eos_ids: End tokens; banned where a row's sampling parameters require it.
    """
    batch = make_batch(rows, eos_ids, logits.shape[1])
    if batch is None:
        return unpack(sample_tokens(logits, None).tolist(), rows, None)
    ops = LogitOpsBatch(*(torch.from_numpy(array) for array in batch.ops))
    return unpack(sample_tokens(logits, ops, batch.num_top).tolist(), rows, batch)


def make_batch(
    rows: Sequence[ScheduledSequence], eos_ids: Sequence[int], vocab_size: int
) -> SamplingBatch | None:
    """Return the logit operations of all rows, or None if all take their largest logit.

    Args:
        rows: The sampling rows, each with `sampling` set.
        eos_ids: End tokens.
        vocab_size: V.
    """
    params = [_params(row) for row in rows]
    if all(map(_is_plain_greedy, params, rows)):
        return None
    logprob_rows = [index for index, each in enumerate(params) if each.logprobs is not None]
    ops: LogitOpsBatch[NDArray[Any]] = LogitOpsBatch(
        **_penalty_and_bias_ops(rows, eos_ids, vocab_size),
        **_mask_ops(rows, vocab_size),
        **_random_ops(rows, vocab_size),
        logprob_rows=_integers(logprob_rows),
    )
    num_top = max((params[index].logprobs or 0 for index in logprob_rows), default=0)
    return SamplingBatch(ops, min(num_top, vocab_size))


def unpack(
    results: list[float] | list[int],
    rows: Sequence[ScheduledSequence],
    batch: SamplingBatch | None,
) -> list[int]:
    """Return the ids in the results of `sample_tokens`, and set the logprobs of rows."""
    if batch is None:
        return [int(token) for token in results]
    logprob_rows: list[int] = batch.ops.logprob_rows.tolist()
    num_rows, num_reporting, num_top = len(rows), len(logprob_rows), batch.num_top
    logprobs = results[num_rows : num_rows + num_reporting]
    top_values = results[num_rows + num_reporting : num_rows + num_reporting * (1 + num_top)]
    top_tokens = results[num_rows + num_reporting * (1 + num_top) :]
    for place, index in enumerate(logprob_rows):
        begin = place * num_top
        end = begin + min(_params(rows[index]).logprobs or 0, num_top)
        top = zip(map(int, top_tokens[begin:end]), top_values[begin:end], strict=True)
        rows[index].logprob = TokenLogprob(logprobs[place], list(top))
    return [int(token) for token in results[:num_rows]]


def mix(words: Words) -> Words:
    """Return splitmix64's finaliser of each word: each input bit affects all output bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniforms(seed: int, stream: int, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in (0, 1), a function of (seed, stream) on every machine.

    Args:
        seed: Any integer, taken modulo 2**64.
        stream: Number of the seed's sequence, such as a position; taken modulo 2**64.
        count: Amount of numbers. The i-th number does not depend on it.
    """
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    # 52 bits, so that adding a half is exact and the result is neither 0 nor 1.
    bits = mix(counters + np.uint64(_key(seed, stream))) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _key(seed: int, stream: int) -> int:
    """Return 64 bits that determine the noise of a row."""
    return _mixed(_mixed(seed + _GOLDEN) ^ _mixed((stream + 1) * _GOLDEN))


def _mixed(word: int) -> int:
    """Return `mix` of a single word, which may be any integer."""
    word &= _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def _integers(numbers: Any) -> NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)


def _params(row: ScheduledSequence) -> SamplingParams:
    assert row.sampling is not None, "only sampling rows have logits"
    return row.sampling


def _is_greedy(params: SamplingParams) -> bool:
    """Return whether a row takes its largest logit."""
    return params.temperature < LEAST_TEMPERATURE


def _is_plain_greedy(params: SamplingParams, row: ScheduledSequence) -> bool:
    """Return whether the row takes its largest unmodified logit."""
    return (
        _is_greedy(params)
        and not has_penalty(params)
        and not params.ignore_eos
        and not params.logit_bias
        and params.logprobs is None
        and row.mask is None
        and row.length - row.num_prompt >= params.min_tokens
    )


def _penalty_and_bias_ops(
    rows: Sequence[ScheduledSequence], eos_ids: Sequence[int], vocab_size: int
) -> Arrays:
    places: list[NDArray[np.int64]] = [_integers(())]
    factors: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    bias_places: list[NDArray[np.int64]] = [_integers(())]
    bias_values: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    ban_places: list[int] = []
    for index, row in enumerate(rows):
        params = _params(row)
        counts = _token_counts(row) if has_penalty(params) else None
        first = index * vocab_size
        if counts is not None and params.repetition_penalty != 1:
            places.append(first + np.array(counts.distinct, np.int64))
            factor = max(params.repetition_penalty, _LEAST_PENALTY)
            factors.append(np.full(len(places[-1]), factor, np.float32))
        banned = _banned(row, eos_ids)
        if params.presence_penalty or params.frequency_penalty or params.logit_bias:
            tokens, amounts = _biases(row, counts, banned, vocab_size)
            bias_places.append(first + tokens)
            bias_values.append(amounts.astype(np.float32))
        else:  # mostly; without an array for each row
            ban_places += [first + token for token in banned if 0 <= token < vocab_size]
    bias_places.append(_integers(ban_places))
    bias_values.append(np.full(len(ban_places), _BANNED, np.float32))
    return {
        "penalty_places": np.concatenate(places),
        "penalty_factors": np.concatenate(factors),
        "bias_places": np.concatenate(bias_places),
        "bias_values": np.concatenate(bias_values),
    }


def _token_counts(row: ScheduledSequence) -> TokenCounts:
    """Return the updated token counts of a row."""
    counts = TokenCounts(row.num_prompt) if row.token_counts is None else row.token_counts
    counts.update(row.ids)
    return counts


def _biases(
    row: ScheduledSequence, counts: TokenCounts | None, banned: Sequence[int], vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return tokens, each once, and the amounts to add to their logits."""
    params = _params(row)
    tokens: list[NDArray[np.int64]] = []
    amounts: list[NDArray[np.float64]] = []
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if counts is not None and (presence != 0 or frequency != 0):
        tokens.append(np.array(counts.generated, np.int64))
        amounts.append(-(presence + frequency * np.array(counts.counts, np.float64)))
    if params.logit_bias:
        biases = TokenBiases.of(params.logit_bias) if row.biases is None else row.biases
        tokens.append(np.array(biases.tokens, np.int64))
        amounts.append(np.array(biases.amounts, np.float64))
    if banned:
        tokens.append(np.array(banned, np.int64))
        amounts.append(np.full(len(banned), _BANNED))
    if len(tokens) == 1:
        distinct, sums = tokens[0], amounts[0]
    else:
        distinct, places = np.unique(np.concatenate(tokens), return_inverse=True)
        sums = np.bincount(places, np.concatenate(amounts)).astype(np.float64)
    is_known = (distinct >= 0) & (distinct < vocab_size)
    return distinct[is_known], sums[is_known]


def _banned(row: ScheduledSequence, eos_ids: Sequence[int]) -> list[int]:
    """Return the tokens that a row must not sample, each once; a mask covers them already."""
    params = _params(row)
    if row.mask is not None:
        return []
    is_below_min = row.length - row.num_prompt < params.min_tokens
    banned = [*eos_ids] if is_below_min or params.ignore_eos else []
    if is_below_min:
        banned += params.stop_token_ids
    return list(dict.fromkeys(banned))


def _mask_ops(rows: Sequence[ScheduledSequence], vocab_size: int) -> Arrays:
    mask_rows: list[int] = []
    masks: list[bytes] = []
    for index, row in enumerate(rows):
        if row.mask is not None:
            mask_rows.append(index)
            masks.append(row.mask)
    # Tokens beyond the end of a mask are banned.
    num_bytes = -(-vocab_size // 8)
    padded = np.zeros((len(masks), num_bytes), np.uint8)
    for bits, mask in zip(padded, masks, strict=True):
        used = mask[:num_bytes]
        bits[: len(used)] = np.frombuffer(used, np.uint8)
    return {"mask_rows": _integers(mask_rows), "masks": padded}


def _random_ops(rows: Sequence[ScheduledSequence], vocab_size: int) -> Arrays:
    random_rows = [index for index, row in enumerate(rows) if not _is_greedy(_params(row))]
    random = [_params(rows[index]) for index in random_rows]
    noise_keys = [_key(_params(rows[index]).seed, rows[index].length) for index in random_rows]
    truncated = [index for index, params in enumerate(random) if _is_truncated(params)]
    cuts = [random[index] for index in truncated]
    return {
        "random_rows": _integers(random_rows),
        "temperatures": np.array([params.temperature for params in random], np.float64),
        "noise_keys": np.array(noise_keys, np.uint64).view(np.int64),
        "truncated": _integers(truncated),
        "top_k": _integers(max(params.top_k, 0) or vocab_size for params in cuts),
        "top_p": np.array([params.top_p for params in cuts], np.float64),
        "min_p": np.array([params.min_p for params in cuts], np.float64),
    }


def _is_truncated(params: SamplingParams) -> bool:
    """Return whether top-k, top-p or min-p restrict the distribution."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0
