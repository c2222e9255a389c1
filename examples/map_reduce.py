"""A LangChain map-reduce over incident reports, as one program or request by request.

The chain is ordinary LangChain: one small chain per report, all in parallel, and a last prompt
that joins the findings. `to_program` turns it into one program: the server sees all calls at once,
computes their common prompt prefix once, and starts the last call as soon as the last finding is
complete. With `--by-request` LangChain runs the same chain, each call as a separate request.

    conure serve &
    python examples/map_reduce.py --save program.json
    python examples/map_reduce.py --by-request --compare program.json

For a fair comparison, restart the server before each of the two: the second run would find the
cache of the first. Needs `pip install '.[langchain]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel

from conure import Client, ConureError, Receipt
from conure.adapters.langchain import ChatConure, to_program

RULES = (
    "You read reports. Answer from the report alone. Give names as they are written. "
    "Say what is asked and nothing else."
)
REPORTS = (
    "It happened in Malbury. The guard was Tessa Brook. The accident hurt Jonas Wenk. "
    "The cause was a broken valve.",
    "The inspector was Mira Dolan. Nobody was hurt. The place was Kolvar. The road was closed.",
    "The date was 12 May. One person was hurt: Ruth Sandberg. The driver is called Pavel Orlin.",
    "The damage was 340 crowns. The accident hurt Emil Hartson. It happened in Tarnby.",
    "The train was late. Nobody was hurt. The captain was Lena Moritz. The police came.",
)
QUESTION = "Who was hurt?"
JOIN = "Join these findings into one sentence:"


@dataclass(frozen=True)
class Measurement:
    """Answers and costs of one way to run the chain."""

    findings: list[str]
    answer: str
    wall_s: float
    requests: int
    """From the application to the server."""
    logical: int
    computed: int
    shared: int


def build_chain(num_reports: int, llm: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Return the chain from {"report_1": ..., ...} to the findings and the answer."""
    read = ChatPromptTemplate.from_messages(
        [("system", RULES), ("human", f"Report: {{report}}\n\nQuestion: {QUESTION}")]
    )
    numbers = range(1, num_reports + 1)
    findings = RunnableParallel(
        {
            f"finding_{n}": {"report": itemgetter(f"report_{n}")} | read | llm | StrOutputParser()
            for n in numbers
        }
    )
    lines = "\n".join(f"{n}. {{finding_{n}}}" for n in numbers)
    join = ChatPromptTemplate.from_messages([("human", f"{JOIN}\n{lines}")])
    return findings.assign(answer=join | llm | StrOutputParser())


def as_program(client: Client, reports: Sequence[str], llm: ChatConure) -> Measurement:
    """Run the chain as one program and print its receipt."""
    compiled = to_program(build_chain(len(reports), llm), name="map-reduce")
    inputs = {f"report_{n}": report for n, report in enumerate(reports, 1)}
    start_s = time.perf_counter()
    result = compiled.execute(client, inputs)
    wall_s = time.perf_counter() - start_s
    print_receipt(result.receipt)
    return _measurement(result.output, wall_s, 1, [result.receipt])


def by_request(client: Client, reports: Sequence[str], llm: ChatConure) -> Measurement:
    """Run the chain with LangChain, one request per call."""
    programs: list[str] = []

    def record(message: AIMessage) -> AIMessage:
        programs.append(message.response_metadata["program"])
        return message

    chain = build_chain(len(reports), llm | RunnableLambda(record))
    start_s = time.perf_counter()
    output = chain.invoke({f"report_{n}": report for n, report in enumerate(reports, 1)})
    wall_s = time.perf_counter() - start_s
    receipts = [client.attach(program).receipt() for program in programs]
    return _measurement(output, wall_s, len(programs), receipts)


def _measurement(
    output: dict[str, str], wall_s: float, requests: int, receipts: Sequence[Receipt]
) -> Measurement:
    findings = [value for name, value in output.items() if name != "answer"]
    prompts = [receipt.prompt_tokens for receipt in receipts]
    logical, computed = (
        sum(prompt.logical for prompt in prompts),
        sum(prompt.computed for prompt in prompts),
    )
    return Measurement(
        findings, output["answer"], wall_s, requests, logical, computed, logical - computed
    )


def print_receipt(receipt: Receipt) -> None:
    """Print the costs of the program."""
    prompt = receipt.prompt_tokens
    shared = prompt.shared
    total = shared.static + shared.dynamic + shared.generated + shared.cache
    print("receipt")
    print(f"  calls            {receipt.calls}")
    print(
        f"  prompt tokens    {prompt.logical} logical = {prompt.computed} computed + {total} shared"
    )
    print(
        f"  shared           {shared.static} static, {shared.dynamic} dynamic, "
        f"{shared.generated} generated, {shared.cache} cache"
    )
    print(f"  output tokens    {receipt.output_tokens.decoded} decoded")
    print(
        f"  critical path    {' -> '.join(receipt.critical_path)} ({receipt.critical_path_s:.2f} s)"
    )
    print(f"  blocks held      {receipt.blocks_held}\n")


def print_answers(reports: Sequence[str], measurement: Measurement) -> None:
    """Print each report with its finding, and the answer."""
    for number, (report, finding) in enumerate(zip(reports, measurement.findings, strict=True), 1):
        print(f"{number}. {report}\n   {QUESTION} {finding}")
    print(f"\nanswer: {measurement.answer}\n")


def print_table(program: Measurement, requests: Measurement) -> None:
    """Print the measurements side by side."""
    rows = (
        ("wall time", f"{program.wall_s:.2f} s", f"{requests.wall_s:.2f} s"),
        ("requests of the app", str(program.requests), str(requests.requests)),
        ("prompt tokens", str(program.logical), str(requests.logical)),
        ("  computed", str(program.computed), str(requests.computed)),
        ("  shared", str(program.shared), str(requests.shared)),
    )
    print(f"{'':<22}{'one program':>12}{'by request':>12}")
    for name, left, right in rows:
        print(f"{name:<22}{left:>12}{right:>12}")
    is_equal = (program.findings, program.answer) == (requests.findings, requests.answer)
    print(f"{'answers equal':<22}{'yes' if is_equal else 'NO':>12}")


def run(client: Client, options: argparse.Namespace) -> None:
    """Run the chain one way; print, save and compare its measurement."""
    llm = ChatConure(client=client, temperature=0, max_tokens=options.max_tokens)
    if not options.by_request:
        for model in client.models()[:1]:
            print(f"model {model['id']}: {model.get('description') or 'no description'}\n")
    measure = by_request if options.by_request else as_program
    measurement = measure(client, REPORTS, llm)
    if options.compare is None:
        print_answers(REPORTS, measurement)
    else:
        other = Measurement(**json.loads(options.compare.read_text(encoding="utf-8")))
        print_table(*((other, measurement) if options.by_request else (measurement, other)))
    if options.save is not None:
        options.save.write_text(json.dumps(asdict(measurement)), encoding="utf-8")


def main() -> int:
    """Parse the arguments and run the example."""
    parser = argparse.ArgumentParser(description="LangChain map-reduce over incident reports")
    parser.add_argument(
        "--url", help="URL of the server (default: CONURE_URL, or http://127.0.0.1:8400)"
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="limit of each answer")
    parser.add_argument("--by-request", action="store_true", help="let LangChain run the chain")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="save answers and costs to this file"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="file that the other way saved"
    )
    try:
        options = parser.parse_args()
        with Client(options.url) as client:
            run(client, options)
    except ConureError as problem:
        print(f"map_reduce: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
