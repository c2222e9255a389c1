"""What a call asks of the scheduler: how much room, sharing what, how soon.

Records only. Two of them, because they are known at different times and by different
people: a `Standing` follows from the program's graph and is weighed again whenever that
grows; a `Demand` follows from the encoded prompt and never changes.

Refuses to know text, ids and engines: a prefix is a key, and two prompts that start with the
same tokens under the same salt have the same keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

MAX_PREFIXES = 8
"""Boundaries of one prompt that placement looks at: the first half and the last half of it."""
MIN_PREFIX_TOKENS = 16
"""Boundaries that lie closer together than this are one."""


class Prefix(NamedTuple):
    """The tokens of a prompt up to a boundary between two of its segments."""

    key: bytes
    """Names these tokens, all from the start, under one salt."""
    num_tokens: int
    stays: bool = False
    """Whether its KV stays as evictable cache when the last call that reads it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The room that a call needs, and what of it may be shared."""

    program: str
    num_prompt: int
    num_output: int
    """Tokens at most."""
    prefixes: tuple[Prefix, ...] = ()
    """Shortest first."""
    group: str | None = None
    """Its task group, whose calls are finished when the last of them is."""
    is_strict: bool = False
    """Somebody waits for this call by itself, so every step that it takes part in counts."""
    is_waited: bool = True
    """Somebody waits for it, by itself or as one of a group."""
    home: str | None = None
    """Engine that keeps a context of the program which this prompt starts with."""
    num_home: int = 0
    """Tokens of that context which the prompt starts with."""

    @property
    def num_tokens(self) -> int:
        """What it may come to hold, if it shared nothing."""
        return self.num_prompt + self.num_output

    @property
    def num_own(self) -> int:
        """Of these, the ones behind the last boundary, which nobody shares."""
        return self.num_tokens - (self.prefixes[-1].num_tokens if self.prefixes else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a call is worth, and since when: all that its place in the queue follows from.

    Times are seconds on one monotonic clock.
    """

    came_s: float
    began_s: float
    """When its program began."""
    kind: Literal["latency", "throughput"] = "latency"
    depth: int = 0
    """Calls behind it on the longest way to an output."""
    priority: int = 0
    latest_s: float | None = None
    """When it has to start for every deadline behind it to be kept; None: there is none."""
    total_s: float = 0.0
    """How long its program takes if nobody else is there, as far as that is known."""
    attained_s: float = 0.0
    """Seconds that ended calls of its program ran on engines."""
    ahead_s: float = 0.0
    """Service that its tenant has had beyond its share; 0 for a tenant alone."""


def prefixes_of(
    ids: Sequence[int], cuts: Iterable[tuple[int, bool]], salt: str
) -> tuple[Prefix, ...]:
    """Name the prefixes of a prompt.

    Args:
        ids: the whole prompt.
        cuts: for every boundary, how many tokens lie before it and whether they stay cached.
        salt: whose cache it is; other salts give other keys.
    """
    far: list[tuple[int, bool]] = []
    for cut, stays in cuts:
        if cut >= (far[-1][0] if far else 0) + MIN_PREFIX_TOKENS:
            far.append((cut, stays))
    half = MAX_PREFIXES // 2
    chosen = far if len(far) <= MAX_PREFIXES else far[:half] + far[-half:]
    digest = blake2b(salt.encode(), digest_size=16, person=b"conure.prefix")
    found, begin = [], 0
    for cut, stays in chosen:
        digest.update(array("q", ids[begin:cut]).tobytes())
        found.append(Prefix(digest.copy().digest(), cut, stays))
        begin = cut
    return tuple(found)
