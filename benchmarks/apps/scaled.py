"""The six workloads at lengths that a small model on two cores ends in seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .programs import Plan, chain, coding, map_reduce, single

CONTEXT_LEN = 2_048
"""Tokens that hold any prompt here with its output."""


class Sent(NamedTuple):
    """A program, and when its client begins."""

    plan: Plan
    at_s: float
    kind: str = "app"
    """Programs of one kind are averaged."""


def chain_summary(draw: random.Random) -> Iterator[Sent]:
    """Twelve chunks, one after another."""
    yield Sent(chain(12, 256, 24), 0.0)


def map_reduce_summary(draw: random.Random) -> Iterator[Sent]:
    """Eight chunks at once, and a summary of their summaries."""
    yield Sent(map_reduce(8, 384, 24), 0.0)


def shared_system_prompt(draw: random.Random) -> Iterator[Sent]:
    """Twelve users of one long system prompt, all at once."""
    for user in range(12):
        yield Sent(single("copilot", 1_024, draw.randint(20, 60), 32, user), 0.0)


GPTS = {
    "productivity": (930, 8, 88),
    "image": (140, 8, 11),
    "code": (212, 8, 79),
    "data": (254, 8, 52),
}
"""A lengths' eighth of the paper's: system prompt, question, output."""


def gpts(draw: random.Random) -> Iterator[Sent]:
    """Four applications with system prompts of their own, at random times."""
    at_s = 0.0
    for user in range(20):
        at_s += draw.expovariate(10)
        name = draw.choice(list(GPTS))
        yield Sent(single(name, *GPTS[name], user), at_s)


def multi_agent_coding(draw: random.Random) -> Iterator[Sent]:
    """Four files, designed, written, and reviewed and revised twice."""
    yield Sent(coding(4, 2, scale=8), 0.0)


def mixed(draw: random.Random) -> Iterator[Sent]:
    """Chats beside a burst of map-reduce."""
    for user in range(10):
        prompt, output = draw.randint(40, 200), draw.randint(30, 90)
        yield Sent(single("", 0, prompt, output, user), user * 0.1, "chat")
    for burst in range(3):
        yield Sent(map_reduce(8, 256, 24, burst), 0.2 + 0.05 * burst, "map-reduce")


SCALED: dict[str, Callable[[random.Random], Iterator[Sent]]] = {
    "chain summary": chain_summary,
    "map-reduce summary": map_reduce_summary,
    "shared system prompt": shared_system_prompt,
    "four GPTs applications": gpts,
    "multi-agent coding": multi_agent_coding,
    "mixed chat and map-reduce": mixed,
}


def workload(name: str, seed: int) -> list[Sent]:
    """What one workload sends under a seed."""
    return list(SCALED[name](random.Random(f"{name} {seed}")))
