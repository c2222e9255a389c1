"""Salvage: continue with what is left of a damaged journal (`conure serve --recover`).

The damaged files are moved to a folder `damaged-<time>`, never deleted. Every readable record is
copied to a new journal, unless it has a checksum and does not match. A program that lost records is
marked, and the server ends it with `program.damaged` when it starts: it keeps the values that are
left, and does not run again, because clients may have read values that are lost.

Invariant: a salvage that is interrupted loses nothing. Before the new journal is complete, the
damaged files are where they were, and the next start salvages them again. Once the new journal is
complete (it is named `READABLE_NAME` then), the next start moves the remaining files
(`complete_salvage`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgspec

from ..database import FILE_NAME, SEQ_BLOCK, migrate, open_reader
from ..records import JournalError
from .commit_log import COMMIT_LOG_NAME, CommitLosses, find_losses
from .integrity import (
    READABLE_NAME,
    TABLES,
    JournalReport,
    Survey,
    interrupted_salvage,
    readable_rows,
    row_checksum,
    survey,
)

DAMAGED_PROBLEM = "program.damaged"
MAX_GENERATION = 2**40
"""A larger generation is damage: epochs, a million per generation, would exceed 64 bits."""


def salvage(folder: Path, report: JournalReport) -> Path:
    """Replace a damaged journal with its readable part; return the folder of the damaged files.

    The caller holds the lock of the data folder.

    Raises:
        JournalError: `store.unusable` if the new journal cannot be written or the files cannot be
            moved. The next salvage, or the next start, continues.
    """
    try:
        _remove_incomplete(folder)
        aside = _free_name(folder)
        aside.mkdir(mode=0o700)
        new = aside / f"{READABLE_NAME}.part"
        _write_new(folder, new)
        (aside / "report.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(report), indent=2)
        )
        new.rename(aside / READABLE_NAME)
        _sync(aside)
        _sync(folder)
        complete_salvage(folder)
    except (OSError, sqlite3.Error) as error:
        raise JournalError(
            "store.unusable", f"cannot write the readable part of {folder / FILE_NAME}: {error}"
        ) from error
    return aside


def complete_salvage(folder: Path) -> Path | None:
    """Move the files of a salvage whose new journal is complete; return the damaged files' folder.

    The caller holds the lock of the data folder. Without such a salvage nothing changes, and the
    result is None.
    """
    readable = interrupted_salvage(folder)
    if readable is None:
        return None
    aside = readable.parent
    for name in (f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", FILE_NAME, COMMIT_LOG_NAME):
        # A file that exists in both folders was created after the damaged one had been moved.
        if (folder / name).exists() and not (aside / name).exists():
            (folder / name).rename(aside / name)
    for name in (f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
        (folder / name).unlink(missing_ok=True)  # SQLite must not apply it to the new journal
    (folder / COMMIT_LOG_NAME).touch(mode=0o600)
    readable.rename(folder / FILE_NAME)
    _sync(folder)
    _sync(aside)
    return aside


def _remove_incomplete(folder: Path) -> None:
    """Remove the folders of salvages that ended before their new journal was complete."""
    for part in folder.glob(f"damaged-*/{READABLE_NAME}.part"):
        shutil.rmtree(part.parent)


def _free_name(folder: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (folder / f"damaged-{stamp}{suffix}" for suffix in ("", *"abcdefghijklmnop"))
    return next(name for name in names if not name.exists())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_new(folder: Path, new: Path) -> None:
    """Write the readable part of the journal to a new file."""
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(new, isolation_level=None)) as target:
        target.execute("PRAGMA auto_vacuum = INCREMENTAL")
        migrate(target)
        target.execute("BEGIN")
        _copy(folder, target)
        target.execute("COMMIT")
    _sync(new)


def _copy(folder: Path, target: sqlite3.Connection) -> None:
    """Copy what is readable, and set the head of the new journal."""
    losses = CommitLosses()
    last_seq = 0
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(closing(open_reader(folder)))
            found = survey(source)
            if (folder / COMMIT_LOG_NAME).exists():
                losses = find_losses(folder, source)
        except (sqlite3.DatabaseError, OSError):
            return  # nothing is readable
        changed = {*losses.accepted, *losses.changed}
        damaged = found.damaged | {n for n, id_ in found.programs.items() if id_ in changed}
        last_seq = _copy_records(source, target, found, damaged)
        _copy_sums(source, target)
        _copy_procedures(source, target)
        with contextlib.suppress(sqlite3.DatabaseError):
            head = source.execute("SELECT generation FROM head").fetchone()
            if head is not None and 0 <= head[0] < MAX_GENERATION:
                # The last start, which has increased the generation, may be among the losses.
                target.execute("UPDATE head SET generation = ?", (head[0] + 1,))
    # Lost events may have had higher numbers, and a number must never be assigned twice.
    next_seq = max(last_seq, losses.last_seq) + 2 * SEQ_BLOCK
    target.execute("UPDATE head SET next_seq = ?", (next_seq,))


def _copy_records(
    source: sqlite3.Connection, target: sqlite3.Connection, found: Survey, damaged: set[int]
) -> int:
    """Copy the records of all readable programs; return the highest sequence number, or 0."""
    last_seq = 0
    for table in TABLES:
        marks = ", ".join("?" * len(table.columns.split(",")))
        insert = f"INSERT OR IGNORE INTO {table.name} ({table.columns}) VALUES ({marks})"
        for rowid, row in readable_rows(source, table, found.evidence[table.name]):
            if rowid is None or row[0] not in found.programs:
                continue
            if table.name == "ending" and row[0] in damaged:
                continue  # the program ends again, with `program.damaged`
            try:
                program = found.programs[row[0]]
                # Records of older versions have no checksum.
                if row[-1] is None or row[-1] == row_checksum(table.name, program, row):
                    target.execute(insert, row)
            except (TypeError, ValueError, AttributeError, sqlite3.Error):
                continue
            if table.name == "event":
                last_seq = max(last_seq, row[1])
    _mark_damaged(source, target, found, damaged)
    return last_seq


def _mark_damaged(
    source: sqlite3.Connection, target: sqlite3.Connection, found: Survey, damaged: set[int]
) -> None:
    """Mark the programs that lost records now or in an earlier salvage, so that none runs again."""
    with contextlib.suppress(sqlite3.DatabaseError):
        query = "SELECT program FROM watched WHERE problem = ?"
        marked = {number for (number,) in source.execute(query, (DAMAGED_PROBLEM,))}
        damaged = damaged | (marked & found.programs.keys())
    target.executemany(
        "INSERT OR REPLACE INTO watched VALUES (?, 0, 0, ?)",
        [(number, DAMAGED_PROBLEM) for number in sorted(damaged)],
    )


def _copy_procedures(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy stored procedures, their aliases and their pins, if they are readable."""
    for table, columns in (
        ("procedure", "tenant, name, version, created_at, program"),
        ("procedure_alias", "tenant, name, alias, version"),
        ("procedure_pin", "tenant, name, version, expires_at"),
    ):
        marks = ", ".join("?" * len(columns.split(",")))
        with contextlib.suppress(sqlite3.DatabaseError):
            rows = source.execute(f"SELECT {columns} FROM {table}").fetchall()
            target.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)


def _copy_sums(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy the usage sums, which may count programs that were deleted; keep the new ones if the
    old ones are unreadable.
    """
    with contextlib.suppress(sqlite3.DatabaseError):
        # The triggers of the new journal have counted the copied programs.
        rows = source.execute("SELECT tenant, day, status, name, amount FROM usage").fetchall()
        target.execute("DELETE FROM usage")
        target.executemany("INSERT INTO usage VALUES (?, ?, ?, ?, ?)", rows)
