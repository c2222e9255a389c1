"""The command of docs/dashboard.md prints what the page shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ...served import served

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "dashboard.md").read_text("utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_activity_of_an_idle_server_is_shown() -> None:
    found = re.search(
        r"<!-- tested: activity -->\n```console\n\$ (.*?)\n(.*?)\n```", PAGE, re.DOTALL
    )
    assert found
    command, shown = found.groups()
    with served("--engine", "fake") as url:
        printed = subprocess.run(
            command.replace("http://127.0.0.1:8400", url).split(),
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        ).stdout
    assert json.loads(printed) == json.loads(shown)


def test_pictures_exist() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert pictures
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)
