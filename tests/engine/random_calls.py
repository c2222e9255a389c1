"""Random calls on an engine, and what they return."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from conure.engine import protocol
from conure.engine.core.engine import EngineCore
from conure.engine.runner.base import Runner


@dataclass
class RandomCall:
    """One call: its prompt, its sampling, when it arrives and when it is aborted."""

    ids: list[int]
    sampling: protocol.SamplingParams
    arrival: int
    abort: int | None


def random_calls(seed: int) -> list[RandomCall]:
    rng = random.Random(seed)
    common = rng.choices(range(256), k=20)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"temperature": 0.9},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 30, "min_tokens": 3},
        {"repetition_penalty": 1.2},
        {"logprobs": 1, "temperature": 0.7},
        {"logit_bias": ((9, 1.5),), "ignore_eos": True, "stop_token_ids": (4, 70, 200)},
    )
    calls: list[RandomCall] = []
    for number in range(12):
        ids = common[: rng.randrange(20)] + rng.choices(range(256), k=rng.randint(1, 20))
        sampling = protocol.SamplingParams(
            max_tokens=rng.randint(1, 25), seed=number, **{"temperature": 0.0, **rng.choice(kinds)}
        )
        arrival = rng.randrange(40)
        abort = arrival + rng.randrange(12) if rng.random() < 0.25 else None
        calls.append(RandomCall(ids, sampling, arrival, abort))
    return calls


def run_calls(runner: Runner, calls: list[RandomCall]) -> dict[int, tuple[list[int], str]]:
    """Run calls on an engine. Return the ids and finish reason of each call not aborted."""
    engine = EngineCore(runner, epoch=1)
    got: dict[int, list[int]] = {number: [] for number in range(len(calls))}
    ended: dict[int, tuple[list[int], str]] = {}
    for now in range(2000):
        for number, call in enumerate(calls):
            if call.arrival == now:
                engine.apply(protocol.Fill(number, call.ids, rank=float(number % 3)))
                engine.apply(
                    protocol.GenerateCommand(number, call.sampling, rank=float(number % 3))
                )
            if call.abort == now:
                engine.apply(protocol.Abort(number))
        step = engine.step()
        engine.check()
        for report in step.reports if step is not None else ():
            assert not isinstance(report, protocol.Failed), report
            if isinstance(report, protocol.Tokens):
                got[report.context] += report.ids
            elif isinstance(report, protocol.Finished):
                ended[report.context] = (got[report.context], report.reason)
                engine.apply(protocol.Free(report.context))
        if step is None and now > 60:
            break
    assert engine.is_idle
    assert engine.status().num_held == 0
    completed = {number for number, call in enumerate(calls) if call.abort is None}
    assert completed <= ended.keys()
    return {number: ended[number] for number in completed}
