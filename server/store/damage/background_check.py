"""The check of a journal in a separate process, at low priority, while a server is running."""

from __future__ import annotations

import asyncio
import logging
import sys

from ..journal import Journal

logger = logging.getLogger(__name__)


FAILED = 1
"""Exit status of a check that found damage, or could not read the journal."""
DAMAGED = "damaged: "
"""How a check that found damage begins."""
UNREADABLE = "conure: "
"""How the error of a check begins that could not read the journal."""


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
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        logger.warning("the check of the journal cannot be started: %s", error)
        return
    try:
        outputs = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    found, errors = (output.decode("utf-8", "replace").strip() for output in outputs)
    if process.returncode == FAILED and found.startswith(DAMAGED):
        summary = found.removeprefix(DAMAGED).partition("\n")[0]
    elif process.returncode == FAILED and errors.startswith(UNREADABLE):
        summary = errors.removeprefix(UNREADABLE)
    else:
        if code := process.returncode:
            logger.warning("the check of the journal did not finish (exit %d): %s", code, errors)
        return
    logger.error("the journal is damaged: %s", summary)
    journal.report_damage(summary)
