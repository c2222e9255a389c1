"""The mutations of the fuzzer."""

from __future__ import annotations

import copy
import json
import random

from .mutations import ODD_VALUES, mutated, seeds


def test_mutations_of_one_body_do_not_change_the_next_one() -> None:
    documents, odd_values = seeds(), copy.deepcopy(ODD_VALUES)
    rng = random.Random(1)
    for _ in range(3_000):
        json.dumps(mutated(rng.choice(documents), rng, others=documents))
    assert documents == seeds()
    assert odd_values == ODD_VALUES
