"""The check of a journal in a separate process, at low priority, while a server is running."""

from __future__ import annotations

import asyncio
import logging
import sys

from ..journal import Journal

logger = logging.getLogger(__name__)


FAILED = 1
"""Exit status of a check that could not read the journal."""
FINDING = "finding: "
"""How the first lines of a check begin that found damage."""
DAMAGED = "damaged: "
"""How the summary of a check begins that found damage."""
UNREADABLE = "conure: "
"""How the error of a check begins that could not read the journal."""


async def check_journal(journal: Journal) -> None:
    """Check all records of an open journal; log damage and make the journal not healthy.

    A check that does not finish and has found nothing says nothing about the journal: the log gets
    its reason.
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
    if found.startswith((FINDING, DAMAGED)):
        summary = _summary_of(found.splitlines())
    elif process.returncode == FAILED and errors.startswith(UNREADABLE):
        summary = errors.removeprefix(UNREADABLE)
    else:
        if code := process.returncode:
            logger.warning("the check of the journal did not finish (exit %d): %s", code, errors)
        return
    logger.error("the journal is damaged: %s", summary)
    journal.report_damage(summary)


def _summary_of(lines: list[str]) -> str:
    """Return the summary of a check that found damage; without one, its findings."""
    summary = next((line for line in lines if line.startswith(DAMAGED)), None)
    if summary is not None:
        return summary.removeprefix(DAMAGED)
    return "; ".join(line.removeprefix(FINDING) for line in lines)
