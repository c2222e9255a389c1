"""Keeps the journal within its limits of age and size while the server runs."""

from __future__ import annotations

import asyncio
import logging
import time

from ...program.errors import ConureError
from ...store.journal import DeleteRecord, Journal, RetentionLimits
from .program_directory import ProgramDirectory

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 60.0


async def retain(journal: Journal, programs: ProgramDirectory, limits: RetentionLimits) -> None:
    """Delete expired programs, now and every minute, until cancelled."""
    while True:
        try:
            await delete_expired(journal, programs, limits)
        except ConureError as error:
            logger.warning("expired programs were not deleted: %s", error)
        await asyncio.sleep(CHECK_EVERY_S)


async def delete_expired(
    journal: Journal, programs: ProgramDirectory, limits: RetentionLimits
) -> int:
    """Delete all expired programs, some at a time; return how many."""
    num_deleted = 0
    while ids := await journal.expired(limits, time.time()):
        await journal.append([DeleteRecord(programs=ids)])
        for id_ in ids:
            programs.remove(id_)
        num_deleted += len(ids)
    if num_deleted:
        logger.info("deleted %d expired programs from the journal", num_deleted)
    return num_deleted
