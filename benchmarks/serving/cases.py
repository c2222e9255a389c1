"""The requests of a benchmark round, and the share of their prompts that is common.

`rounds` yields the workload of a server:

    shared cold     one new prefix, different suffixes
    shared warm     the same prefix again, other suffixes
    unshared short  nothing in common
    unshared long   nothing in common, prompts as long as the shared ones

`small_rounds` yields what a single computation costs:

    decode alone      one short prompt
    decode together   several short prompts, nothing in common
    prefill           one long prompt and one token

Prompts are ids of printable bytes, generated from a seed, so that they are the same tokens when
sent as text to a byte tokenizer. No two rounds have a prompt in common.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

LETTERS = range(32, 127)
SHORT = 16
"""Tokens of a prompt that costs next to nothing."""


class RequestBatch(NamedTuple):
    """Requests that arrive together."""

    name: str
    prompts: list[list[int]]
    max_tokens: int
    num_prefix: int
    """Leading tokens that all prompts share."""
    is_warm: bool
    """Whether the prefix was requested before."""

    @property
    def num_output(self) -> int:
        """Generated tokens of all requests."""
        return len(self.prompts) * self.max_tokens

    @property
    def num_distinct(self) -> int:
        """Prompt tokens that must be computed, each counted once."""
        own = sum(len(prompt) - self.num_prefix for prompt in self.prompts)
        return own + (0 if self.is_warm else self.num_prefix)


def rounds(
    seed: int, *, requests: int, prefix: int, suffix: int, short: int, output: int
) -> Iterator[list[RequestBatch]]:
    """Yield the cases of each round; lengths are in tokens."""
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return rng.choices(LETTERS, k=length)

    while True:
        shared = draw(prefix)
        yield [
            RequestBatch(name, prompts, output, num_prefix, is_warm=name == "shared warm")
            for name, prompts, num_prefix in (
                ("shared cold", [shared + draw(suffix) for _ in range(requests)], prefix),
                ("shared warm", [shared + draw(suffix) for _ in range(requests)], prefix),
                ("unshared short", [draw(short) for _ in range(requests)], 0),
                ("unshared long", [draw(prefix + suffix) for _ in range(requests)], 0),
            )
        ]


def small_rounds(
    seed: int, *, requests: int, prompt: int, output: int
) -> Iterator[list[RequestBatch]]:
    """Yield the cases of each round; lengths are in tokens."""
    rng = random.Random(seed)
    while True:
        yield [
            RequestBatch(
                name, [rng.choices(LETTERS, k=length) for _ in range(num)], num_output, 0, False
            )
            for name, num, length, num_output in (
                ("decode alone", 1, SHORT, output),
                ("decode together", requests, SHORT, output),
                ("prefill", 1, prompt, 1),
            )
        ]
