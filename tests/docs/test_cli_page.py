"""The commands of docs/cli.md print what the page shows, apart from ids and times."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..served import environment, served

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")
FILES = dict(re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
BLOCKS = re.findall(r"^<!-- console -->\n```console\n(.*?)^```$", PAGE, re.M | re.S)
VARYING = (
    (re.compile(r"\bp_[0-9a-f]{24}\b"), "p_..."),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min)\b"), "TIME"),
    (re.compile(r" +"), " "),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


def normal(text: str) -> str:
    """Replace what differs between runs."""
    for pattern, replacement in VARYING:
        text = pattern.sub(replacement, text)
    return text


def test_commands_print_what_the_page_shows(url: str, tmp_path: Path) -> None:
    assert len(BLOCKS) == PAGE.count("<!-- console")
    assert len(FILES) == PAGE.count("<!-- file: ")
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, "utf-8")
    for block in BLOCKS:
        commands = re.findall(r"^\$ conure (.*)\n((?:[^$].*\n)*)", block, re.M)
        assert len(commands) == block.count("$ ") > 0
        for command, expected in commands:
            done = subprocess.run(
                [sys.executable, "-m", "conure", *shlex.split(command)],
                cwd=tmp_path,
                env={**environment(), "CONURE_URL": url},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert normal(done.stdout) == normal(expected), command
