"""The file behind the journal: where it lies, who may open it, which schema it has.

    <data>/lock               held (flock) by the one server that uses the folder
    <data>/journal.sqlite3    0600; SQLite's -wal and -shm beside it take over its mode

Kept true: only one connection of one process ever writes or checkpoints; all others are
opened read-only. The lock dies with its process, so `kill -9` leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from .records import JournalError

FILE_NAME = "journal.sqlite3"
LOCK_NAME = "lock"
BUSY_TIMEOUT_MS = 250
"""How long a write waits for somebody else's lock (a backup) before it counts as refused."""
OLDEST_SQLITE = (3, 37, 0)
"""The first version with STRICT tables."""
SEQ_BLOCK = 1_000_000
"""Sequence numbers are reserved on disk in blocks; a crash skips the rest of one."""


class Head(NamedTuple):
    """Where this opening of the journal starts."""

    next_seq: int
    reserved_seq: int
    """Numbers below this may be handed out without asking the disk."""
    generation: int


def lock_folder(folder: Path) -> int:
    """Make the data folder if it is missing and take it for this process.

    Returns:
        A file descriptor; closing it releases the folder. Children do not inherit it.

    Raises:
        JournalError: if another process holds it (`store.locked`) or it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError("store.unusable", f"cannot use data folder {folder}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise JournalError(
            "store.locked",
            f"data folder {folder} is in use by another server (process {owner or 'unknown'}); "
            "stop it, or choose another folder",
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    return lock


def open_writer(folder: Path) -> sqlite3.Connection:
    """Open the one connection that writes, with the newest schema.

    Raises:
        JournalError: if SQLite, the file system or the file are not what the journal needs.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise JournalError(
            "store.unusable", f"SQLite {sqlite3.sqlite_version} is too old, 3.37 or newer is needed"
        )
    path = folder / FILE_NAME
    try:
        _create(path)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            _configure(connection, path)
            _migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise JournalError("store.unusable", f"cannot use journal {path}: {error}") from error
    return connection


def open_reader(folder: Path) -> sqlite3.Connection:
    """Open a connection that can only read."""
    uri = (folder / FILE_NAME).absolute().as_uri() + "?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection


def begin_generation(connection: sqlite3.Connection) -> Head:
    """Count this opening and reserve the first block of sequence numbers, durably."""
    (next_seq,) = connection.execute("SELECT next_seq FROM head").fetchone()
    reserved = next_seq + SEQ_BLOCK
    (generation,) = connection.execute(
        "UPDATE head SET next_seq = ?, generation = generation + 1 RETURNING generation",
        (reserved,),
    ).fetchone()
    return Head(next_seq, reserved, generation)


def _create(path: Path) -> None:
    """Make the file with its mode before SQLite would, and its name durable."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for folder in (path.parent, path.parent.absolute().parent):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _configure(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise JournalError(
            "store.unusable",
            f"the file system of {path} cannot hold a write-ahead log (mode {mode}); "
            "use a local disk",
        )
    for pragma in (
        "synchronous = FULL",
        "foreign_keys = ON",
        "wal_autocheckpoint = 4000",
        "journal_size_limit = 67108864",  # a log that a long reader let grow shrinks again
        "cache_size = -16000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Apply the numbered files beyond the file's user_version, each in its transaction."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    scripts = sorted(
        (int(entry.name.split("_")[0]), entry.read_text("utf-8"))
        for entry in files("conure.server.store").iterdir()
        if entry.name.endswith(".sql")
    )
    newest = scripts[-1][0]
    if version > newest:
        raise JournalError(
            "store.unusable",
            f"journal {path} has schema {version}, this version knows {newest}; "
            "use the version that wrote it, or a newer one",
        )
    for number, script in scripts:
        if number > version:
            connection.executescript(
                f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;"
            )
