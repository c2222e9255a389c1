r"""The commit log: a second record of the commits that only the write-ahead log contains.

SQLite ends the replay of a damaged write-ahead log at the first bad frame, without an error. The
commit log has one line per commit since the last checkpoint: which row proves it, and which
programs it changed. At a start, a line whose commit is missing names programs that lost records.

A later commit may delete the row of an earlier one, and give its id to another row. So the journal
counts deletions, and each line has the count. A journal with a higher count contains the commit, a
journal with a lower count does not. If the counts are equal, the journal contains the commit
exactly if it has the row. Lines of earlier versions have no count: their rows decide as well, and
the search stops at the first of them that records a deletion.

    <CRC-32 of the rest, 8 hex digits> <JSON of a `CommitLine`>\n

Invariants: a line is written after the commit is durable and before its batches are acknowledged,
so a commit that has a line and is not in the journal is always a loss. Lines are not fsynced: they
survive the process, and after a power failure the log proves less, never more. A checkpoint that
empties the write-ahead log also empties the commit log.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from zlib import crc32

import msgspec
from msgspec import Struct

from ...program.decoding.typed_json import decode_record

COMMIT_LOG_NAME = "commits.log"
_encoder = msgspec.json.Encoder()


class CommitLine(Struct, frozen=True, array_like=True):
    """One commit."""

    table: str
    """Table of the row that proves the commit; `head` if the last record was a deletion: then the
    count proves the commit."""
    rowid: int
    """Id of the row; 0 for `head`."""
    last_seq: int
    """Highest sequence number of its events; 0 without events."""
    accepted: list[str]
    """Ids of new programs."""
    changed: list[str]
    """Ids of programs with other new records."""
    deleted: list[str]
    """Ids of programs that the commit removed."""
    num_deletions: int | None = None
    """Count of deletions in the journal after the commit; None in lines of earlier versions."""


_CONDITIONS = {
    "program": "number = ?",
    "appended": "position = ?",
    "value": "rowid = ?",
    "event": "seq = ?",
    "ending": "rowid = ?",
    "watched": "program = ?",  # in lines of earlier versions
}
"""The condition of the row that proves a commit, by table."""


class CommitLog:
    """The open commit log of the process that writes the journal."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / COMMIT_LOG_NAME, flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def add(self, line: CommitLine) -> None:
        """Append a line. On a full disk the log stays as it is."""
        text = _encoder.encode(line)
        try:
            written = os.write(self._file, b"%08x %b\n" % (crc32(text), text))
        except OSError:
            written = 0
        if written == len(text) + 10:
            self._size += written
        else:  # the commit is durable; without its line, a later loss of the commit is not noticed
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)

    def clear(self) -> None:
        """Empty the log."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            self._size = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class CommitLosses(Struct, frozen=True, kw_only=True):
    """Commits of the commit log that the journal does not contain."""

    num_commits: int = 0
    accepted: list[str] = []
    """Programs that were accepted, and not deleted, in these commits."""
    changed: list[str] = []
    """Other programs that lost records."""
    last_seq: int = 0
    """Highest sequence number that the log mentions."""
    num_bad_lines: int = 0
    """Lines that cannot be read."""
    is_end_unreadable: bool = False
    """Whether the last lines cannot be read, so that losses may be missing from this list."""


def find_losses(folder: Path, connection: sqlite3.Connection | None) -> CommitLosses:
    """Compare the commit log with the journal; without a connection every commit is lost.

    The write-ahead log loses commits from its end only, so the search ends at the last commit that
    is there.
    """
    content = (folder / COMMIT_LOG_NAME).read_bytes()
    # The last line may be incomplete: its commit was not acknowledged yet.
    lines = [_read_line(raw) for raw in content.split(b"\n")[:-1]]
    readable = [line for line in lines if line is not None]
    lost = readable if connection is None else _lost_lines(connection, readable)
    accepted: dict[str, None] = {}
    changed: dict[str, None] = {}
    for line in lost:
        accepted.update(dict.fromkeys(line.accepted))
        changed.update((id_, None) for id_ in line.changed if id_ not in accepted)
        for id_ in line.deleted:
            # The loss of its deletion brings back a program that was accepted before the lost
            # commits, without the changes in them.
            accepted.pop(id_, None)
    return CommitLosses(
        num_commits=len(lost),
        accepted=list(accepted),
        changed=[id_ for id_ in changed if id_ not in accepted],
        last_seq=max((line.last_seq for line in readable), default=0),
        num_bad_lines=len(lines) - len(readable),
        is_end_unreadable=bool(lines) and lines[-1] is None,
    )


def _read_line(raw: bytes) -> CommitLine | None:
    checksum, _, text = raw.partition(b" ")
    if checksum != b"%08x" % crc32(text):
        return None
    try:
        return decode_record(text, CommitLine)
    except msgspec.DecodeError:
        return None


def _lost_lines(connection: sqlite3.Connection, lines: list[CommitLine]) -> list[CommitLine]:
    """Return the lines after the last commit that is in the journal."""
    num_deletions = _count_deletions(connection)
    for number in range(len(lines), 0, -1):
        if _is_present(connection, lines[number - 1], num_deletions):
            return lines[number:]
    return lines


def _count_deletions(connection: sqlite3.Connection) -> int | None:
    """Return the number of deletions; None if it is unreadable, or was not counted yet."""
    try:
        (num_deletions,) = connection.execute("SELECT num_deletions FROM head").fetchone()
    except (sqlite3.DatabaseError, TypeError):
        return None
    return int(num_deletions)


def _is_present(
    connection: sqlite3.Connection, line: CommitLine, num_deletions: int | None
) -> bool:
    """Return whether a commit is in the journal; an unreadable one counts as lost."""
    if line.num_deletions is None:  # a line of an earlier version
        if line.deleted or line.table == "head":
            # A deletion proves nothing here, and the deleted rows may prove the lines before, so
            # the search ends.
            return True
    elif num_deletions is not None and num_deletions != line.num_deletions:
        return num_deletions > line.num_deletions
    elif line.table == "head":
        return num_deletions is not None
    query = f"SELECT 1 FROM {line.table} WHERE {_CONDITIONS[line.table]}"
    try:
        return connection.execute(query, (line.rowid,)).fetchone() is not None
    except sqlite3.DatabaseError:
        return False
