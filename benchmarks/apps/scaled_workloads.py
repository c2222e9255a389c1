"""The six workloads of the paper, scaled down: a small model on two cores takes seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .programs import AppPlan, chain, coding, map_reduce, single

CONTEXT_LEN = 2_048
"""Context length that fits any prompt here with its output."""


class ScheduledProgram(NamedTuple):
    """A program and the time at which its client submits it."""

    plan: AppPlan
    at_s: float
    kind: str = "app"
    """Results are averaged separately for each kind."""


def chain_summary(draw: random.Random) -> Iterator[ScheduledProgram]:
    """Twelve chunks, one after another."""
    yield ScheduledProgram(chain(12, 256, 24), 0.0)


def map_reduce_summary(draw: random.Random) -> Iterator[ScheduledProgram]:
    """Eight chunks in parallel, and a summary of their summaries."""
    yield ScheduledProgram(map_reduce(8, 384, 24), 0.0)


def shared_system_prompt(draw: random.Random) -> Iterator[ScheduledProgram]:
    """Twelve users of one long system prompt, all at once."""
    for user in range(12):
        yield ScheduledProgram(single("copilot", 1_024, draw.randint(20, 60), 32, user), 0.0)


GPTS = {
    "productivity": (930, 8, 88),
    "image": (140, 8, 11),
    "code": (212, 8, 79),
    "data": (254, 8, 52),
}
"""Tokens of system prompt, question and output: an eighth of the paper's lengths."""


def gpts(draw: random.Random) -> Iterator[ScheduledProgram]:
    """Four applications with different system prompts, at random times."""
    at_s = 0.0
    for user in range(20):
        at_s += draw.expovariate(10)
        name = draw.choice(list(GPTS))
        yield ScheduledProgram(single(name, *GPTS[name], user), at_s)


def multi_agent_coding(draw: random.Random) -> Iterator[ScheduledProgram]:
    """Four files, designed, written, and twice reviewed and revised."""
    yield ScheduledProgram(coding(4, 2, scale=8), 0.0)


def mixed(draw: random.Random) -> Iterator[ScheduledProgram]:
    """Chats during a burst of map-reduce applications."""
    for user in range(10):
        prompt, output = draw.randint(40, 200), draw.randint(30, 90)
        yield ScheduledProgram(single("", 0, prompt, output, user), user * 0.1, "chat")
    for burst in range(3):
        yield ScheduledProgram(map_reduce(8, 256, 24, burst), 0.2 + 0.05 * burst, "map-reduce")


SCALED: dict[str, Callable[[random.Random], Iterator[ScheduledProgram]]] = {
    "chain summary": chain_summary,
    "map-reduce summary": map_reduce_summary,
    "shared system prompt": shared_system_prompt,
    "four GPTs applications": gpts,
    "multi-agent coding": multi_agent_coding,
    "mixed chat and map-reduce": mixed,
}


def workload(name: str, seed: int) -> list[ScheduledProgram]:
    """Return the programs of a workload for a seed."""
    return list(SCALED[name](random.Random(f"{name} {seed}")))


def at_once(name: str, seed: int, number: int) -> list[ScheduledProgram]:
    """Return a workload for several users at once, with random lengths and texts for each."""
    return [
        sent._replace(plan=sent.plan.copy(user))
        for user in range(number)
        for sent in workload(name, seed * number + user)
    ]
