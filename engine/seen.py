"""Which tokens a context has, counted as it grows: what penalties go by.

Counting anew would take each step as long as the context is.

Knows ids; refuses to know what a penalty makes of them. Kept true: each token is counted once, so
what was counted has to stay what it was, as it does while one Generate lasts.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from .api import Sampling


class Seen:
    """The tokens of a context, and how often those came that one Generate made."""

    def __init__(self, num_prompt: int) -> None:
        """Begin with nothing counted; what stands before `num_prompt` was not generated."""
        self.generated: Counter[int] = Counter()
        """How often each token was generated."""
        self._num_prompt = num_prompt
        self._end = 0
        self._known: set[int] = set()
        self.distinct: array[int] = array("q")
        """All tokens that the context has, each once."""

    def count(self, ids: Sequence[int]) -> None:
        """Take in what was appended since; `ids` are all tokens of the context."""
        for token in ids[self._end :]:
            if token not in self._known:
                self._known.add(token)
                self.distinct.append(token)
        self.generated.update(ids[max(self._end, self._num_prompt) :])
        self._end = len(ids)


def has_penalty(sampling: Sampling) -> bool:
    """Say whether logits depend on the tokens before."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
