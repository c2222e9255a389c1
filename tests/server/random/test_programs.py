"""Concurrent random programs under cancellation and engine deaths: right texts, no leaks.

The fake engine's text is a function of the prompt, so every variable is known before the program
runs, regardless of sharing, preemption and recomputation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..inprocess import Program, ServerHarness, answer, expr, insert, server_harness, var

HEADS = (
    "The same beginning, long enough for several blocks of memory. " * 2,
    "Another beginning of a block or two, not more. ",
    "short ",
)
WORDS = (" and then ", "x", " the very same words once more, and again. ")


@dataclass
class Plan:
    """A program and the expected values of its variables."""

    nodes: list[Any] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)


def plan(rng: random.Random) -> Plan:
    """Return a random program with one input and up to 14 nodes."""
    made = Plan(values={"given": "I" * rng.randint(0, 30)})
    for number in range(rng.randint(1, 14)):
        name = f"n{number}"
        if rng.random() < 0.2:
            one, two = (rng.choice(list(made.values)) for _ in range(2))
            joined = f"{made.values[one]}+{made.values[two]}"
            if len(joined) < 300:
                made.nodes.append(expr(name, {"concat": [var(one), "+", var(two)]}))
                made.values[name] = joined
        else:
            add_call(made, name, rng)
    rng.shuffle(made.nodes)
    return made


def add_call(made: Plan, name: str, rng: random.Random) -> None:
    """Add a prompt of one to three outputs."""
    text = rng.choice(HEADS)
    segments: list[Any] = [{"text": text}]
    for output in range(rng.choice((1, 1, 2, 3))):
        for _ in range(rng.randint(0, 2)):
            if rng.random() < 0.5:
                variable = rng.choice(list(made.values))
                segments.append(insert(variable))
                text += made.values[variable]
            else:
                segments.append({"text": rng.choice(WORDS)})
                text += segments[-1]["text"]
        most = rng.choice((1, 5, 64))
        segments.append({"output": f"{name}_{output}", "max_tokens": most})
        made.values[f"{name}_{output}"] = answer(text)[:most]
        text += made.values[f"{name}_{output}"]
    made.nodes.append({"id": name, "op": "generate", "prompt": segments})


async def disturb(harness: ServerHarness, programs: list[Program], rng: random.Random) -> set[str]:
    """Cancel some programs or kill engines; return the ids of cancelled programs."""
    what = rng.choice(("nothing", "cancel", "kill"))
    for _ in range(rng.randint(0, 40)):
        await asyncio.sleep(0)
    if what == "cancel":
        chosen = [program for program in programs if rng.random() < 0.5]
        await asyncio.gather(*(program.cancel() for program in chosen))
        return {program.id for program in chosen}
    if what == "kill":
        assert harness.executor.services.fleet is not None
        for engine in list(harness.executor.services.fleet.engines.values()):
            if engine._process is not None and rng.random() < 0.6:
                with contextlib.suppress(ProcessLookupError):  # killed before, not restarted yet
                    os.kill(engine._process.pid, signal.SIGKILL)
    return set()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two engines": {"num_engines": 2, "time_per_output_token": 0.0003},
    "little memory": {"num_blocks": 48, "context_len": 768, "max_sequences": 4, "step_tokens": 48},
}


@pytest.mark.parametrize("settings", SETTINGS)
async def test_all_texts_are_right_and_nothing_leaks(tmp_path: Path, settings: str) -> None:
    rng = random.Random(settings)
    async with server_harness(tmp_path, **SETTINGS[settings]) as harness:
        for _ in range(20):
            plans = [plan(rng) for _ in range(rng.randint(1, 6))]
            programs = [
                await harness.submit(
                    made.nodes,
                    inputs={"given": made.values["given"]},
                    outputs=[list(made.values)[-1]],
                )
                for made in plans
            ]
            cancelled = await disturb(harness, programs, rng)
            for made, program in zip(plans, programs, strict=True):
                status = await program.end()
                if status.status == "cancelled":
                    assert program.id in cancelled
                    continue
                values = {name: variable.value for name, variable in status.variables.items()}
                assert values == made.values
            assert set(await harness.num_held()) <= {(0, 0)}
            assert harness.executor.services.scheduler.num_waiting == 0
            assert harness.executor.services.call_quota.num_calls == 0
