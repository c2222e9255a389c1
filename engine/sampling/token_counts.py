"""Token counts of a context, updated as it grows. Penalties depend on them.

Counting from scratch would make every step linear in the length of the context.

Out of scope: the penalties themselves.

Invariants: each token is counted once. Counted tokens must not change, which holds while one
Generate runs.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from ..protocol import SamplingParams


class TokenCounts:
    """The distinct tokens of a context, and the counts of those that one Generate produced."""

    def __init__(self, num_prompt: int) -> None:
        """Start with no token counted. Tokens before `num_prompt` were not generated."""
        self.generated: Counter[int] = Counter()
        """How often each token was generated."""
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._known: set[int] = set()
        self.distinct: array[int] = array("q")
        """All tokens of the context, each once."""

    def update(self, ids: Sequence[int]) -> None:
        """Count the tokens appended since the last update; `ids` are all of the context."""
        for token in ids[self._num_counted :]:
            if token not in self._known:
                self._known.add(token)
                self.distinct.append(token)
        self.generated.update(ids[max(self._num_counted, self._num_prompt) :])
        self._num_counted = len(ids)


def has_penalty(sampling: SamplingParams) -> bool:
    """Return whether logits depend on the preceding tokens."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
