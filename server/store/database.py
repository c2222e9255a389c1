"""The journal's file: its location, its lock and its schema.

    <data>/lock               locked (flock) by the one server that uses the folder
    <data>/journal.sqlite3    mode 0600; SQLite's -wal and -shm files inherit it
    <data>/commits.log        the commits since the last checkpoint (`commit_log`)
    <data>/turn               the program that the server works on (`turn_mark`)
    <data>/reserve            disk space that a start on a full disk uses

Invariants: one connection of one process writes and checkpoints; all others are read-only. The lock
ends with its process, so a `kill -9` leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from .records import JournalError

FILE_NAME = "journal.sqlite3"
LOCK_NAME = "lock"
RESERVE_NAME = "reserve"
RESERVE_BYTES = (1024 * 1024, 512 * 1024, 256 * 1024, 128 * 1024)
"""Sizes of the reserve: the largest for which there is space."""
BUSY_TIMEOUT_MS = 250
"""How long a write waits for a lock of another process (a backup) before it counts as failed."""
OLDEST_SQLITE = (3, 37, 0)
"""First version with STRICT tables."""
SEQ_BLOCK = 1_000_000
"""Sequence numbers are reserved on disk in blocks. A crash skips the rest of a block."""


class JournalHead(NamedTuple):
    """Sequence numbers and generation at the opening of the journal."""

    next_seq: int
    reserved_seq: int
    """Numbers below this may be assigned without a write."""
    generation: int
    was_running: bool
    """Whether the last server that used the journal did not stop in order."""
    clock_shift_s: float
    """How far the wall clock was set forward since the last start on the same boot."""


def lock_folder(folder: Path) -> int:
    """Create the data folder if it is missing, and lock it for this process.

    Returns:
        A file descriptor, which children do not inherit. Closing it releases the lock.

    Raises:
        JournalError: if another process holds the lock (`store.locked`), or the folder cannot be
            created.
    """
    lock = _lock(folder)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    return lock


def check_folder(folder: Path) -> Path:
    """Check that a server could use the data folder, and leave nothing behind.

    Returns:
        The folder, or the nearest of its parents that exists.

    Raises:
        JournalError: as `lock_folder` and `check_file`.
    """
    existing = _existing_part(folder)
    try:
        if os.path.exists(folder / LOCK_NAME):
            os.close(_lock(folder))
        else:
            _check_creation(folder)
        check_file(folder)
    finally:
        for path in (folder.absolute(), *folder.absolute().parents):
            if path == existing:
                break
            # A server that started in the meantime has filled the folder.
            with contextlib.suppress(OSError):
                path.rmdir()
    return existing


def _existing_part(path: Path) -> Path:
    """Return the path or the nearest of its parents that exists, as an absolute path."""
    return next(
        each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each)
    )


def _check_creation(folder: Path) -> None:
    """Create the data folder if it is missing, and a temporary file in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A lock file could not be removed again: a server may have opened it in the meantime.
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unusable(folder, error) from error


