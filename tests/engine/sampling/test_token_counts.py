"""Incremental token counts equal full counts."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import torch

from conure.engine.protocol import SamplingParams
from conure.engine.runner.base import ScheduledSequence
from conure.engine.sampling.batch import sample
from conure.engine.sampling.token_counts import TokenCounts, has_penalty


def test_incremental_counts_equal_a_full_count() -> None:
    chance = random.Random(1)
    ids = [chance.randrange(9) for _ in range(20)]
    seen = TokenCounts(num_prompt=12)
    for _ in range(10):
        seen.update(ids)
        assert sorted(seen.distinct) == sorted(set(ids))
        assert dict(zip(seen.generated, seen.counts, strict=True)) == Counter(ids[12:])
        ids += [chance.randrange(30) for _ in range(chance.randrange(4))]


def test_incremental_counts_give_the_same_penalties() -> None:
    chance = np.random.default_rng(2)
    sampling = SamplingParams(
        99, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.4, temperature=1.0
    )
    ids, seen = [3, 5, 5], TokenCounts(3)
    for _ in range(40):
        logits = torch.from_numpy(chance.normal(size=(1, 12)).astype(np.float32))
        rows = [
            ScheduledSequence(
                0, ids, len(ids) - 1, 1, [], sampling, num_prompt=3, token_counts=counted
            )
            for counted in (seen, None)
        ]
        along, anew = (sample(logits.clone(), [row], eos_ids=[0]) for row in rows)
        assert along == anew
        ids.append(along[0])


def test_has_penalty_detects_each_penalty() -> None:
    assert not has_penalty(SamplingParams(9, temperature=1.0, logit_bias=((1, 2.0),)))
    assert has_penalty(SamplingParams(9, repetition_penalty=1.1))
    assert has_penalty(SamplingParams(9, presence_penalty=-0.1))
    assert has_penalty(SamplingParams(9, frequency_penalty=0.1))
