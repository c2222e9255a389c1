"""`conure demo`: what a whole program gains, shown on the built-in model.

Three parts, each on a real server in a separate process: a LangChain chain becomes faster by one
line, a program survives `kill -9` of its server, and a receipt states what was shared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conure.adapters.client import Client, Retry, Run

from ..command import CommandError, ExitCode
from ..delayed_connection import delayed
from ..terminal import duration, summary

ROUND_TRIP_S = 0.025
NUM_ROUNDS = 3
RULES = "You read reports. Answer from the report alone. Say what is asked and nothing else."
REPORTS = (
    "It happened in Malbury. The guard was Tessa Brook. The accident hurt Jonas Wenk.",
    "The inspector was Mira Dolan. Nobody was hurt. The place was Kolvar.",
    "The date was 12 May. One person was hurt: Ruth Sandberg. The driver is called Pavel Orlin.",
    "The damage was 340 crowns. The accident hurt Emil Hartson. It happened in Tarnby.",
    "The train was late. Nobody was hurt. The captain was Lena Moritz.",
)
QUESTION = "Who was hurt?"
JOIN = "Join these findings into one sentence:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure demo`: none."""
    del parser


def run(_: argparse.Namespace) -> int:
    """Run the three parts."""
    with tempfile.TemporaryDirectory(prefix="conure-demo-") as data:
        with server(Path(data), 0) as (url, process):
            _accelerated_chain(url)
            client = Client(url, retry=Retry(unreachable_timeout_s=60.0))
            started = _start_long_program(client, process)
        with client, server(Path(data), int(url.rpartition(":")[2])):
            _finish_long_program(started)
    command = "conure" if shutil.which("conure") else Path(sys.executable).with_name("conure")
    _write(f"\nNext: {command} serve\n")
    return ExitCode.DONE


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def server(data: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `conure serve` in a process; yield its URL and the process.

    Raises:
        CommandError: if the server does not start.
    """
    command = [sys.executable, "-m", "conure", "serve", "--port", str(port), "--data", str(data)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        # A warning may come before the line with the address.
        printed: list[str] = []
        found = None
        for line in process.stdout:
            printed.append(line)
            if (found := re.search(r"http://\S+:\d+", line)) is not None:
                break
        try:
            if found is None:
                raise CommandError(f"the server did not start: {''.join(printed)}")
            yield found[0], process
        finally:
            process.terminate()


# --- one line makes a chain faster ------------------------------------------------------------


def _accelerated_chain(url: str) -> None:
    _write("1. One line makes a LangChain chain faster\n")
    try:
        from conure.adapters.langchain import accelerate
    except ModuleNotFoundError:
        _write("   left out: pip install 'conure[langchain]'\n\n")
        return
    inputs = {f"report_{n}": report for n, report in enumerate(REPORTS, 1)}
    with delayed(url, ROUND_TRIP_S) as far:
        plain = build_chain(far)
        fast = accelerate(plain)
        for chain in (plain, fast):  # opens the connections and fills the caches, for both alike
            chain.invoke(inputs)
        plain_s, fast_s = [], []
        for _ in range(NUM_ROUNDS):
            plain_s.append(_timed(lambda: plain.invoke(inputs)))
            fast_s.append(_timed(lambda: fast.invoke(inputs)))
        answer = fast.invoke(inputs)
        is_equal = answer == plain.invoke(inputs)
    before, after = statistics.median(plain_s), statistics.median(fast_s)
    _write(
        f"   {len(REPORTS)} reports, a joined answer, its summary: 3 stages of calls, and "
        f"{1000 * ROUND_TRIP_S:.0f} ms of network\n"
        f"   chain.invoke(...)              {duration(before)}\n"
        f"   accelerate(chain).invoke(...)  {duration(after)}   {before / after:.1f} times as "
        f"fast, {'the same answers' if is_equal else 'DIFFERENT ANSWERS'}\n\n"
    )


def build_chain(url: str) -> Any:
    """Return a LangChain chain: a finding per report, the findings joined, the sentence read."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnableParallel

    from conure.adapters.langchain import ChatConure

    llm = ChatConure(base_url=url, temperature=0, max_tokens=48) | StrOutputParser()
    numbers = range(1, len(REPORTS) + 1)
    findings: Any = RunnableParallel(
        {
            f"finding_{n}": ChatPromptTemplate.from_messages(
                [("system", RULES), ("human", f"Report: {{report_{n}}}\n\nQuestion: {QUESTION}")]
            )
            | llm
            for n in numbers
        }
    )
    lines = "\n".join(f"{n}. {{finding_{n}}}" for n in numbers)
    join = ChatPromptTemplate.from_messages([("human", f"{JOIN}\n{lines}")])
    check = ChatPromptTemplate.from_messages(
        [("system", RULES), ("human", f"Report: {{answer}}\n\nQuestion: {QUESTION}")]
    )
    return findings.assign(answer=join | llm).assign(check=check | llm)


def _timed(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


# --- a program survives its server ------------------------------------------------------------


def long_program() -> dict[str, Any]:
    """Return a program of calls that wait for each other and begin with the same text."""
    text = " ".join(REPORTS)
    nodes = []
    for number in range(16):
        report = REPORTS[number % len(REPORTS)]
        content = f"{text}\nReport {number + 1}: {report}\n\nQuestion: {QUESTION}"
        nodes.append(
            {
                "id": f"finding_{number + 1}",
                "op": "generate",
                "messages": [
                    {"role": "system", "content": [{"text": RULES}]},
                    {"role": "user", "content": [{"text": content}]},
                ],
                "output": {"variable": f"f{number + 1}", "max_tokens": 48, "temperature": 0},
                **({"after": [f"finding_{number}"]} if number else {}),
            }
        )
    return {"name": "findings", "nodes": nodes, "outputs": [f"f{n + 1}" for n in range(16)]}


def _start_long_program(client: Client, process: subprocess.Popen[str]) -> Run:
    """Submit the program and kill the server after the first calls."""
    _write("2. A program survives kill -9 of its server\n")
    run = client.submit(long_program())
    num_done = 0
    with contextlib.closing(run.events()) as events:
        for event in events:
            num_done += event.type == "node.finished"
            if num_done == 4:
                os.kill(process.pid, signal.SIGKILL)
                break
    process.wait()
    _write(f"   {run.id}: {num_done} of 16 calls finished, server killed\n")
    return run


def _finish_long_program(run: Run) -> None:
    """Wait for the program on the restarted server, and print its receipt."""
    values = run.result()
    status = run.status()
    num_repeated = sum(node.attempt > 1 for node in status.nodes.values())
    _write(
        f"   server restarted: the program finished by itself, {len(values)} of 16 answers, "
        f"{num_repeated} unfinished call{'s' if num_repeated != 1 else ''} repeated\n\n"
    )
    receipt = run.receipt()
    prompt = receipt.prompt_tokens
    shared = prompt.logical - prompt.computed
    _write(
        "3. The receipt of that program\n"
        f"   {summary(receipt)}\n"
        f"   {shared} prompt tokens ({shared / prompt.logical:.0%}) were shared: "
        f"{prompt.shared.static} literal text of the program, "
        f"{prompt.shared.cache} in the cache of earlier calls\n"
    )
