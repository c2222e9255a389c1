"""Records that describe a call to the scheduler: the tokens it needs, what it shares, and how
urgent it is.

There are two records because they are known at different times: `PriorityInputs` follow from the
program's graph and are recomputed whenever the graph grows; a `ResourceRequest` follows from the
encoded prompt and never changes.

Out of scope: text, token ids and engines. A prefix is represented by a key: two prompts that start
with the same tokens under the same salt have the same keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from msgspec import Struct

MAX_PREFIXES = 8
"""Maximum number of boundaries of one prompt that placement considers: half from the start, half
from the end."""
MIN_PREFIX_TOKENS = 16
"""Boundaries closer together than this count as one."""


class PromptPrefix(NamedTuple):
    """The tokens of a prompt up to one of its segment boundaries."""

    key: bytes
    """Hash of all tokens from the start, under one salt."""
    num_tokens: int
    is_expected: bool = False
    """Whether later programs are expected to read it; it then stays cached for longer."""


class ResourceRequest(Struct, frozen=True, kw_only=True):
    """The tokens that a call needs, and which of them it may share."""

    program: str
    node: str = ""
    """Id of the call's node, for reports."""
    num_prompt: int
    num_output: int
    """Maximum number of output tokens."""
    prefixes: tuple[PromptPrefix, ...] = ()
    """Shortest first."""
    group: str | None = None
    """The call's task group. A group is finished when its last call is."""
    is_latency_critical: bool = False
    """Whether a reader waits for this call itself, so that the duration of every step it takes part
    in counts."""
    is_latency_sensitive: bool = True
    """Whether a reader waits for this call, alone or as a member of its group."""
    opens_program: bool = False
    """Whether the program has several calls and none of them has started."""
    num_remaining_steps: int = 0
    """Decode steps from the start of this call to the end of its program, at most."""
    affinity_engine: str | None = None
    """The engine that holds a context of the program which is a prefix of this prompt."""
    num_affinity_tokens: int = 0
    """Length of that prefix in tokens."""

    @property
    def num_tokens(self) -> int:
        """Return the maximum number of tokens that the call holds if it shares nothing."""
        return self.num_prompt + self.num_output

    @property
    def num_unshared_tokens(self) -> int:
        """Return the number of tokens after the last boundary, which no other call shares."""
        return self.num_tokens - (self.prefixes[-1].num_tokens if self.prefixes else 0)


class PriorityInputs(Struct, frozen=True, kw_only=True):
    """Everything that determines a call's rank.

    Times are seconds on one monotonic clock.
    """

    arrived_at_s: float
    program_started_at_s: float
    """When the call's program started."""
    kind: Literal["latency", "throughput"] = "latency"
    depth: int = 0
    """Number of calls after this one on the longest path to an output."""
    priority: int = 0
    latest_start_s: float | None = None
    """Latest start that still meets every deadline that depends on the call; None without a
    deadline."""
    total_s: float = 0.0
    """Estimated duration of the whole program on idle engines, as far as known."""
    remaining_work_s: float = 0.0
    """Estimated engine time of all calls of the program that have not ended."""
    attained_s: float = 0.0
    """Seconds that ended calls of the program ran on engines."""
    tenant_overuse_s: float = 0.0
    """Service that the tenant received beyond its fair share; 0 for a tenant alone."""


def hash_prefixes(
    ids: Sequence[int], boundaries: Iterable[tuple[int, bool]], salt: str
) -> tuple[PromptPrefix, ...]:
    """Return the keyed prefixes of a prompt.

    Args:
        ids: the whole prompt.
        boundaries: for each boundary, the number of tokens before it, and whether later programs
            are expected to read them.
        salt: the tenant's key. Different salts give different keys.
    """
    spaced: list[tuple[int, bool]] = []
    for end, is_expected in boundaries:
        if end >= (spaced[-1][0] if spaced else 0) + MIN_PREFIX_TOKENS:
            spaced.append((end, is_expected))
    half = MAX_PREFIXES // 2
    chosen = spaced if len(spaced) <= MAX_PREFIXES else spaced[:half] + spaced[-half:]
    digest = blake2b(salt.encode(), digest_size=16, person=b"conure.prefix")
    prefixes, begin = [], 0
    for end, is_expected in chosen:
        digest.update(array("q", ids[begin:end]).tobytes())
        prefixes.append(PromptPrefix(digest.digest(), end, is_expected))
        begin = end
    return tuple(prefixes)
