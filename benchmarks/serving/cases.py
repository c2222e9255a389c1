"""What is asked: rounds of prompts that come at once, and how much of them is shared.

    shared cold     one prefix that nobody has seen, a suffix of each request's own
    shared warm     the same prefix again, other suffixes
    unshared short  nothing in common
    unshared long   nothing in common, prompts as long as the shared ones

Prompts are ids of printable bytes, drawn from a seed: as text they are the same tokens to a
tokenizer of bytes. Kept true: a round never meets a prompt of another round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

LETTERS = range(32, 127)


class Case(NamedTuple):
    """Prompts that come at once."""

    name: str
    prompts: list[list[int]]
    max_tokens: int
    num_prefix: int
    """Leading tokens that all prompts share."""
    is_warm: bool
    """The prefix was asked before."""

    @property
    def num_output(self) -> int:
        """Tokens that are generated in all."""
        return len(self.prompts) * self.max_tokens

    @property
    def num_distinct(self) -> int:
        """Prompt tokens that have to be computed, each once."""
        own = sum(len(prompt) - self.num_prefix for prompt in self.prompts)
        return own + (0 if self.is_warm else self.num_prefix)


def rounds(
    seed: int, *, requests: int, prefix: int, suffix: int, short: int, output: int
) -> Iterator[list[Case]]:
    """Yield the cases of one round after another; lengths are in tokens."""
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return rng.choices(LETTERS, k=length)

    while True:
        shared = draw(prefix)
        yield [
            Case(name, prompts, output, num_prefix, is_warm=name == "shared warm")
            for name, prompts, num_prefix in (
                ("shared cold", [shared + draw(suffix) for _ in range(requests)], prefix),
                ("shared warm", [shared + draw(suffix) for _ in range(requests)], prefix),
                ("unshared short", [draw(short) for _ in range(requests)], 0),
                ("unshared long", [draw(prefix + suffix) for _ in range(requests)], 0),
            )
        ]
