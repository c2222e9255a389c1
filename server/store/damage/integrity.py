"""The check of a journal: its files, its structure, its records, and the commits of its commit log.

The check opens the file read-only and changes nothing. A healthy journal costs one pass over the
file. Only if something is wrong, every row is read on its own (`survey`), to name the programs
that are lost or damaged.

Invariants: a program is reported as kept only if all of its records are readable and match their
checksums. A program that may lack a record is reported as damaged. The memory of a check grows with
the number of programs, not with the size of the file.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from ..checksums import (
    append_checksum,
    end_checksum,
    event_checksum,
    program_checksum,
    value_checksum,
)
from ..database import FILE_NAME, migrate, newest_version, open_reader
from ..records import JournalError
from .commit_log import COMMIT_LOG_NAME, CommitLosses, find_losses
from .row_ids import RowIds

MAX_START_CHECK_BYTES = 64 * 1024 * 1024
"""Larger journals are not checked as a whole when a server starts."""
NAMES_VERSION, CHECKSUMS_VERSION = 10, 30
"""Schema versions that added columns."""
MAX_SHOWN = 5
"""Program ids in the one-line summary."""
MAX_PROBES = 100_000
"""Row ids that are tried between two readable parts of a table."""
READABLE_NAME = "readable.sqlite3"
"""The new journal of a salvage, in the folder of the damaged files, before it replaces them."""
BLOCK_BYTES = 1024 * 1024
"""Bytes of a file that are searched at once."""
_PROGRAM_ID = re.compile(rb"p_[0-9a-f]{24}")
_ID_LEN = 26
_TREE = re.compile(r"[Tt]ree (\d+)")


class JournalReport(Struct, frozen=True, kw_only=True):
    """The result of a check."""

    num_programs: int = 0
    """Programs that are kept: intact, or with the records that are left."""
    num_records: int = 0
    num_unchecked: int = 0
    """Records without a checksum, written by an older version."""
    lost: list[str] = []
    """Programs without usable records."""
    damaged: list[str] = []
    """Programs that lost records. The values that are left match their checksums."""
    traces: list[str] = []
    """Ids found in unreadable parts of the files. Programs deleted earlier may be among them."""
    findings: list[str] = []
    """What is wrong with the files."""
    is_thorough: bool = True
    """Whether all records were checked; otherwise only the programs that have not ended."""

    @property
    def is_intact(self) -> bool:
        """Whether nothing is lost or damaged."""
        return not (self.lost or self.damaged or self.findings)

    @property
    def summary(self) -> str:
        """One sentence: what is wrong, and how much is lost."""
        if self.is_intact:
            return f"{self.num_programs} programs are intact"
        parts = [
            f"{self.num_programs} programs are readable",
            _counted(self.lost, "lost"),
            _counted(self.damaged, "damaged"),
        ]
        why = "; ".join(self.findings[:2])
        return f"{', '.join(parts)} ({why})" if why else ", ".join(parts)


def _counted(ids: list[str], what: str) -> str:
    if not ids:
        return f"0 {what}"
    more = ", ..." if len(ids) > MAX_SHOWN else ""
    return f"{len(ids)} {what}: {', '.join(ids[:MAX_SHOWN])}{more}"


class Survey(NamedTuple):
    """The usable content of a journal."""

    programs: dict[int, str]
    """Ids of the programs whose own row is readable, by number."""
    damaged: set[int]
    """Numbers among them that lost records, or may have."""
    lost: list[str]
    num_records: int
    num_unchecked: int
    findings: list[str]
    evidence: dict[str, RowIds]
    """The row ids in the index of each table."""


class _Table(NamedTuple):
    name: str
    key: str
    columns: str
    """The program's number first, the checksum last."""
    covering_index: str
    """A covering index, which is a second record of the existing rows."""


