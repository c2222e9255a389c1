"""The receipt's estimate of single requests, and the measured time of a client that sends them.

Each workload is one program with all its applications. It runs whole on one server, whose receipt
estimates the same calls as single requests. A parallel client then sends the calls one by one to
an equal server; each prompt begins with other characters, so that nothing is shared, as in the
estimate. One ratio is computed per round. Each round has its own texts. Before the first round,
both servers answer some single requests: the estimate counts the time of requests that a server has
measured.

After the six workloads come stages of equal calls, with and without a common prefix, on engines
that decode 16 outputs at once.

    python -m robustness.counterfactual [--rounds N] [--only WORKLOAD] [--real] [--verbose]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import string
import time
from typing import Any, NamedTuple

import httpx

from apps.client import AppClient
from apps.scaled_workloads import CONTEXT_LEN, SCALED, ScheduledProgram, workload
from end_to_end import REAL, ROOMY, SIMULATED, two_servers

NUM_FIRST = 30
"""Single requests that each server answers before the first round."""
SALT_CHARS = 16
"""Characters at the start of a prompt that differ between requests: one block."""


class CallStage(NamedTuple):
    """Calls that are ready together, and the chains that they begin."""

    num_calls: int
    num_prefix: int
    """Characters that all prompts begin with."""
    num_own: int
    """Characters of each prompt after the common prefix."""
    num_output: int
    """Tokens of each output."""
    num_links: int = 1
    """Calls of a chain; each reads the output of the previous call."""

    def program(self, seed: str) -> dict[str, Any]:
        """Return the program; its texts are generated from the seed."""
        prefix = _letters(seed, self.num_prefix)
        nodes: list[dict[str, Any]] = []
        for call in range(self.num_calls):
            for link in range(self.num_links):
                name = f"c{call}_{link}"
                prompt: list[dict[str, Any]] = [
                    {"text": prefix + _letters(f"{seed} {name}", self.num_own)}
                ]
                if link:
                    prompt.append({"input": f"c{call}_{link - 1}"})
                output = {"output": name, "max_tokens": self.num_output, "ignore_eos": True}
                prompt.append(output | {"temperature": 0})
                nodes.append({"id": name, "op": "generate", "prompt": prompt})
        return {"nodes": nodes, "outputs": [node["id"] for node in nodes]}


STAGES = {
    "40 calls, a common prefix": CallStage(40, 300, 20, 40),
    "100 calls, a common prefix, short outputs": CallStage(100, 300, 20, 8),
    "8 calls, a common prefix": CallStage(8, 300, 20, 40),
    "12 chains of 4 calls, a common prefix": CallStage(12, 200, 30, 20, num_links=4),
    "40 calls, nothing in common": CallStage(40, 0, 300, 20),
    "40 calls, short prompts": CallStage(40, 0, 16, 40),
}
STAGE_ROWS = ("--max-sequences", "16")


def _letters(seed: str, number: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters, k=number))


def joined(sent: list[ScheduledProgram], seed: str) -> dict[str, Any]:
    """Return one program with the calls of all programs, which are all ready at the start."""
    nodes: list[dict[str, Any]] = []
    outputs: list[str] = []
    for number, each in enumerate(sent):
        program = each.plan.written(seed)

        def named(name: str, number: int = number) -> str:
            return f"p{number}_{name}"

        for node in program["nodes"]:
            prompt = [
                {
                    key: named(value) if key in ("input", "output") else value
                    for key, value in part.items()
                }
                for part in node["prompt"]
            ]
            after = [named(name) for name in node.get("after", ())]
            nodes.append(node | {"id": named(node["id"]), "prompt": prompt, "after": after})
        outputs += map(named, program["outputs"])
    return {"nodes": nodes, "outputs": outputs}


class UnsharedClient(AppClient):
    """A client whose requests share no prefix."""

    def __init__(self, http: httpx.AsyncClient, salt: str) -> None:
        super().__init__(http, whole=False, round_trip_s=0.0)
        self._salt = salt
        self._num_sent = 0

    async def seconds(self, program: dict[str, Any]) -> float:
        """Send the calls of a program; return the seconds until the last answer."""
        began = time.perf_counter()
        await self._send_calls(program)
        return time.perf_counter() - began

    async def _ask(self, method: str, path: str, **content: Any) -> Any:
        body = content["json"]
        self._num_sent += 1
        salt = f"{self._salt}.{self._num_sent}.".ljust(SALT_CHARS, "-")[:SALT_CHARS]
        changed = body | {"prompt": salt + body["prompt"][SALT_CHARS:]}
        return await super()._ask(method, path, json=changed)


async def run_program(http: httpx.AsyncClient, program: dict[str, Any]) -> dict[str, Any]:
    """Run a program and return its status."""
    response = await http.post("/v1/programs", json={"program": program})
    accepted = response.raise_for_status().json()
    # The reply lasts until the program ends. Repeated status requests would slow the server down.
    events = await http.get(f"{accepted['url']}/events", params={"types": "program.finished"})
    events.raise_for_status()
    response = await http.get(accepted["url"])
    status: dict[str, Any] = response.raise_for_status().json()
    assert status["status"] == "done", status
    return status


def send_first(url: str) -> None:
    """Send single requests, one after another."""
    with httpx.Client(base_url=url, timeout=120) as http:
        for number in range(NUM_FIRST):
            prompt = _letters(f"first {number}", 400)
            body = {"model": "default", "prompt": prompt, "max_tokens": 25, "ignore_eos": True}
            http.post("/v1/completions", json=body).raise_for_status()


def salt_of(name: str, seed: int) -> str:
    """Return the start of the prompts of a workload in a round, which no others have."""
    return f"{seed}.{(*SCALED, *STAGES).index(name)}"


async def compare(
    urls: tuple[str, str], name: str, seed: int, *, verbose: bool
) -> tuple[float, float, float]:
    """Return the estimated, measured and whole seconds of a workload."""
    text_seed = f"counterfactual.{seed}.{name}".replace(" ", "-")
    if name in STAGES:
        program = STAGES[name].program(text_seed)
    else:
        program = joined(workload(name, seed), text_seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=urls[0], timeout=120, limits=limits) as http:
        status = await run_program(http, program)
    async with httpx.AsyncClient(base_url=urls[1], timeout=120, limits=limits) as http:
        measured_s = await UnsharedClient(http, salt_of(name, seed)).seconds(program)
    found = status["receipt"]
    if verbose:
        print(json.dumps(found))
    return found["as_single_requests"]["estimated_s"], measured_s, found["wall_s"]


def main() -> None:
    """Print one line per workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=(*SCALED, *STAGES), action="append")
    parser.add_argument("--real", action="store_true", help="the built-in kernels and a model")
    parser.add_argument("--verbose", action="store_true", help="print the receipts")
    arguments = parser.parse_args()
    print(
        "| | estimated | measured | estimated / measured | min | max |\n|---|--:|--:|--:|--:|--:|"
    )
    # Without a limit on waiting, because a refused request ends the benchmark.
    engine = (*(REAL if arguments.real else SIMULATED), "--max-wait-s", "0")
    names = arguments.only or (*SCALED, *STAGES)
    for options, known in ((engine, SCALED), ((*engine, *STAGE_ROWS), STAGES)):
        chosen = [name for name in names if name in known]
        if chosen:
            with two_servers(options, ROOMY, CONTEXT_LEN) as urls:
                for url in urls:
                    send_first(url)
                for name in chosen:
                    print_row(urls, name, arguments.rounds, verbose=arguments.verbose)


def print_row(urls: tuple[str, str], name: str, num_rounds: int, *, verbose: bool) -> None:
    """Run a workload once to warm up and then `num_rounds` times, and print its line."""
    found = [
        asyncio.run(compare(urls, name, seed, verbose=verbose)) for seed in range(num_rounds + 1)
    ][1:]
    ratios = [estimated_s / measured_s for estimated_s, measured_s, _ in found]
    middle = [statistics.median(each) for each in zip(*found, strict=True)]
    print(
        f"| {name} | {middle[0]:.3f} | {middle[1]:.3f} | {statistics.median(ratios):.2f} "
        f"| {min(ratios):.2f} | {max(ratios):.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
