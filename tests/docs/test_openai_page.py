"""The scripts of docs/openai.md print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..served import environment, served

PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text("utf-8")
TESTED: dict[str, str] = dict(
    re.findall(r"^<!-- tested: (\w+) -->\n```python\n(.*?)^```$", PAGE, re.M | re.S)
)
PRINTED: dict[str, str] = dict(
    re.findall(r"^<!-- printed: (\w+) -->\n```\n(.*?)^```$", PAGE, re.M | re.S)
)


def test_every_marked_block_is_tested() -> None:
    assert PAGE.count("<!-- tested: ") == len(TESTED)
    assert PAGE.count("<!-- printed: ") == len(PRINTED)
    assert TESTED.keys() == PRINTED.keys()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--engine", "fake") as url:
        yield url


@pytest.mark.parametrize("name", sorted(TESTED))
def test_scripts_print_what_the_page_shows(name: str, url: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(TESTED[name], "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**environment(), "CONURE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PRINTED[name]