TABLES = (
    _Table(
        "program",
        "number",
        "number, id, tenant, idempotency_key, body_hash, created_at, body, name, crc",
        "sqlite_autoindex_program_1",
    ),
    _Table("appended", "position", "program, position, body, crc", "appended_program"),
    _Table(
        "value",
        "rowid",
        "program, variable, epoch, attempt, tokenizer_hash, token_ids, text, value, crc",
        "sqlite_autoindex_value_1",
    ),
    _Table("event", "seq", "program, seq, type, at, data, crc", "event_program"),
    _Table(
        "ending",
        "rowid",
        "program, status, finished_at, receipt, error, nodes, crc",
        "sqlite_autoindex_ending_1",
    ),
)


def row_checksum(table: str, program: str, row: Any) -> int:
    """Return the checksum that a row of `TABLES` must have."""
    if table == "program":
        return program_checksum(*row[1:-1])
    if table == "appended":
        return append_checksum(program, row[2])
    if table == "value":
        return value_checksum(program, *row[1:-1])
    if table == "event":
        return event_checksum(program, *row[1:-1])
    return end_checksum(program, *row[1:-1])


# --- the check ----------------------------------------------------------------------------


def inspect(
    folder: Path,
    *,
    is_thorough: bool | None = None,
    on_finding: Callable[[str], None] = lambda _: None,
) -> JournalReport:
    """Check the journal in a data folder.

    Args:
        folder: the data folder.
        is_thorough: check all records; None decides by the size of the file.
        on_finding: receives what is wrong with the files before every row is read on its own,
            which takes long.

    Raises:
        JournalError: `store.unusable` if the file is another program's or a newer version's, or has
            tables without a schema version.
    """
    if interrupted_salvage(folder) is not None:
        return JournalReport(findings=["a recovery was interrupted; the next start completes it"])
    path = folder / FILE_NAME
    # A server that starts creates the journal before the commit log.
    has_log = (folder / COMMIT_LOG_NAME).exists()
    size = path.stat().st_size if path.exists() else 0
    if is_thorough is None:
        is_thorough = size <= MAX_START_CHECK_BYTES
    if size == 0:
        return _report_missing(folder) if has_log else JournalReport()
    try:
        with closing(open_reader(folder)) as connection:
            version = _check_owner(connection, path)
            if version == 0:
                return _report_missing(folder) if has_log else JournalReport()
            return _inspect_open(
                folder, connection, version, is_thorough=is_thorough, on_finding=on_finding
            )
    except sqlite3.OperationalError as error:
        raise JournalError("store.unusable", f"cannot read journal {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        if not has_log and "not a database" in str(error):
            raise JournalError("store.unusable", f"{path} is not a journal: {error}") from error
        finding = f"{FILE_NAME} cannot be read: {error}"
        return JournalReport(findings=[finding], traces=find_traces(folder, set()))


def interrupted_salvage(folder: Path) -> Path | None:
    """Return the new journal of a salvage that has not replaced the damaged files; else None."""
    return next(folder.glob(f"damaged-*/{READABLE_NAME}"), None)


def _inspect_open(
    folder: Path,
    connection: sqlite3.Connection,
    version: int,
    *,
    is_thorough: bool,
    on_finding: Callable[[str], None],
) -> JournalReport:
    # A server may be writing. The first query after `BEGIN` takes the snapshot, and the commit log
    # is read before that query.
    connection.execute("BEGIN")
    losses = _losses(folder, connection, version)
    findings = _loss_findings(losses)
    try:
        findings += _structure_findings(connection, version, is_thorough=is_thorough)
        if not findings and is_thorough:
            report = _check_records(connection)
            if report is not None:
                return report
            findings.append("records do not match their checksums")
        if not findings and not is_thorough:
            (num,) = connection.execute("SELECT count(*) FROM program").fetchone()
            return JournalReport(num_programs=num, is_thorough=False)
    except sqlite3.DatabaseError as error:
        findings.append(f"the structure of {FILE_NAME} is damaged: {error}")
    for finding in findings:
        on_finding(finding)
    return _report_damage(folder, survey(connection), losses, findings)


def _report_missing(folder: Path) -> JournalReport:
    """Return the report of a folder whose commit log is all that is left."""
    finding = f"{FILE_NAME} is missing or empty, and {COMMIT_LOG_NAME} shows that a journal existed"
    losses = find_losses(folder, None)
    lost = [*losses.accepted, *losses.changed]
    return JournalReport(lost=lost, findings=[finding], traces=find_traces(folder, set(lost)))


def _check_owner(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of the journal; 0 if the file has no tables yet."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if version > newest_version():
        raise JournalError(
            "store.unusable",
            f"journal {path} has schema version {version}, the newest supported is "
            f"{newest_version()}; use the version of Conure that wrote it, or a newer one",
        )
    if version == 0 and names:
        if not {"head", "program"} <= names:
            raise JournalError("store.unusable", f"{path} is a database of another program")
        raise JournalError(
            "store.unusable",
            f"journal {path} has tables and no schema version (`PRAGMA user_version` is 0); "
            "restore the file from a backup",
        )
    return int(version)


def _structure_findings(
    connection: sqlite3.Connection, version: int, *, is_thorough: bool
) -> list[str]:
    findings = []
    if is_thorough:
        rows = connection.execute("PRAGMA integrity_check(20)").fetchall()
        messages = [str(message) for (message,) in rows]
        if messages != ["ok"]:
            findings.append(f"the structure of {FILE_NAME} is damaged")
    if _schema_of(connection) != _expected_schema(version):
        findings.append(f"the schema of {FILE_NAME} is damaged")
    head = connection.execute("SELECT next_seq, generation FROM head").fetchone()
    (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
    if head is None or head[0] <= last or head[1] < 0:
        findings.append(f"the head of {FILE_NAME} is damaged")
    return findings


def _schema_of(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2").fetchall()


def _expected_schema(version: int) -> list[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(connection, upto=version)
        return _schema_of(connection)


def _losses(folder: Path, connection: sqlite3.Connection, version: int) -> CommitLosses | None:
    """Return the lost commits, or None if a journal that has a commit log lacks it."""
    log = folder / COMMIT_LOG_NAME
    if log.exists():
        return find_losses(folder, connection)
    # A server creates the log before it counts its first start. If the log is there now, a server
    # that starts has created it in the meantime.
    if version < CHECKSUMS_VERSION or not _was_started(connection) or log.exists():
        return CommitLosses()
    return None


def _was_started(connection: sqlite3.Connection) -> bool:
    try:
        return bool(connection.execute("SELECT generation FROM head").fetchone() != (0,))
    except sqlite3.DatabaseError:
        return True


def _loss_findings(losses: CommitLosses | None) -> list[str]:
    if losses is None:
        return [f"{COMMIT_LOG_NAME} is missing, so later losses cannot be excluded"]
    findings = []
    if losses.num_commits:
        findings.append(f"the last {losses.num_commits} acknowledged commits are missing")
    if losses.is_end_unreadable:
        findings.append(f"the end of {COMMIT_LOG_NAME} is unreadable")
    return findings


def _check_records(connection: sqlite3.Connection) -> JournalReport | None:
    """Compare all records with their checksums; None if one does not match."""
    programs: dict[int, str] = {}
    num_records = num_unchecked = 0
    for table in TABLES:
        columns = _stored_columns(connection, table)
        for row in connection.execute(f"SELECT {columns} FROM {table.name}"):
            if table.name == "program":
                programs[row[0]] = row[1]
            program = programs.get(row[0])
            if program is None or not _matches(table, program, row):
                return None
            num_unchecked += row[-1] is None
            num_records += 1
    return JournalReport(
        num_programs=len(programs), num_records=num_records, num_unchecked=num_unchecked
    )


def _report_damage(
    folder: Path, found: Survey, losses: CommitLosses | None, findings: list[str]
) -> JournalReport:
    losses = losses or CommitLosses()
    kept = set(found.programs.values())
    damaged = [found.programs[number] for number in sorted(found.damaged)]
    damaged += [id_ for id_ in (*losses.accepted, *losses.changed) if id_ in kept]
    lost = [id_ for id_ in (*found.lost, *losses.accepted, *losses.changed) if id_ not in kept]
    lost = list(dict.fromkeys(lost))
    is_unreadable = bool(found.findings) or any("structure" in each for each in findings)
    return JournalReport(
        num_programs=len(found.programs),
        num_records=found.num_records,
        num_unchecked=found.num_unchecked,
        lost=lost,
        damaged=list(dict.fromkeys(damaged)),
        traces=find_traces(folder, kept | set(lost)) if is_unreadable else [],
        findings=[*findings, *found.findings],
    )


def find_traces(folder: Path, known: set[str]) -> list[str]:
    """Return the program ids in the files that are not known, in the order of the file."""
    traces: dict[str, None] = {}
    for name in (FILE_NAME, f"{FILE_NAME}-wal"):
        path = folder / name
        if path.exists():
            traces.update((id_, None) for id_ in _ids_in(path) if id_ not in known)
    return list(traces)


def _ids_in(path: Path) -> Iterator[str]:
    end = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            content = end + block
            for found in _PROGRAM_ID.findall(content):
                yield found.decode()
            end = content[-(_ID_LEN - 1) :]  # the beginning of an id that the next block completes


# --- the survey ---------------------------------------------------------------------------


def survey(connection: sqlite3.Connection) -> Survey:
    """Read every row on its own, and compare the tables with their indexes.

    A row that an index names and that cannot be read, or does not match its checksum, makes its
    program damaged. Where an index has a gap and its table may have one, too, all programs in the
    gap are damaged.
    """
    programs: dict[int, str] = {}
    damaged: set[int] = set()
    lost: list[str] = []
    findings: list[str] = []
    num_records = num_unchecked = 0
    suspects = _damaged_objects(connection)
    all_evidence: dict[str, RowIds] = {}
    for table in TABLES:
        evidence, gap = _index_evidence(connection, table)
        all_evidence[table.name] = evidence
        good = RowIds()
        is_complete = table.name not in suspects
        for rowid, row in readable_rows(connection, table, evidence):
            if rowid is None:
                is_complete = False
                continue
            program = row[1] if table.name == "program" else programs.get(row[0])
            if program is None or not _matches(table, program, row):
                damaged.add(row[0])
                continue
            if table.name == "program":
                programs[row[0]] = program
            good.add(rowid)
            num_records += 1
            num_unchecked += row[-1] is None
        if not is_complete:
            findings.append(f"parts of the table {table.name} are unreadable")
        missing = _missing_owners(connection, table, good)
        if table.name == "program":
            known = set(programs.values())
            lost += [str(owner) for owner in missing if str(owner) not in known]
        else:
            damaged.update(owner for owner in missing if isinstance(owner, int))
            if gap is not None and not is_complete:
                low, high = gap
                damaged.update(number for number in programs if low <= number <= high)
    return Survey(
        programs,
        damaged & programs.keys(),
        lost,
        num_records,
        num_unchecked,
        findings,
        all_evidence,
    )


def _stored_columns(connection: sqlite3.Connection, table: _Table) -> str:
    """Return the columns of a table. Older journals have no checksums and names."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    columns = table.columns
    if version < NAMES_VERSION:
        columns = columns.replace("name", "''")
    return columns if version >= CHECKSUMS_VERSION else columns.replace("crc", "NULL")


def _matches(table: _Table, program: str, row: Any) -> bool:
    try:
        return row[-1] is None or row[-1] == row_checksum(table.name, program, row)
    except (TypeError, ValueError, AttributeError):
        return False  # a damaged row may have values of any type


def _damaged_objects(connection: sqlite3.Connection) -> set[str]:
    """Return the tables whose trees fail SQLite's check; all if they cannot be distinguished."""
    everything = {table.name for table in TABLES}
    try:
        rows = connection.execute("PRAGMA integrity_check(10000)").fetchall()
        trees = dict(connection.execute("SELECT rootpage, name FROM sqlite_master").fetchall())
    except sqlite3.DatabaseError:
        return everything
    messages = [line for (message,) in rows for line in str(message).splitlines()]
    damaged: set[str] = set()
    for message in messages:
        if message == "ok" or message.startswith(("***", "row ", "wrong # of entries")):
            continue
        tree = _TREE.search(message)
        if tree is None:
            return everything
        damaged.add(trees.get(int(tree[1]), ""))
    return damaged


def _index_evidence(
    connection: sqlite3.Connection, table: _Table
) -> tuple[RowIds, tuple[int, float] | None]:
    """Return the rows that the index names, and the gap in the index, if any: a range of program
    numbers.
    """
    evidence = RowIds()
    last: Any = None
    try:
        for rowid, owner in _index_entries(connection, table):
            evidence.add(rowid)
            last = owner
        return evidence, None
    except sqlite3.DatabaseError:
        pass
    first: Any = None
    try:
        for rowid, owner in _index_entries(connection, table, is_backwards=True):
            if rowid in evidence:
                break
            evidence.add(rowid)
            first = owner
    except sqlite3.DatabaseError:
        pass
    if table.name == "program":
        return evidence, None
    return evidence, (last or 0, float("inf") if first is None else first)


def _missing_owners(connection: sqlite3.Connection, table: _Table, good: RowIds) -> list[Any]:
    """Return the owners of the rows that the index names and that are not good, each once."""
    owners: dict[Any, None] = {}
    for is_backwards in (False, True):
        try:
            for rowid, owner in _index_entries(connection, table, is_backwards=is_backwards):
                if rowid not in good:
                    owners[owner] = None
            break
        except sqlite3.DatabaseError:
            continue
    return list(owners)


def _index_entries(
    connection: sqlite3.Connection, table: _Table, *, is_backwards: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield the row id of each row that the index names, and its owner.

    The owner is a number of a program; of a row of `program`, its id.
    """
    owner = "id" if table.name == "program" else "program"
    order = owner + _second_column(table)
    if is_backwards:
        order = order.replace(",", " DESC,") + " DESC"
    yield from connection.execute(
        f"SELECT {table.key}, {owner} FROM {table.name} INDEXED BY {table.covering_index} "
        f"ORDER BY {order}"
    )


def _second_column(table: _Table) -> str:
    return {"value": ", variable", "event": ", seq", "appended": ", position"}.get(table.name, "")


def readable_rows(
    connection: sqlite3.Connection, table: _Table, evidence: RowIds
) -> Iterator[tuple[int | None, Any]]:
    """Yield every readable row with its row id; `(None, ())` once for unreadable parts.

    Reads forwards to the first unreadable page, then backwards to the last one, and then tries the
    row ids in between. A table that the schema lacks has no rows.
    """
    columns = _stored_columns(connection, table)
    query = f"SELECT {table.key}, {columns} FROM {table.name} NOT INDEXED"
    low = -1
    try:
        for rowid, *row in connection.execute(f"{query} ORDER BY {table.key}"):
            low = rowid
            yield rowid, row
        return
    except sqlite3.DatabaseError:
        yield None, ()
    if not _has_table(connection, table):
        return
    high: int | None = None
    try:
        above = f"{query} WHERE {table.key} > ? ORDER BY {table.key} DESC"
        for rowid, *row in connection.execute(above, (low,)):
            high = rowid
            yield rowid, row
    except sqlite3.DatabaseError:
        pass
    end = low + MAX_PROBES if high is None else min(high, low + MAX_PROBES)
    for rowid in evidence.between(low, high) if evidence else range(low + 1, end):
        try:
            found = connection.execute(f"{query} WHERE {table.key} = ?", (rowid,)).fetchone()
        except sqlite3.DatabaseError:
            continue
        if found is not None:
            yield rowid, found[1:]


def _has_table(connection: sqlite3.Connection, table: _Table) -> bool:
    """Return whether the schema is readable and has a table."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    try:
        return connection.execute(query, (table.name,)).fetchone() is not None
    except sqlite3.DatabaseError:
        return False