def _lock(folder: Path) -> int:
    """Create the data folder if it is missing, and lock it without naming an owner."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
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
    return lock


def _unusable(folder: Path, error: OSError) -> JournalError:
    existing, reason = _existing_part(folder), str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = f"{existing} is a file; choose another folder"
    elif isinstance(error, PermissionError):
        reason = f"{existing} cannot be written by this user; change its owner, or choose another"
    return JournalError("store.unusable", f"cannot use data folder {folder}: {reason}")


def open_writer(folder: Path) -> sqlite3.Connection:
    """Open the writing connection and migrate the schema to the newest version.

    Raises:
        JournalError: if SQLite, the file system or the file does not meet the journal's
            requirements.
    """
    check_file(folder)
    path = folder / FILE_NAME
    try:
        is_new = not path.exists() or path.stat().st_size == 0
        _create(path)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            if is_new:
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            _configure(connection, path)
            migrate(connection)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise JournalError("store.unusable", f"cannot use journal {path}: {error}") from error
    return connection


def check_file(folder: Path) -> None:
    """Check that SQLite can be used and that the journal is a file, before anything is opened.

    Raises:
        JournalError: `store.unusable`.
    """
    path = folder / FILE_NAME
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        message = f"SQLite {sqlite3.sqlite_version} is too old; 3.37 or newer is required"
        raise JournalError("store.unusable", message)
    if path.is_symlink() and not path.exists():
        raise JournalError("store.unusable", f"journal {path} is a link to a file that is missing")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise JournalError("store.unusable", f"cannot use journal {path}: no permission to write")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, PermissionError())


def free_reserve(folder: Path) -> None:
    """Delete the reserve if the disk has less free space than the reserve has bytes."""
    reserve = folder / RESERVE_NAME
    with contextlib.suppress(OSError):
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize < RESERVE_BYTES[0]:
            reserve.unlink()


def fill_reserve(folder: Path) -> None:
    """Create the reserve, as large as there is space for."""
    reserve = folder / RESERVE_NAME
    if reserve.exists() and reserve.stat().st_size >= RESERVE_BYTES[0]:
        return
    for size in RESERVE_BYTES:
        with contextlib.suppress(OSError):
            file = os.open(reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
                return
            finally:
                os.close(file)
    with contextlib.suppress(OSError):
        reserve.unlink()


def open_reader(folder: Path) -> sqlite3.Connection:
    """Open a read-only connection."""
    uri = (folder / FILE_NAME).absolute().as_uri() + "?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    # SQLite's `lower` changes ASCII letters only.
    connection.create_function("casefold", 1, str.casefold, deterministic=True)
    return connection


def empty_log(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log to the main file and empty it; return False if a reader uses it."""
    (is_busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy


def begin_generation(connection: sqlite3.Connection) -> JournalHead:
    """Count this opening and reserve the first block of sequence numbers, durably."""
    next_seq, was_running, *clock = connection.execute(
        "SELECT next_seq, is_running, wall_s, uptime_s, boot_id FROM head"
    ).fetchone()
    reserved = next_seq + SEQ_BLOCK
    wall_s, uptime_s, boot_id = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id()
    is_same_boot = boot_id != "" and clock[2] == boot_id
    shift_s = (wall_s - clock[0]) - (uptime_s - clock[1]) if is_same_boot else 0.0
    (generation,) = connection.execute(
        "UPDATE head SET next_seq = ?, generation = generation + 1, is_running = 1, "
        "wall_s = ?, uptime_s = ?, boot_id = ? RETURNING generation",
        (reserved, wall_s, uptime_s, boot_id),
    ).fetchone()
    return JournalHead(next_seq, reserved, generation, bool(was_running), shift_s)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _create(path: Path) -> None:
    """Create the file with its mode before SQLite does, and make its name durable."""
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
            f"the file system of {path} does not support a write-ahead log (mode {mode}); "
            "use a local disk",
        )
    for pragma in (
        "synchronous = FULL",
        "foreign_keys = ON",
        "wal_autocheckpoint = 0",  # The writer's thread does it, and empties the commit log.
        "journal_size_limit = 67108864",  # Shrink a log that a long read let grow.
        "cache_size = -16000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def migrate(connection: sqlite3.Connection, *, upto: int | None = None) -> None:
    """Apply the numbered scripts after the file's user_version, each in a transaction."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    for number, script in _scripts():
        if number > version and (upto is None or number <= upto):
            connection.executescript(
                f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;"
            )


def newest_version() -> int:
    """Return the schema version of this version of Conure."""
    return _scripts()[-1][0]


def _scripts() -> list[tuple[int, str]]:
    return sorted(
        (int(entry.name.split("_")[0]), entry.read_text("utf-8"))
        for entry in files("conure.server.store.migrations").iterdir()
        if entry.name.endswith(".sql")
    )
