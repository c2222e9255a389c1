"""The examples of docs/start and docs/reference print what the pages show.

A block after `<!-- file: NAME -->` is a file, one after `<!-- console -->` has commands of `conure`
with their output on stdout, and one after `<!-- tested: NAME -->` is a script, whose output is the
next block. All run on one server with the built-in model.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from conure.server.program.status import Receipt

from ..served import environment, served

DOCS = Path(__file__).parents[2] / "docs"
NAMES = (
    "start/quickstart",
    "start/sharing",
    "reference/receipts",
    "reference/rest",
    "reference/python",
)
PAGES = {name: (DOCS / f"{name}.md").read_text("utf-8") for name in NAMES}
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.M | re.S)
CONSOLE = re.compile(r"^<!-- console -->\n```console\n(.*?)^```$", re.M | re.S)
SCRIPT = re.compile(
    r"^<!-- tested: (\w+) -->\n```(python|bash)\n(.*?)^```$\n\n```\n(.*?)^```$", re.M | re.S
)
INTERPRETERS = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}


class Example(NamedTuple):
    """A command and what it prints on stdout."""

    command: list[str]
    printed: str


def examples(name: str) -> Iterator[Example]:
    """Yield the examples of a page."""
    for block in CONSOLE.findall(PAGES[name]):
        for command, printed in re.findall(r"^\$ conure (.*)\n((?:[^$].*\n)*)", block, re.M):
            yield Example([sys.executable, "-m", "conure", *shlex.split(command)], printed)
    for _, language, script, printed in SCRIPT.findall(PAGES[name]):
        yield Example([*INTERPRETERS[language], script], printed)


@pytest.mark.parametrize("name", NAMES)
def test_every_marked_block_is_tested(name: str) -> None:
    page = PAGES[name]
    for mark, pattern in (("file: ", FILE), ("console", CONSOLE), ("tested: ", SCRIPT)):
        assert page.count(f"<!-- {mark}") == len(pattern.findall(page)), mark
    num_commands = sum(block.count("$ ") for block in CONSOLE.findall(page))
    assert len(list(examples(name))) == num_commands + len(SCRIPT.findall(page))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


def run(command: list[str], url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    for page in PAGES.values():
        for name, text in FILE.findall(page):
            (folder / name).write_text(text, "utf-8")
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("name", [name for name in NAMES if any(examples(name))])
def test_examples_print_what_the_page_shows(name: str, url: str, tmp_path: Path) -> None:
    for command, printed in examples(name):
        assert run(command, url, tmp_path).stdout.strip() == printed.strip(), command


def test_the_built_in_model_can_be_measured(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conure", "bench", "--rounds", "1", "--tokens", "2"]
    printed = run(command, url, tmp_path).stdout
    assert [line.split("  ")[0] for line in printed.splitlines()[1:]] == [
        "one call",
        "chain of 8",
        "16 sharing a text",
    ]


def test_the_receipt_is_the_one_of_the_page(tmp_path: Path) -> None:
    report = "The driver was Pavel Orlin. The guard was Tessa Brook. It happened in Malbury."
    command = [sys.executable, "-m", "conure", "run", "three.py", "--receipt"]
    with served() as url:  # whose cache is empty
        done = run([*command, "-p", f"report={report}"], url, tmp_path)
    printed = json.loads(done.stderr[done.stderr.index("{\n") :])
    block = re.search(
        r"<!-- receipt -->\n```json\n(.*?)```", PAGES["reference/receipts"], re.DOTALL
    )
    assert block is not None
    assert counts(printed) == counts(json.loads(block[1]))
    summary = re.search(r"`(\d+ of \d+ prompt tokens computed)`", PAGES["start/sharing"])
    assert summary is not None
    assert summary[1] in done.stderr


def counts(receipt: dict[str, Any]) -> dict[str, Any]:
    """Return a receipt without what depends on time: seconds, and which call ended last.

    Which call computes the shared beginning is equal for the sums.
    """
    varying = ("wall_s", "critical_path_s", "critical_path", "kv_block_seconds")
    single = {**receipt["as_single_requests"], "estimated_s": None}
    return {**receipt, **dict.fromkeys(varying), "as_single_requests": single}


def test_every_field_of_a_receipt_is_explained() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", PAGES["reference/receipts"], re.MULTILINE)
    assert sorted(rows) == sorted(fields(msgspec.to_builtins(Receipt())))


def fields(record: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_route_is_listed(url: str) -> None:
    import httpx

    paths = httpx.get(f"{url}/schema/openapi.json", timeout=60).json()["paths"]
    routes = {f"{method.upper()} {path}" for path, ops in paths.items() for method in ops}
    assert set(re.findall(r"`((?:GET|PUT|POST|DELETE) /\S*)`", PAGES["reference/rest"])) == routes
