"""The requests that both engines serve, and the way in which their rounds are recorded.

All requests of a case arrive at once, as token ids. No two rounds have a prompt in common, so a
prefix is shared within a round only. This module imports neither engine.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .record import Figures, StageRecord
from .shapes import LLAMA_3_8B, SMALL

MAX_SEQUENCES: Final = 128
STEP_TOKENS: Final = 8192
CONTEXT_LEN: Final = 8192
KV_BYTES: Final = 12 * 2**30
"""KV cache of each engine; the largest case needs 9.4 GiB."""
KV_BYTES_PER_TOKEN: Final = 2 * 2 * 32 * 8 * 128
"""Bytes of keys and values of one token of Llama 3 8B."""
TINY: Final = 16
"""Factor by which prompts and outputs are shorter with a small shape."""


class ServingCase(NamedTuple):
    """Requests that arrive together."""

    name: str
    prompts: list[list[int]]
    max_tokens: int


class Served(NamedTuple):
    """One case, served once."""

    seconds: float
    """From the first request to the last token."""
    last_first_s: float | None
    """Time until every request had its first token; None if it cannot be observed."""


Serve = Callable[[Sequence[Sequence[int]], int], Served]
"""Serves prompts, each with so many greedy tokens."""


def write_config(folder: Path, *, is_tiny: bool) -> Path:
    """Write the config of the model; return its folder."""
    config = {**LLAMA_3_8B, **(SMALL if is_tiny else {})}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def cases(seed: int, *, is_tiny: bool) -> Iterator[ServingCase]:
    """Yield the cases of one round."""
    chance = random.Random(seed)
    shorter = TINY if is_tiny else 1

    def draw(length: int) -> list[int]:
        return chance.choices(range(256, 500 if is_tiny else 100_000), k=length // shorter)

    def case(name: str, prompts: list[list[int]], max_tokens: int) -> ServingCase:
        return ServingCase(name, prompts, max_tokens // shorter)

    yield case("1 request, 128 in", [draw(128)], 256)
    yield case("64 alone, 1024 in", [draw(1024) for _ in range(64)], 128)
    root = draw(2048)
    yield case("64 behind 2048, 64 own", [root + draw(64) for _ in range(64)], 128)
    root, middle = draw(2048), [draw(1024) for _ in range(4)]
    prompts = [root + middle[row // 16] + draw(128) for row in range(64)]
    yield case("4 x 16 behind 2048 and 1024, 128 own", prompts, 128)
    yield case("128 alone, 256 in", [draw(256) for _ in range(128)], 128)


def record_rounds(record: StageRecord, serve: Serve, *, rounds: int, is_tiny: bool) -> None:
    """Serve all cases in rounds, the first of which is not counted; record medians."""
    found: dict[str, list[tuple[int, int, Served]]] = {}
    for number in range(rounds + 1):
        for case in cases(number, is_tiny=is_tiny):
            if record.is_over:
                record.left_out.append(f"{case.name}, round {number}")
                continue
            try:
                served = serve(case.prompts, case.max_tokens)
            except Exception as error:  # serve the other cases
                record.fail(f"{case.name}, round {number}", error)
                continue
            print(f"round {number} {case.name:40} {served.seconds:8.3f} s", flush=True)
            if number:
                one = (len(case.prompts), case.max_tokens, served)
                found.setdefault(case.name, []).append(one)
        # A stage that is stopped leaves the rounds so far.
        record.rows = [{"name": name, **_summary(each)} for name, each in found.items()]
        record.write()
    for row in record.rows:
        print(f"{row['name']:40} {row['tokens_per_s']:9.0f} tokens/s", flush=True)


def _summary(rounds: Sequence[tuple[int, int, Served]]) -> Figures:
    """Return the figures of a case; a step is one of those after every request has a token."""
    rates = [num * length / served.seconds for num, length, served in rounds]
    firsts = [each.last_first_s for _, _, each in rounds if each.last_first_s is not None]
    steps_ms = [
        1e3 * (each.seconds - each.last_first_s) / max(1, length - 1)
        for _, length, each in rounds
        if each.last_first_s is not None
    ]
    figures: dict[str, Any] = {
        "tokens_per_s": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "rounds": len(rates),
        "last_first_token_s": statistics.median(firsts) if firsts else None,
        "step_ms": statistics.median(steps_ms) if steps_ms else None,
    }
    return figures
