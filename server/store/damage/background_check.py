"""The check of a journal in a separate process, at low priority, while a server is running."""

from __future__ import annotations

import asyncio
import logging
import sys

from ..journal import Journal

logger = logging.getLogger(__name__)


async def check_journal(journal: Journal) -> None:
    """Check all records of an open journal; log damage and make the journal not healthy."""
    command = (sys.executable, "-m", "conure.cli.main", "journal", "check")
    process = await asyncio.create_subprocess_exec(
        "nice",
        "-n",
        "19",
        *command,
        "--data",
        str(journal.folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        line = output.decode("utf-8", "replace").strip().splitlines()[:1]
        logger.error("the journal is damaged: %s", "".join(line))
        journal.report_damage("".join(line))
