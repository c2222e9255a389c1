"""Random programs give the values and the yields that a naive interpreter gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from conure.server.language.errors import LanguageError

from ..inprocess import Program, server_harness
from .interpreter import FailureError, Interpreter
from .random_source import SourceGenerator

NUM_PROGRAMS = 60
"""In one run of the suite; the slow test runs ten times as many."""


def plain(value: Any) -> Any:
    """Return a value without the fields of a message that only the server sets."""
    if isinstance(value, dict):
        kept = ("role", "content") if value.get("role") == "assistant" else tuple(value)
        return {key: plain(value[key]) for key in kept}
    return [plain(item) for item in value] if isinstance(value, list) else value


async def yields_by_job(program: Program) -> list[list[Any]]:
    """Return the values that each job yields, jobs in any order."""
    jobs: dict[str, list[Any]] = {}
    for event in await program.events():
        if event.type == "yield":
            jobs.setdefault(event.data["job"], []).append(plain(event.data["value"]))
    return sorted(jobs.values(), key=repr)


def expected_yields(source: str) -> list[list[Any]] | None:
    """Return the same of the interpreter; None if the program fails."""
    try:
        yields = Interpreter(source).run()
    except FailureError:
        return None
    jobs: dict[int, list[Any]] = {}
    for job, value in yields:
        jobs.setdefault(job, []).append(value)
    return sorted(jobs.values(), key=repr)


async def compare(data: Path, seeds: range) -> None:
    num_failed = 0
    async with server_harness(data) as harness:
        for seed in seeds:
            source = SourceGenerator(random.Random(seed)).source()
            try:
                program = await harness.submit_source(source)
            except LanguageError as error:
                raise AssertionError(f"program {seed}: {error}\n{source}") from error
            yields = await yields_by_job(program)
            status = await program.end()
            expected = expected_yields(source)
            num_failed += expected is None
            if expected is None:
                assert status.status == "failed", f"program {seed} did not fail\n{source}"
            else:
                assert status.status == "done", f"program {seed}: {status.error}\n{source}"
                assert yields == expected, f"program {seed}\n{source}"
    assert num_failed < len(seeds) / 4


async def test_random_programs_give_the_interpreter_s_values(tmp_path: Path) -> None:
    await compare(tmp_path, range(NUM_PROGRAMS))


@pytest.mark.slow
async def test_many_random_programs_give_the_interpreter_s_values(tmp_path: Path) -> None:
    await compare(tmp_path, range(NUM_PROGRAMS, 11 * NUM_PROGRAMS))
