"""Retention: which ended programs are deleted, and the space they give back.

Programs are deleted oldest end first. A program that has not ended is never deleted by retention.
The sums of usage stay.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

BATCH = 100
"""Programs that are deleted in one transaction."""
MIN_BATCH = 10
"""The fewest programs that are deleted at a time if the journal is too large."""
MAX_PART = 2_000
"""The most pages that are given back in one transaction: 8 MB of the write-ahead log."""
MAX_SEARCHED = 100_000_000
"""The most entries of the list of free pages that are searched in one transaction."""
_CHILDREN = ("event", "value", "appended", "ending", "unfinished", "watched")
"""Tables whose rows refer to a program."""


class RetentionLimits(NamedTuple):
    """How long and how much is kept. None: without a limit."""

    max_age_s: float | None
    """Seconds since the end of a program."""
    max_bytes: int | None
    """Bytes of the journal that are in use."""


def find_expired(
    connection: sqlite3.Connection, limits: RetentionLimits, now: float
) -> tuple[str, ...]:
    """Return the ids of up to `BATCH` programs to delete, oldest end first.

    If the journal is too large: as many as would have to go if all had the mean size, and at least
    `MIN_BATCH`.
    """
    query = (
        "SELECT p.id FROM ending e JOIN program p ON p.number = e.program "
        "{where} ORDER BY e.finished_at LIMIT ?"
    )
    if limits.max_age_s is not None:
        where = "WHERE e.finished_at < ?"
        arguments = (now - limits.max_age_s, BATCH)
        ids = connection.execute(query.format(where=where), arguments).fetchall()
        if ids:
            return tuple(id_ for (id_,) in ids)
    used = used_bytes(connection)
    if limits.max_bytes is None or used <= limits.max_bytes:
        return ()
    (num_programs,) = connection.execute("SELECT count(*) FROM program").fetchone()
    num_excess = (used - limits.max_bytes) * num_programs // used
    ids = connection.execute(
        query.format(where=""), (min(BATCH, max(MIN_BATCH, num_excess)),)
    ).fetchall()
    return tuple(id_ for (id_,) in ids)


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of the journal's pages that are in use."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    return int((pages - _count_free(connection)) * size)


def _count_free(connection: sqlite3.Connection) -> int:
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(free)


def compact(connection: sqlite3.Connection) -> None:
    """Rewrite the journal without unused space."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("VACUUM")


def delete_programs(connection: sqlite3.Connection, programs: Sequence[str]) -> None:
    """Delete programs with all of their records and count the deletion; ignore unknown ids."""
    connection.execute("UPDATE head SET num_deletions = num_deletions + 1")
    for id_ in programs:
        row = connection.execute("SELECT number FROM program WHERE id = ?", (id_,)).fetchone()
        if row is not None:
            for table in _CHILDREN:
                connection.execute(f"DELETE FROM {table} WHERE program = ?", row)
            connection.execute("DELETE FROM program WHERE number = ?", row)


def erase_programs(connection: sqlite3.Connection, programs: Sequence[str]) -> None:
    """Delete programs and overwrite their content, in one transaction."""
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("BEGIN IMMEDIATE")
    delete_programs(connection, programs)
    connection.execute("COMMIT")


def give_back_space(connection: sqlite3.Connection) -> bool:
    """Return some unused pages to the disk, in one transaction; return whether more can follow.

    SQLite searches the list of free pages for most pages that it gives back, so a transaction gives
    back fewer pages if the list is long. A journal that was created without incremental vacuum
    keeps its unused pages until `compact` rewrites it.
    """
    num_free = _count_free(connection)
    if num_free == 0:
        return False
    num_pages = min(MAX_PART, max(1, MAX_SEARCHED // num_free))
    # The statement returns a row without columns per page. `execute` ends it after the first row.
    connection.executescript(f"PRAGMA incremental_vacuum({num_pages})")
    return 0 < _count_free(connection) < num_free
