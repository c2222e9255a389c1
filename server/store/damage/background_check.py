"""The check of a journal in a separate process, at low priority, while a server is running."""

from __future__ import annotations

import asyncio
import logging
import sys

from ..journal import Journal

logger = logging.getLogger(__name__)


DAMAGED = "damaged: "
"""The beginning of the first line of a check that found damage."""


async def check_journal(journal: Journal) -> None:
    """Check all records of an open journal; log damage and make the journal not healthy.

    A check that does not finish says nothing about the journal: the log gets its reason.
    """
    command = ("nice", "-n", "19", sys.executable, "-m", "conure.cli.main", "journal", "check")
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--data",
            str(journal.folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        logger.warning("the check of the journal cannot be started: %s", error)
        return
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    lines = output.decode("utf-8", "replace").strip().splitlines() or [""]
    if process.returncode and lines[0].startswith(DAMAGED):
        summary = lines[0].removeprefix(DAMAGED)
        logger.error("the journal is damaged: %s", summary)
        journal.report_damage(summary)
    elif process.returncode:
        code = process.returncode
        logger.warning("the check of the journal did not finish (exit %d): %s", code, lines[-1])
