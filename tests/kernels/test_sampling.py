"""Sampling: distributions, truncation against a sort, ties, and equal tokens everywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conure.kernels import sampling
from conure.kernels.cpu import library
from conure.kernels.cpu.sampling import CpuSampling
from conure.kernels.truncation import Truncation
from tests.kernels.implementations import TRITON_DEVICE

pytest.importorskip("triton")
GREEDY = 1e-6
"""A temperature at which noise decides between equal scores only."""


NAMES = ("reference", *(f"cpu-{each.name}" for each in library.supported()), "triton")


def implementation(name: str) -> sampling.SamplingOperations:
    """Return an implementation; the C++ kernels count once per instruction set."""
    kind, _, instructions = name.partition("-")
    return sampling.implementation(kind, instructions or library.AUTO)


@pytest.fixture(params=NAMES)
def operations(request: pytest.FixtureRequest) -> sampling.SamplingOperations:
    return implementation(request.param)


def num_rows(operations: sampling.SamplingOperations, compiled: int, interpreted: int) -> int:
    """Return how many rows to sample: the interpreter takes 0.1 s for a truncated row."""
    is_fast = isinstance(operations, sampling.ReferenceSampling | CpuSampling)
    is_slow = TRITON_DEVICE.type == "cpu" and not is_fast
    return interpreted if is_slow else compiled


def device_of(operations: sampling.SamplingOperations) -> torch.device:
    """Return the device that an implementation computes on."""
    return torch.device("cpu") if isinstance(operations, CpuSampling) else TRITON_DEVICE


def random_scores(num_rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_rows, vocabulary, generator=generator)


def sample(
    operations: sampling.SamplingOperations,
    scores: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Sample a token of every row, each with its own noise."""
    num, device = len(scores), device_of(operations)
    keys = torch.randint(-(2**63), 2**63 - 1, (num,), generator=torch.Generator().manual_seed(seed))
    is_cut = top_k is not None or top_p < 1 or min_p > 0
    cut = num if is_cut else 0
    truncation = Truncation(
        torch.arange(cut, device=device),
        torch.full((cut,), top_k or scores.shape[1], device=device),
        torch.full((cut,), top_p, dtype=torch.float64, device=device),
        torch.full((cut,), min_p, dtype=torch.float64, device=device),
    )
    return operations.sample(
        scores.to(device),
        torch.arange(num, device=device),
        torch.full((num,), temperature, dtype=torch.float64, device=device),
        keys.to(device),
        truncation,
    ).cpu()


