"""What changes the logits of one Generate: token counts, and biases of tokens.

Token counts are updated as the context grows; penalties depend on them. Counting from scratch would
make every step linear in the length of the context. Arrays, because a step converts them into
arrays of its own.

Out of scope: the penalties themselves.

Invariants: each token is counted once. Counted tokens must not change, which holds while one
Generate runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from ..protocol import SamplingParams


class TokenCounts:
    """The distinct tokens of a context, and the counts of those that one Generate produced."""

    def __init__(self, num_prompt: int) -> None:
        """Start with no token counted. Tokens before `num_prompt` were not generated."""
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._known: set[int] = set()
        self.distinct: array[int] = array("q")
        """All tokens of the context, each once."""
        self._places: dict[int, int] = {}
        """By generated token: its index in the two arrays."""
        self.generated: array[int] = array("q")
        """All generated tokens, each once."""
        self.counts: array[int] = array("q")
        """How often each token of `generated` was generated."""

    def update(self, ids: Sequence[int]) -> None:
        """Count the tokens appended since the last update; `ids` are all of the context."""
        for token in ids[self._num_counted :]:
            if token not in self._known:
                self._known.add(token)
                self.distinct.append(token)
        for token in ids[max(self._num_counted, self._num_prompt) :]:
            place = self._places.setdefault(token, len(self.generated))
            if place == len(self.generated):
                self.generated.append(token)
                self.counts.append(0)
            self.counts[place] += 1
        self._num_counted = len(ids)


class TokenBiases(NamedTuple):
    """Amounts to add to the logits of tokens, each token once."""

    tokens: array[int]
    amounts: array[float]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Self:
        """Make biases of pairs of a token and an amount; amounts of one token are added."""
        sums: dict[int, float] = {}
        for token, amount in pairs:
            sums[token] = sums.get(token, 0.0) + amount
        return cls(array("q", sums.keys()), array("d", sums.values()))


def has_penalty(sampling: SamplingParams) -> bool:
    """Return whether logits depend on the preceding tokens."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
