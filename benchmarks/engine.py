"""Conure's engine and other engines on the same checkpoint: tokens per second and latency.

    python benchmarks/engine.py                                      Conure alone
    python benchmarks/engine.py --vllm /path/to/env/bin/python       and vLLM, in process
    python benchmarks/engine.py --vllm ... --llama /path/to/env/bin/python \
        --config benchmarks/serving/qwen2_05b.json --workload small
                                         one computation of a 0.5 B model, and llama.cpp as well
    python benchmarks/engine.py --model FOLDER --peer http://host:port
                                         and any OpenAI-compatible server, over HTTP

Without --model, a folder with seeded random weights is created (24 M parameters, a Llama over
bytes, bfloat16), which any program that reads Hugging Face folders can load; `--keep FOLDER`
keeps it for a peer. `serving/cases.py` describes the workloads.

The systems alternate within each round, and the order alternates between rounds; a ratio compares
runs of the same round. Decoding is greedy and ignores the end of text, so that every answer has its
full length. The first round is not counted. All systems do the same work, and nothing is
subtracted. Each time is also compared with a lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conure.engine.testing import dummy_checkpoint
from serving import cases, lower_bound
from serving.systems import CaseRun, Process, Server, System, SystemFailedError
from temporary_server import served

HERE = Path(__file__).parent
SETTLE_S = 0.5
"""Threads of the previous system may spin for 0.2 s after their last operation."""
PLACES = frozenset({"model", "keep", "config", "vllm", "llama", "peer", "out"})
"""Options that name places on this machine; they are not part of the record."""


def main(arguments: Sequence[str]) -> int:
    """Run the rounds, print a table, write the record."""
    options = _parse(arguments)
    with ExitStack() as stack:
        folder = _folder(options, stack)
        model = lower_bound.read(folder)
        machine = lower_bound.measure(model, options.threads)
        try:
            sides = _sides(options, folder, stack)
            answers = _run(sides, options)
        except SystemFailedError as error:
            print(error, file=sys.stderr)
            return 1
    record = {
        "machine": {"processor": platform.processor() or platform.machine(), **machine._asdict()},
        "options": {key: value for key, value in vars(options).items() if key not in PLACES},
        "cases": [_summary(case, found, model, machine) for case, found in answers],
    }
    _print(record)
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def _folder(options: argparse.Namespace, stack: ExitStack) -> Path:
    if options.model:
        return Path(options.model)
    parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="conure-"))
    folder = Path(options.keep or Path(parent) / "llama-24m")
    return folder if folder.exists() else dummy_checkpoint.write(str(options.config), folder)


def _sides(options: argparse.Namespace, folder: Path, stack: ExitStack) -> list[System]:
    """Start all systems; the exit stack stops them."""
    sides: list[System] = []
    if options.peer:
        url = stack.enter_context(served(str(folder), "--engine", "local"))
        sides += [Server("conure", url), Server("peer", options.peer)]
    else:
        sides.append(Process("conure", sys.executable, "ours.py", folder, options.threads))
        stack.callback(sides[-1].close)
        if options.vllm:
            sides.append(Process("vllm", options.vllm, "vllm_process.py", folder, options.threads))
            stack.callback(sides[-1].close)
        if options.llama:
            sides.append(
                Process("llama.cpp", options.llama, "llama_process.py", folder, options.threads)
            )
            stack.callback(sides[-1].close)
    return sides


Found = dict[str, list[CaseRun]]


def _run(
    sides: list[System], options: argparse.Namespace
) -> list[tuple[cases.RequestBatch, Found]]:
    """Serve every case of every round by every system."""
    found: dict[str, Found] = defaultdict(lambda: defaultdict(list))
    latest: dict[str, cases.RequestBatch] = {}
    source = _rounds(options)
    for number in range(options.rounds + 1):
        for case in next(source):
            latest[case.name] = case
            for side in sides if number % 2 else sides[::-1]:
                time.sleep(SETTLE_S)
                answer = side.ask(case)
                if number:
                    found[case.name][side.name].append(answer)
    return [(case, found[name]) for name, case in latest.items()]


def _rounds(options: argparse.Namespace) -> Iterator[list[cases.RequestBatch]]:
    if options.workload == "small":
        return cases.small_rounds(
            options.seed, requests=options.requests, prompt=options.prompt, output=options.output
        )
    return cases.rounds(
        options.seed,
        requests=options.requests,
        prefix=options.prefix,
        suffix=options.suffix,
        short=options.short,
        output=options.output,
    )


def _summary(
    case: cases.RequestBatch,
    found: Found,
    model: lower_bound.ModelSizes,
    machine: lower_bound.MachineSpeed,
) -> dict[str, Any]:
    least = lower_bound.seconds(case, model, machine)
    summary: dict[str, Any] = {"case": case.name, "floor_s": least, "sides": {}}
    for name, answers in found.items():
        rates = [case.num_output / answer.seconds for answer in answers]
        firsts = [first for answer in answers for first in answer.first_s]
        summary["sides"][name] = {
            "tokens_per_s": _spread(rates),
            "percent_of_floor": 100 * least / statistics.median(a.seconds for a in answers),
            "first_token_s": _spread(firsts) if firsts else None,
        }
    summary["ratios"] = {
        name: _spread(
            [b.seconds / a.seconds for a, b in zip(found["conure"], answers, strict=True)]
        )
        for name, answers in found.items()
        if name != "conure"
    }
    return summary


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def _print(record: dict[str, Any]) -> None:
    machine = record["machine"]
    print(
        f"memory {machine['bytes_per_s'] / 1e9:.1f} GB/s,"
        f" products {machine['products_per_s'] / 1e9:.0f} G/s"
    )
    for row in record["cases"]:
        print(f"{row['case']}  (floor {row['floor_s']:.3f} s)")
        for name, side in row["sides"].items():
            rate, first = side["tokens_per_s"], side["first_token_s"]
            line = f"  {name:9} {_shown(rate, '.0f')} tokens/s"
            line += f"  {side['percent_of_floor']:.0f} % of the floor's speed"
            print(line + (f"  first token {_shown(first, '.3f')} s" if first else ""))
        for name, ratio in row["ratios"].items():
            print(f"  conure / {name} {_shown(ratio, '.2f')}")


def _shown(spread: dict[str, float], form: str) -> str:
    least, most = format(spread["min"], form), format(spread["max"], form)
    return f"{format(spread['median'], form)} ({least} to {most})"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/engine.py", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="a folder; default: random weights of --config")
    source.add_argument("--keep", help="make the folder here, or take the one that is here")
    parser.add_argument("--config", type=Path, default=HERE / "serving" / "llama_24m.json")
    peers = parser.add_mutually_exclusive_group()
    peers.add_argument("--vllm", help="a Python that can import vllm")
    peers.add_argument("--peer", help="URL of an OpenAI-compatible server on the same folder")
    parser.add_argument("--llama", help="a Python that can import llama_cpp and gguf")
    parser.add_argument("--workload", choices=("shared", "small"), default="shared")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    for name, number in (
        ("requests", 16),
        ("prefix", 1500),
        ("suffix", 32),
        ("short", 256),
        ("prompt", 1024),
        ("output", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--out", type=Path, help="where the record goes, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