def allowed(scores: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that a truncated row may take, from the definition."""
    order = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), token))[:top_k]
    top = float(scores[order[0]])
    weights = [math.exp(float(scores[token]) - top) for token in order]
    total, before, kept = sum(weights), 0.0, set()
    for place, (token, weight) in enumerate(zip(order, weights, strict=True)):
        if (place == 0 or top_p >= 1 or before < top_p * total) and weight >= min_p:
            kept.add(token)
        before += weight
    return kept


CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
)


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_rows_take_allowed_tokens_only(
    operations: sampling.SamplingOperations, cut: dict[str, Any]
) -> None:
    options = {"top_k": 40, "top_p": 1.0, "min_p": 0.0, **cut}
    scores = random_scores(1, 40, seed=3)
    kept = allowed(scores[0], **options)
    num = num_rows(operations, 600, 12)
    tokens = sample(operations, scores.expand(num, -1).contiguous(), **options)
    assert set(tokens.tolist()) <= kept
    if num > 100:
        likely = {t for t in kept if float(torch.softmax(scores[0], -1)[t]) > 0.02}
        assert likely <= set(tokens.tolist())


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.15}])
def test_samples_follow_the_remaining_distribution(
    operations: sampling.SamplingOperations, cut: dict[str, Any]
) -> None:
    options = {"top_k": 12, "top_p": 1.0, "min_p": 0.0, **cut}
    scores = random_scores(1, 12, seed=1)
    kept = sorted(allowed(scores[0], **options))
    num = num_rows(operations, 3000, 40 if cut else 200)
    tokens = sample(operations, scores.expand(num, -1).contiguous(), **cut)
    expected = torch.softmax(scores[0][kept].double(), -1) * len(tokens)
    counts = torch.bincount(tokens, minlength=12)[kept]
    assert int(counts.sum()) == len(tokens)
    # At most 11 degrees of freedom: 31.3 is exceeded once in a thousand.
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3


def test_low_temperature_takes_the_largest_score(operations: sampling.SamplingOperations) -> None:
    scores = random_scores(num_rows(operations, 20, 4), 2100, seed=2)
    cuts: tuple[dict[str, Any], ...] = ({}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.5})
    for cut in cuts:
        tokens = sample(operations, scores, temperature=GREEDY, **cut)
        assert torch.equal(tokens, scores.argmax(-1))


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.35}, 4),
        ({"top_k": 5, "top_p": 0.5}, 3),
        ({"top_k": 5, "top_p": 0.9}, 5),
    ],
)
def test_of_equal_scores_the_first_are_kept(
    operations: sampling.SamplingOperations, cut: dict[str, Any], kept: int
) -> None:
    scores = torch.zeros(num_rows(operations, 400, 15), 10)
    scores[:, ::2] = -0.0
    tokens = sample(operations, scores, **cut)
    assert set(tokens.tolist()) == set(range(kept))


def test_top_p_takes_no_tie_that_top_k_left_out(operations: sampling.SamplingOperations) -> None:
    scores = torch.full((num_rows(operations, 200, 8), 12), 4.0)
    scores[:, 0] = 5.0
    tokens = sample(operations, scores, top_k=2, top_p=0.99)
    assert set(tokens.tolist()) == {0, 1}


def test_top_p_that_rounding_keeps_out_of_reach_takes_what_top_k_kept(
    operations: sampling.SamplingOperations,
) -> None:
    """A thread adds up tokens 0 and 2,048 in float32: in about half of the rows, to too little."""
    second = 4.0 - torch.arange(8)[:, None] / 100
    scores = (second - 0.1).repeat(1, 2100)
    scores[:, 0] = 6.0
    scores[:, 2048] = second[:, 0]
    tokens = sample(operations, scores, top_k=2, top_p=1 - 1e-9)
    assert set(tokens.tolist()) <= {0, 2048}


def test_of_equal_sums_the_smallest_token_is_taken(
    operations: sampling.SamplingOperations,
) -> None:
    scores = random_scores(1, 9_000, seed=4)
    scores[0, [1_027, 8_197]] = 20.0
    assert sample(operations, scores, temperature=1e-20).tolist() == [1_027]


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_the_least_temperature_takes_the_largest_score(
    operations: sampling.SamplingOperations, cut: dict[str, Any]
) -> None:
    scores = random_scores(num_rows(operations, 20, 2), 300, seed=6)
    tokens = sample(operations, scores, temperature=sampling.LEAST_TEMPERATURE, **cut)
    assert torch.equal(tokens, scores.argmax(dim=-1))


@pytest.mark.parametrize("native", [name for name in NAMES if name.startswith("cpu")])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1.0, 1e-40, 1e-310])
def test_native_sampling_survives_any_score_and_temperature(
    native: str, cut: dict[str, Any], temperature: float
) -> None:
    scores = random_scores(3, 300, seed=8)
    scores[0, 77] = math.inf
    scores[1] = math.nan
    infinite, nan, finite = sample(
        implementation(native), scores, temperature=temperature, **cut
    ).tolist()
    assert infinite == 77
    assert nan == sampling.NO_TOKEN
    assert 0 <= finite < 300


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_rows_with_nan_or_without_allowed_tokens_get_no_token(
    operations: sampling.SamplingOperations, cut: dict[str, Any]
) -> None:
    scores = random_scores(6, 37, seed=9)
    scores[0, 5] = math.nan
    scores[1] = -math.inf
    scores[2] = -math.inf
    scores[2, 36] = math.nan  # beyond the last full vector
    scores[3, 7], scores[3, 8] = math.inf, math.nan
    with np.errstate(invalid="ignore"):  # the interpreter of Triton computes with numpy
        tokens = sample(operations, scores, **cut)
    assert tokens[:4].tolist() == [sampling.NO_TOKEN] * 4
    assert torch.equal(tokens[4:], sample(implementation("reference"), scores, **cut)[4:])
    assert int(tokens[4:].min()) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("size", [1, 7, 2_047, 2_048, 2_049, 5_000, 6_144])
def test_the_largest_token_is_the_first_of_equal_ones(
    dtype: torch.dtype, rows: int, size: int
) -> None:
    random = torch.Generator().manual_seed(size)
    scores = torch.randint(-9, 9, (rows, size), generator=random).to(dtype)
    scores[-1] = -math.inf
    if rows > 1:
        scores[1, size - 1] = 100.0
        scores[2, size // 2 :] = 100.0
        scores[3, size // 3] = math.nan
        scores[4] = -math.inf
        scores[4, size * 2 // 3] = -1e30
    expected = [
        sampling.NO_TOKEN if math.isnan(sum(row)) or max(row) == -math.inf else row.index(max(row))
        for row in scores.tolist()
    ]
    assert sampling.largest_tokens(scores).tolist() == expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [9, 5_000])
def test_the_largest_token_is_found_in_full_precision(rows: int, size: int) -> None:
    scores = torch.ones(rows, size, dtype=torch.float64)
    scores[:, size - 2] += 1e-12
    assert sampling.largest_tokens(scores).tolist() == [size - 2] * rows


def test_banned_tokens_are_never_taken(operations: sampling.SamplingOperations) -> None:
    scores = random_scores(num_rows(operations, 300, 6), 600, seed=5)
    scores[:, 7:] = float("-inf")
    cuts: tuple[dict[str, Any], ...] = (
        *({}, {"top_k": 100}, {"top_p": 0.999}),
        {"top_k": 30, "min_p": 1e-6},
    )
    for cut in cuts:
        assert int(sample(operations, scores, **cut).max()) < 7


def test_rows_of_a_larger_step_are_chosen(operations: sampling.SamplingOperations) -> None:
    scores, device = random_scores(6, 1100, seed=6), device_of(operations)
    rows = torch.tensor([4, 1], device=device)
    truncation = Truncation(
        torch.tensor([1], device=device),
        torch.tensor([1], device=device),
        torch.ones(1, dtype=torch.float64, device=device),
        torch.zeros(1, dtype=torch.float64, device=device),
    )
    temperatures = torch.tensor([GREEDY, 5.0], dtype=torch.float64, device=device)
    keys = torch.tensor([1, 2], device=device)
    tokens = operations.sample(scores.to(device), rows, temperatures, keys, truncation)
    assert tokens.tolist() == scores[[4, 1]].argmax(-1).tolist()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocabulary=st.integers(1, 1300),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, 1300),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    is_coarse=st.booleans(),
)
def test_implementations_sample_the_same_tokens(
    seed: int,
    vocabulary: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    is_coarse: bool,
) -> None:
    scores = random_scores(3, vocabulary, seed)
    if is_coarse:  # many equal scores
        scores = (scores * 2).round() / 2
    found = [
        sample(
            implementation(name),
            scores,
            temperature=temperature,
            top_k=None if top_k is None else min(top_k, vocabulary),
            top_p=top_p,
            min_p=min_p,
            seed=seed,
        )
        for name in NAMES
    ]
    assert all(torch.equal(tokens, found[0]) for tokens in found)


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="one of reference, cpu, triton, got 'fast'"):
        sampling.implementation("fast")


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("cut", [*CUTS, {}, {"top_k": 20_000}, {"top_p": 0.999, "min_p": 1e-4}])
def test_large_vocabularies_give_the_tokens_of_the_reference(
    cut: dict[str, Any], spread: float
) -> None:
    scores = spread * random_scores(4, 30_011, seed=7)
    scores[:, ::7] = float("-inf")
    expected = sample(implementation("reference"), scores, temperature=0.8, **cut)
    for each in library.supported():
        found = sample(implementation(f"cpu-{each.name}"), scores, temperature=0.8, **cut)
        assert torch.equal(found, expected)
