"""The best order in which programs can begin, found with knowledge of all lengths.

*Found*: simulated annealing over the order of programs and over pauses before they begin. Calls
run without preemption, within the scheduler's forecast of memory. The search returns the mean of a
real schedule, so the optimal mean is at most this value.

*Bound*: no schedule of independent programs has a smaller mean. Every program takes from the engine
the time of its prompt tokens, except for tokens that another program computes, and its share of
decode steps: the fraction of the sequence slots or of the KV memory, whichever is larger. With
preemption and without any other limit, the program with the least remaining time first has the
smallest mean (Schrage, 1968). A program alone takes as long as the policy's schedule of it.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from apps.scaled_workloads import ScheduledProgram
from conure.server.scheduling.holds import Opening, ProgramsAhead
from conure.server.scheduling.policy import ConurePolicy, Rank
from conure.server.scheduling.request import PriorityInputs
from conure.server.scheduling.service_time import ServiceTimeEstimator
from simulation.stepwise_engine import StepLimits

from .sides import BLOCK, SimulatedMachine, arrival_s, whole

PAUSES_S = (-0.2, -0.1, -0.05, 0.03, 0.06, 0.1, 0.2, 0.3)
START_TEMPERATURE = 0.03
"""Accepted increase of the mean, relative, at the start of the search."""


class Schedule(NamedTuple):
    """In which order programs begin, and how much later than they arrive."""

    order: list[int]
    pauses_s: list[float]
    holds: bool
    """Whether programs are also held by the rule of the policy."""


class _Ordered(ConurePolicy):
    """The policy with a given order of programs."""

    def __init__(self, places: dict[int, int], *, holds: bool) -> None:
        self._places = places
        self._holds = holds

    def rank(self, inputs: PriorityInputs) -> Rank:
        """Rank by the place of the program, then by depth."""
        place = self._places[_key(inputs.program_started_at_s)]
        return Rank(place * 10.0 - inputs.depth * 1e-3, "")

    def holds(
        self, opening: Opening, ahead: ProgramsAhead, service_time: ServiceTimeEstimator
    ) -> bool:
        """See `ConurePolicy.holds`."""
        return self._holds and super().holds(opening, ahead, service_time)


def _key(at_s: float) -> int:
    return round(at_s * 1e9)


def took_s(
    sent: Sequence[ScheduledProgram], machine: SimulatedMachine, plan: Schedule
) -> list[float]:
    """Return the durations of programs under a schedule."""
    places = {
        _key(arrival_s(sent, number) + plan.pauses_s[number]): place
        for place, number in enumerate(plan.order)
    }
    return whole(sent, machine, _Ordered(places, holds=plan.holds), plan.pauses_s).took_s


def search(
    sent: Sequence[ScheduledProgram], machine: SimulatedMachine, num_trials: int, seed: int = 0
) -> list[float]:
    """Return the durations with the smallest mean that was found."""
    draw = random.Random(seed)
    best = whole(sent, machine).took_s
    by_end = sorted((each.at_s + best[number], number) for number, each in enumerate(sent))
    plan = Schedule([number for _, number in by_end], [0.0] * len(sent), holds=True)
    mean_s = statistics.fmean(took_s(sent, machine, plan))
    for trial in range(num_trials):
        other = _changed(plan, draw)
        found = took_s(sent, machine, other)
        worse = statistics.fmean(found) / mean_s - 1
        heat = START_TEMPERATURE * (1 - trial / num_trials)
        if worse < 0 or draw.random() < math.exp(-worse / heat):
            plan, mean_s = other, statistics.fmean(found)
        if statistics.fmean(found) < statistics.fmean(best):
            best = found
    return best


def _changed(plan: Schedule, draw: random.Random) -> Schedule:
    order, pauses_s = list(plan.order), list(plan.pauses_s)
    choice, places = draw.random(), range(len(order))
    if choice < 0.35:
        one, other = draw.choices(places, k=2)
        order[one], order[other] = order[other], order[one]
    elif choice < 0.65:
        order.insert(draw.choice(places), order.pop(draw.choice(places)))
    elif choice < 0.95:
        number = draw.choice(places)
        longer_s = max(pauses_s[number] + draw.choice(PAUSES_S), 0.0)
        pauses_s[number] = 0.0 if draw.random() < 0.4 else longer_s
    else:
        return plan._replace(holds=not plan.holds)
    return Schedule(order, pauses_s, plan.holds)


def bound_s(sent: Sequence[ScheduledProgram], machine: SimulatedMachine) -> float:
    """Return a mean duration that no schedule can beat."""
    free = machine._replace(num_blocks=10**6, join_s=0.0)
    alone = [whole([each._replace(at_s=0.0)], free).took_s[0] for each in sent]
    prefixes = _shared_prefixes(sent)
    work = [_engine_s(each, machine, prefixes) for each in sent]
    ends = _ends_by_remaining_work([each.at_s for each in sent], work)
    shared = [end - each.at_s for end, each in zip(ends, sent, strict=True)]
    return max(statistics.fmean(alone), statistics.fmean(shared))


def _shared_prefixes(sent: Sequence[ScheduledProgram]) -> set[bytes]:
    """Return the prefixes that several programs have, which any one of them may compute."""
    programs = Counter(
        digest
        for each in sent
        for digest in {
            boundary.digest
            for call in each.plan.blueprint.calls.values()
            for boundary in call.boundaries
        }
    )
    return {digest for digest, count in programs.items() if count > 1}


def _engine_s(
    sent: ScheduledProgram, machine: SimulatedMachine, shared: AbstractSet[bytes]
) -> float:
    """Return the least time that a program takes from an engine, even if its steps are full.

    Args:
        sent: the program.
        machine: the engine.
        shared: prefixes that other programs may have computed.
    """
    cost, seen = machine.cost, set(shared)
    num_prompt = num_output = held_blocks = 0
    for call in sent.plan.blueprint.calls.values():
        num_shared = 0
        for each in call.boundaries:
            if each.num_tokens <= call.num_prompt and each.digest in seen:
                num_shared = each.num_tokens
            seen.add(each.digest)
        num_prompt += call.num_prompt - num_shared
        num_output += call.num_output
        own = call.num_prompt - num_shared + call.num_output / 2
        held_blocks += math.floor(own * call.num_output / BLOCK)
    shares = max(num_output / StepLimits().num_sequences, held_blocks / machine.num_blocks)
    return num_prompt * cost.prompt_token_s + num_output * cost.sequence_s + shares * cost.step_s


def _ends_by_remaining_work(arrivals: Sequence[float], work: Sequence[float]) -> list[float]:
    """Return when jobs end on one machine that always runs the one with the least work left."""
    ends = [0.0] * len(work)
    waiting: list[tuple[float, int]] = []
    coming = sorted((at_s, number) for number, at_s in enumerate(arrivals))
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            number = coming.pop(0)[1]
            heapq.heappush(waiting, (work[number], number))
        left, number = heapq.heappop(waiting)
        until = coming[0][0] if coming else math.inf
        if now + left <= until:
            now += left
            ends[number] = now
        else:
            heapq.heappush(waiting, (left - (until - now), number))
            now = until
    return ends
