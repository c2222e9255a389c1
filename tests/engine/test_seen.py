"""What penalties go by is counted once for each token, and comes to the same."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import torch

from conure.engine.api import Sampling
from conure.engine.runner import Row
from conure.engine.sampling import sample
from conure.engine.seen import Seen, has_penalty


def test_tokens_counted_as_they_come_are_those_counted_at_once() -> None:
    chance = random.Random(1)
    ids = [chance.randrange(9) for _ in range(20)]
    seen = Seen(num_prompt=12)
    for _ in range(10):
        seen.count(ids)
        assert sorted(seen.distinct) == sorted(set(ids))
        assert seen.generated == Counter(ids[12:])
        ids += [chance.randrange(30) for _ in range(chance.randrange(4))]


def test_a_context_that_is_counted_along_the_way_is_penalised_as_any() -> None:
    chance = np.random.default_rng(2)
    sampling = Sampling(
        99, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.4, temperature=1.0
    )
    ids, seen = [3, 5, 5], Seen(3)
    for _ in range(40):
        logits = torch.from_numpy(chance.normal(size=(1, 12)).astype(np.float32))
        rows = [
            Row(0, ids, len(ids) - 1, 1, [], sampling, num_prompt=3, seen=counted)
            for counted in (seen, None)
        ]
        along, anew = (sample(logits.clone(), [row], eos_ids=[0]) for row in rows)
        assert along == anew
        ids.append(along[0])


def test_any_penalty_is_one() -> None:
    assert not has_penalty(Sampling(9, temperature=1.0, logit_bias=((1, 2.0),)))
    assert has_penalty(Sampling(9, repetition_penalty=1.1))
    assert has_penalty(Sampling(9, presence_penalty=-0.1))
    assert has_penalty(Sampling(9, frequency_penalty=0.1))
