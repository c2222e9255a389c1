"""The commands of docs/operations.md print what the page shows, on a journal of three programs."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conure.server.store.journal import (
    EndRecord,
    EventRecord,
    Journal,
    ProgramRecord,
    Record,
    ValueRecord,
)

from ..served import environment

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8")
BLOCKS = dict(
    re.findall(r"^<!-- tested: (\w+) -->\n```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)


def ids() -> list[str]:
    return [f"p_{number:024x}" for number in (1, 2, 3)]


async def write_journal(folder: Path) -> None:
    """Write three programs, the last one to the write-ahead log only, as a killed server leaves
    them.
    """
    journal = Journal.open(folder / "live")
    for number, id_ in enumerate(ids()):
        records: list[Record] = [
            ProgramRecord(
                id=id_, tenant="t", idempotency_key=None, body_hash=b"", body=b"{}", created_at=1.0
            )
        ]
        event = EventRecord(program=id_, seq=journal.next_seq(), type="t", data=b"{}", at=1.0)
        if number < 2:
            value = ValueRecord(
                program=id_,
                variable="x",
                value=b"1",
                text=None,
                token_ids=None,
                tokenizer_hash=None,
                epoch=0,
                attempt=1,
            )
            last = EndRecord(
                program=id_, status="done", finished_at=2.0, receipt=b"{}", error=None, nodes=b"{}"
            )
            records += [value, event, last]
        else:
            records += [event]
        await journal.append(records)
        if number == 1:
            journal._writer.checkpoint()
    (folder / "data").mkdir()
    for name in ("commits.log", "journal.sqlite3", "journal.sqlite3-wal"):
        shutil.copy(folder / "live" / name, folder / "data" / name)
    await journal.close()


@pytest.mark.parametrize("name", BLOCKS)
def test_commands_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    asyncio.run(write_journal(tmp_path))
    expected = BLOCKS[name]
    printed = ""
    for command in re.findall(r"^\$ (.*)$", expected, re.MULTILINE):
        script = command.replace("conure ", f"{sys.executable} -m conure ", 1)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        printed += f"$ {command}\n{done.stdout}{done.stderr}"
    assert printed == expected


def test_every_flag_of_the_page_exists() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conure", "serve", "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    flags = set(re.findall(r"`(--[a-z-]+)", PAGE)) | {"--recover", "--data"}
    assert flags <= set(re.findall(r"--[a-z-]+", done.stdout))
