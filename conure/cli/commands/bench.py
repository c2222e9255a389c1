"""`conure bench`: measure a running server with three small programs.

The programs have the shapes that applications have: one call, a chain of 8 calls, and 16 calls that
share a long text. Prompts differ in each round, so that no round uses the cache of an earlier one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from conure.adapters.client import Client

from ..command import ExitCode, UsageError, add_url, connect
from ..terminal import duration, pretty, table

CHAIN, WIDTH = 8, 16
NUM_SHARED_LINES = 60
"""Lines of the shared text. It fits into the context of the built-in model."""


class Sample(NamedTuple):
    """One run of a program."""

    wall_s: float
    num_computed: int
    num_prompt: int
    num_decoded: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure bench`."""
    add_url(parser)
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each program (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=32, help="tokens of each answer (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run each program `--rounds` times after one run that is not counted; print medians."""
    if arguments.rounds < 1 or arguments.tokens < 1:
        raise UsageError("--rounds and --tokens must be at least 1")
    samples: dict[str, list[Sample]] = {}
    with connect(arguments.url) as client:
        for number in range(-1, arguments.rounds):
            for name, program in _programs(number, arguments.tokens):
                sample = _measure(client, program)
                if number >= 0:
                    samples.setdefault(name, []).append(sample)
    report = {name: _summary(found) for name, found in samples.items()}
    if arguments.json:
        sys.stdout.write(pretty(report) + "\n")
        return ExitCode.DONE
    titles = ("PROGRAM", "MEDIAN", "MIN", "MAX", "PROMPT TOKENS COMPUTED", "TOKENS/S")
    sys.stdout.write(table(titles, [_row(name, row) for name, row in report.items()]))
    return ExitCode.DONE


def _programs(number: int, tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the programs of one round. `number` makes their prompts unique."""
    salt = f"Round {number + 1} of {time.time_ns()}."
    one = _call("c0", [{"text": f"{salt} Continue."}], tokens)
    yield "one call", {"nodes": [one], "outputs": ["c0"]}
    links = [_call(f"c{i}", [{"input": f"c{i - 1}"}], tokens) for i in range(1, CHAIN)]
    yield f"chain of {CHAIN}", {"nodes": [one, *links], "outputs": [f"c{CHAIN - 1}"]}
    text = " ".join([salt, *(f"Line {index}." for index in range(NUM_SHARED_LINES))])
    nodes = [_call(f"c{i}", [{"text": f"{text} Question {i}."}], tokens) for i in range(WIDTH)]
    yield f"{WIDTH} sharing a text", {"nodes": nodes, "outputs": [node["id"] for node in nodes]}


def _call(name: str, prompt: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    output = {"output": name, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"id": name, "op": "generate", "prompt": [*prompt, output]}


def _measure(client: Client, program: dict[str, Any]) -> Sample:
    started_at = time.perf_counter()
    run = client.submit(program, follow=True)
    run.result()
    wall_s = time.perf_counter() - started_at
    receipt = run.receipt()
    prompt = receipt.prompt_tokens
    return Sample(wall_s, prompt.computed, prompt.logical, receipt.output_tokens.decoded)


def _summary(samples: list[Sample]) -> dict[str, float]:
    walls = [sample.wall_s for sample in samples]
    last = samples[-1]
    return {
        "median_s": statistics.median(walls),
        "min_s": min(walls),
        "max_s": max(walls),
        "prompt_tokens": last.num_prompt,
        "prompt_tokens_computed": last.num_computed,
        "decoded_per_s": last.num_decoded / statistics.median(walls),
    }


def _row(name: str, row: dict[str, float]) -> tuple[str, ...]:
    return (
        name,
        *(duration(row[key]) for key in ("median_s", "min_s", "max_s")),
        f"{row['prompt_tokens_computed']:.0f} of {row['prompt_tokens']:.0f}",
        f"{row['decoded_per_s']:.0f}",
    )
