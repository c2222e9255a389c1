"""Sampling: reproducible noise, distribution, truncation, penalties and masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.sampling.batch import sample, uniforms

VOCAB = 12
EOS = (10, 11)
UNIFORMS_0_0 = [0.8833108082136426, 0.4315279970485101, 0.026433771592597854]
UNIFORMS_MAX_77 = [0.11047145373683709, 0.4398582096919067]


def row(
    ids: list[int] | None = None, *, num_prompt: int | None = None, **chosen: Any
) -> ScheduledSequence:
    ids = [1, 2, 3] if ids is None else ids
    sampling = SamplingParams(max_tokens=100, **chosen)
    start = len(ids) - 1
    return ScheduledSequence(
        0, ids, start, 1, [0], sampling, len(ids) if num_prompt is None else num_prompt
    )


def logits_of(seed: int, num_rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return 2 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def draws(logits: Tensor, count: int, **chosen: Any) -> np.ndarray[Any, Any]:
    """Return how often each token is sampled over `count` pairs of seed and position."""
    rows = [row([0] * (1 + i % 200), seed=i // 200, **chosen) for i in range(count)]
    tokens = sample(logits.expand(count, -1).clone(), rows, EOS)
    return np.bincount(tokens, minlength=logits.shape[-1])


def chi_square(counts: np.ndarray[Any, Any], probabilities: Tensor) -> float:
    expected = probabilities.double().numpy() * counts.sum()
    live = expected > 0
    assert not counts[~live].any(), "an excluded token was sampled"
    return float((((counts - expected) ** 2)[live] / expected[live]).sum())


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = logits_of(0, 5)
    assert sample(logits.clone(), [row()] * 5, EOS) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("chosen", [{}, {"temperature": 1.0}, {"logprobs": 2}])
def test_nan_logits_give_no_token_in_their_row_only(chosen: dict[str, Any]) -> None:
    logits = logits_of(5, 3)
    expected = sample(logits.clone(), [row(**chosen)] * 3, EOS)
    logits[1, 4] = float("nan")
    assert sample(logits.clone(), [row(**chosen)] * 3, EOS) == [expected[0], -1, expected[2]]


def test_masked_nan_logits_are_not_sampled() -> None:
    logits = logits_of(6)
    logits[0, 4] = float("nan")
    masked = row(temperature=1.0)
    masked.mask = bytes([0b0010_0110])
    assert sample(logits, [masked], EOS)[0] in (1, 2, 5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = logits_of(1)
    counts = draws(logits, 4000, temperature=temperature)
    # 11 degrees of freedom: 31.3 is exceeded once in a thousand.
    assert chi_square(counts, torch.softmax(logits[0] / temperature, -1)) < 31.3


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}]
)
def test_truncated_samples_follow_the_remaining_distribution(cut: dict[str, Any]) -> None:
    logits = logits_of(2)
    weights = torch.softmax(logits[0].double(), -1)
    keep = torch.zeros(VOCAB, dtype=torch.bool)
    best = weights.max()
    ranked = weights.argsort(descending=True)[: cut.get("top_k", VOCAB)]
    total = float(weights[ranked].sum())
    reached = 0.0
    for token in ranked.tolist():
        if reached < cut.get("top_p", 1.0) * total and weights[token] >= cut.get("min_p", 0) * best:
            keep[token] = True
        reached += float(weights[token])
    assert 1 < int(keep.sum()) < VOCAB
    counts = draws(logits, 3000, **{"temperature": 1.0, **cut})
    left = weights * keep
    assert chi_square(counts, left / left.sum()) < 31.3


@settings(max_examples=30)
@given(seed=st.integers(0, 2**63), others=st.integers(0, 7), place=st.integers(0, 7))
def test_sample_does_not_depend_on_other_rows(seed: int, others: int, place: int) -> None:
    place = min(place, others)
    chosen: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "top_k": 8}
    chosen["repetition_penalty"] = 1.1
    mine = row([5, 6, 7], seed=seed, **chosen)
    logits = logits_of(3)
    alone = sample(logits.clone(), [mine], EOS)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": seed},
        {"temperature": 2.0, "min_p": 0.1},
        {"frequency_penalty": 1.0},
    ]
    rows = [row([1] * (i + 1), **kinds[i % len(kinds)]) for i in range(others)]
    rows.insert(place, mine)
    batch = logits_of(4, others + 1)
    batch[place] = logits[0]
    assert sample(batch, rows, EOS)[place] == alone[0]


def test_seed_samples_differently_at_every_position() -> None:
    flat = torch.zeros(1, 50)
    tokens = {
        sample(flat.clone(), [row([0] * (length + 1), temperature=1.0, seed=9)], EOS)[0]
        for length in range(40)
    }
    assert len(tokens) > 20


def test_noise_is_the_same_on_every_machine() -> None:
    assert uniforms(0, 0, 3).tolist() == UNIFORMS_0_0
    assert uniforms(2**64 - 1, 77, 2).tolist() == UNIFORMS_MAX_77
    assert uniforms(5, 6, 100)[:10].tolist() == uniforms(5, 6, 10).tolist()


def test_noise_is_uniform_over_tokens_positions_and_seeds() -> None:
    samples = [
        uniforms(1, 2, 20_000),
        np.array([uniforms(1, position, 1)[0] for position in range(5000)]),
        np.array([uniforms(seed, 1, 1)[0] for seed in range(5000)]),
    ]
    for numbers in samples:
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        expected = len(numbers) / 20
        # 19 degrees of freedom: 43.8 is exceeded once in a thousand.
        assert float(((counts - expected) ** 2 / expected).sum()) < 43.8
        assert numbers.min() > 0
        assert numbers.max() < 1


def test_repetition_penalty_applies_once_per_token() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.2]])
    # 2.0 / 1.5 = 1.33 is less than 1.5.
    assert sample(logits.clone(), [row([0, 0, 2], repetition_penalty=1.5)], ()) == [1]
    assert sample(logits.clone(), [row([3], repetition_penalty=1.5)], ()) == [0]
    low = torch.tensor([[-1.0, -1.2]])
    assert sample(low.clone(), [row([0], repetition_penalty=1.5)], ()) == [1]


def test_presence_and_frequency_count_only_generated_tokens() -> None:
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    prompt_only = row([0, 0, 0], presence_penalty=1.0, frequency_penalty=1.0)
    assert sample(logits.clone(), [prompt_only], ()) == [0]
    once = row([2, 0], num_prompt=1, presence_penalty=0.6)
    assert sample(logits.clone(), [once], ()) == [1]
    few = row([2, 0], num_prompt=1, frequency_penalty=0.3)
    assert sample(logits.clone(), [few], ()) == [0]
    many = row([2, 0, 0], num_prompt=1, frequency_penalty=0.3)
    assert sample(logits.clone(), [many], ()) == [1]


def test_end_tokens_are_banned_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 4], logits[0, 7] = 9.0, 8.0, 7.0
    early = row([0, 1], num_prompt=1, min_tokens=2, stop_token_ids=(4, 500))
    assert sample(logits.clone(), [early], EOS) == [7]
    ready = row([0, 1, 1], num_prompt=1, min_tokens=2, stop_token_ids=(4,))
    assert sample(logits.clone(), [ready], EOS) == [10]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ignore_eos_bans_eos_but_not_stop_tokens(temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 11], logits[0, 4] = 90.0, 80.0, 70.0
    never = row(ignore_eos=True, stop_token_ids=(4,), temperature=temperature)
    assert sample(logits.clone(), [never], EOS) == [4]


@pytest.mark.parametrize("temperature", [1e-310, 1e-40, 1e-31])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = logits_of(7, num_rows=2)
    rows = [row(temperature=temperature, top_p=0.9), row(temperature=temperature, seed=3)]
    assert sample(logits.clone(), rows, EOS) == logits.argmax(-1).tolist()


def test_truncation_keeps_the_best_token() -> None:
    logits = logits_of(6)
    best = logits.argmax(-1).tolist()
    cuts: list[dict[str, Any]] = [
        {"top_p": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 1e-9, "min_p": 1.0},
    ]
    for cut in cuts:
        assert sample(logits.clone(), [row(temperature=5.0, seed=3, **cut)], EOS) == best


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = logits_of(7)
    tiny = row(temperature=1e-6, top_p=0.9)
    assert sample(logits.clone(), [tiny], EOS) == logits.argmax(-1).tolist()


def test_bfloat16_logits_are_sampled_in_full_precision() -> None:
    logits = logits_of(8).bfloat16()
    counts = draws(logits, 2000, temperature=1.0)
    assert chi_square(counts, torch.softmax(logits[0].float(), -1)) < 31.3


def bits(*allowed: int) -> bytes:
    mask = bytearray(4)
    for token in allowed:
        mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_masked_tokens_are_never_sampled(temperature: float) -> None:
    logits = logits_of(9, 40)
    rows = [
        row(temperature=temperature, seed=i, min_tokens=50, ignore_eos=True, top_k=1 + i % 3)
        for i in range(40)
    ]
    for each in rows[::2]:
        each.mask = bits(3, 10)
    tokens = sample(logits.clone(), rows, EOS)
    # A mask overrides the ban of end tokens; rows without a mask still ban them.
    assert set(tokens[::2]) == {3, 10}
    assert not {10, 11} & set(tokens[1::2])


def test_permissive_mask_changes_nothing() -> None:
    logits = logits_of(10, 30)
    free = [row(temperature=1.5, top_p=0.8, seed=i) for i in range(30)]
    held = [row(temperature=1.5, top_p=0.8, seed=i) for i in range(30)]
    for each in held:
        each.mask = bits(*range(VOCAB))
    assert sample(logits.clone(), free, EOS) == sample(logits.clone(), held, EOS)


def test_mask_length_may_differ_from_vocabulary() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 39] = 50.0
    each = row()
    each.mask = bits(7)
    assert sample(logits, [each], EOS) == [7]
    each.mask = bits(2, 30)
    assert sample(torch.zeros(1, VOCAB), [each], EOS) == [2]


def test_bias_does_not_override_a_mask() -> None:
    logits = logits_of(11)
    best, other = logits.topk(2).indices[0].tolist()
    assert sample(logits.clone(), [row(logit_bias=((other, 100.0),))], EOS) == [other]
    assert sample(logits.clone(), [row(logit_bias=((best, -100.0), (99, 5.0)))], EOS) == [other]
    held = row(logit_bias=((other, 100.0),))
    held.mask = bits(best)
    assert sample(logits.clone(), [held], EOS) == [best]
    counts = draws(logits, 3000, temperature=1.0, logit_bias=((4, 2.0), (5, -1.0)))
    biased = logits[0].clone()
    biased[4] += 2
    biased[5] -= 1
    assert chi_square(counts, torch.softmax(biased, -1)) < 31.3


def test_logprobs_are_those_of_unmodified_logits() -> None:
    logits = logits_of(12, 3)
    expected = torch.log_softmax(logits, -1)
    rows = [
        row(logprobs=3, temperature=2.0, seed=5, logit_bias=((1, 9.0),)),
        row(logprobs=0),
        row(),
    ]
    rows[0].mask = bits(1, 2)
    tokens = sample(logits.clone(), rows, EOS)
    chance = rows[0].logprob
    assert chance is not None
    assert chance.logprob == pytest.approx(expected[0, tokens[0]].item())
    top = expected[0].topk(3)
    assert [token for token, _ in chance.top] == top.indices.tolist()
    assert [value for _, value in chance.top] == pytest.approx(top.values.tolist())
    assert rows[1].logprob is not None
    assert rows[1].logprob.logprob == pytest.approx(expected[1].max().item())
    assert rows[1].logprob.top == []
    assert rows[2].logprob is None
