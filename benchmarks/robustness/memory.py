"""KV memory of a simulated run: as it was held, without sharing, and without lifetimes.

The three sums are over the same calls at the same times. *Shared*: a prefix that several running
calls read counts once. *Unshared*: every call holds its whole prompt. *Kept*: what a call held
stays until its program ends, as in a server without the graph, which cannot find the last reader;
prefixes still count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from conure.server.scheduling.request import ResourceRequest
from simulation.simulation import Simulation


class MemoryUse(NamedTuple):
    """Tokens that are held over time."""

    peak: int
    token_seconds: float


class MemoryReport(NamedTuple):
    """The memory of one run."""

    shared: MemoryUse
    unshared: MemoryUse
    kept: MemoryUse


class _Span(NamedTuple):
    began_s: float
    ended_s: float
    pieces: list[tuple[Hashable, int]]
    """Names and lengths in tokens; a name counts once at any time."""


def measure(simulation: Simulation) -> MemoryReport:
    """Return the memory of a simulation that has run."""
    shared, unshared, kept = [], [], []
    for number, call in enumerate(simulation.calls):
        pieces = _pieces(call.request, number)
        ended_s = simulation.outcomes[call.program].ended_s
        whole: list[tuple[Hashable, int]] = [(number, call.request.num_tokens)]
        shared.append(_Span(call.started_s, call.ended_s, pieces))
        unshared.append(_Span(call.started_s, call.ended_s, whole))
        kept.append(_Span(call.started_s, ended_s, pieces))
    return MemoryReport(_use(shared), _use(unshared), _use(kept))


def _pieces(request: ResourceRequest, number: int) -> list[tuple[Hashable, int]]:
    pieces: list[tuple[Hashable, int]] = []
    end = 0
    for prefix in request.prefixes:
        pieces.append((prefix.key, prefix.num_tokens - end))
        end = prefix.num_tokens
    pieces.append((number, request.num_tokens - end))
    return pieces


def _use(spans: Iterable[_Span]) -> MemoryUse:
    changes = [
        change
        for span in spans
        for change in ((span.began_s, 1, span.pieces), (span.ended_s, -1, span.pieces))
    ]
    changes.sort(key=lambda change: change[:2])
    num_readers: Counter[Hashable] = Counter()
    held, peak, total, last_s = 0, 0, 0.0, 0.0
    for at_s, sign, pieces in changes:
        total += held * (at_s - last_s)
        last_s = at_s
        for name, num_tokens in pieces:
            before = num_readers[name]
            num_readers[name] += sign
            if not before or not num_readers[name]:
                held += sign * num_tokens
        peak = max(peak, held)
    assert held == 0, "memory that is never released"
    return MemoryUse(peak, total)
