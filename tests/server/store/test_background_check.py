"""The check of an open journal in another process."""

from __future__ import annotations

import logging
import stat
import sys
from pathlib import Path

import pytest

from conure.server.store.damage.background_check import check_journal
from conure.server.store.journal import Journal

from .journal_records import program


def python_that(tmp_path: Path, commands: str) -> str:
    """Return the path of a script that runs instead of Python."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{commands}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


async def test_an_intact_journal_stays_healthy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal.open(tmp_path / "data")
    await journal.append([program("p")])
    await check_journal(journal)
    assert (journal.problem, caplog.text) == (None, "")
    await journal.close()


@pytest.mark.parametrize(
    "commands",
    [
        "echo warning >&2; echo 'finding: a page'; echo 'damaged: 1 lost: p_after'; exit 1",
        "echo 'damaged: 1 lost: p_after'; echo 'damaged: p_other'; exit 1",
        "echo 'finding: 1 lost: p_after'; kill -9 $$",
        "echo 'conure: 1 lost: p_after' >&2; exit 1",
    ],
)
async def test_damage_makes_the_journal_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: str
) -> None:
    journal = Journal.open(tmp_path / "data")
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, commands))
    await check_journal(journal)
    assert journal.problem == "the journal is damaged: 1 lost: p_after"
    await journal.close()


@pytest.mark.parametrize("commands", ["exit 130", "kill -9 $$", "echo Traceback >&2; exit 1"])
async def test_a_check_that_does_not_finish_is_no_damage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    commands: str,
) -> None:
    journal = Journal.open(tmp_path / "data")
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, commands))
    with caplog.at_level(logging.WARNING):
        await check_journal(journal)
    assert "the check of the journal did not finish" in caplog.text
    assert journal.problem is None
    await journal.close()


async def test_a_check_that_cannot_start_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal.open(tmp_path / "data")
    monkeypatch.setenv("PATH", str(tmp_path))
    await check_journal(journal)
    assert "cannot be started" in caplog.text
    assert journal.problem is None
    await journal.close()
