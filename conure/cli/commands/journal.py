"""`conure journal`: check, back up, compact a journal, and delete programs from it.

    check      report whether everything is intact; a server may be running
    backup     copy the journal to a new data folder; a server may be running
    compact    give unused space back to the disk; no server may be running
    delete     remove programs with their content for good; no server may be running

Invariants: results go to stdout, an error is one line. `check` changes nothing.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from conure.server.config import default_data_folder
from conure.server.store.damage.background_check import DAMAGED, FINDING
from conure.server.store.damage.commit_log import COMMIT_LOG_NAME
from conure.server.store.damage.integrity import JournalReport, inspect
from conure.server.store.database import (
    FILE_NAME,
    check_file,
    empty_log,
    lock_folder,
    open_reader,
    open_writer,
)
from conure.server.store.records import JournalError
from conure.server.store.retention import compact as compact_file
from conure.server.store.retention import erase_programs

from ..command import CommandError, ExitCode, file_path
from ..program_ids import HELP, MAX_SHOWN, prefix_of, unique_id

ACTIONS = {
    "check": "report whether the journal is intact; a server may be running",
    "backup": "copy the journal to a new folder; a server may be running",
    "compact": "give unused space back to the disk; stop the server first",
    "delete": "delete programs with their content for good; stop the server first",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `conure journal`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--data",
            type=file_path,
            metavar="DIR",
            help="journal directory (default: as for serve)",
        )
        if name == "check":
            action.add_argument("--json", action="store_true", help="print the report as JSON")
        if name == "backup":
            action.add_argument("target", type=file_path, metavar="TARGET", help="folder to create")
        if name == "delete":
            action.add_argument("programs", nargs="+", metavar="PROGRAM", help=HELP)


def run(arguments: argparse.Namespace) -> int:
    """Execute one action."""
    folder = arguments.data or default_data_folder()
    match arguments.action:
        case "check":
            is_intact = check(folder, as_json=arguments.json)
            return ExitCode.DONE if is_intact else ExitCode.FAILED
        case "backup":
            backup(folder, arguments.target)
        case "compact":
            compact(folder)
        case "delete":
            delete(folder, arguments.programs)
    return ExitCode.DONE


def check(folder: Path, *, as_json: bool) -> bool:
    """Print the state of the journal in a data folder; return whether it is intact.

    Raises:
        CommandError: if there is no journal, or it cannot be read.
    """
    _check_exists(folder)
    shown: list[str] = []

    def show(finding: str) -> None:
        shown.append(finding)
        if not as_json:
            _print(f"{FINDING}{finding}")
            sys.stdout.flush()  # the rest of the check takes long, and may not finish

    try:
        check_file(folder)
        report = inspect(folder, is_thorough=True, on_finding=show)
    except (JournalError, OSError) as error:
        raise CommandError(str(error)) from error
    if as_json:
        _print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(_described(report, shown))
    return report.is_intact


def _described(report: JournalReport, shown: Sequence[str]) -> str:
    """Return the lines of a report without the findings that were shown."""
    if report.is_intact:
        lines = [f"intact: {report.num_programs} programs, {report.num_records} records"]
        if report.num_unchecked:
            lines.append(f"{report.num_unchecked} records of older versions have no checksum")
        return "\n".join(lines)
    lines = [f"{FINDING}{finding}" for finding in report.findings if finding not in shown]
    lines.append(f"{DAMAGED}{report.summary}")
    lines += [f"lost: {id_}" for id_ in report.lost]
    lines += [f"{DAMAGED}{id_}" for id_ in report.damaged]
    lines += [f"trace: {id_}" for id_ in report.traces]
    lines.append("`conure serve --recover` continues with what is left")
    return "\n".join(lines)


def backup(folder: Path, target: Path) -> None:
    """Copy the journal to a new data folder.

    Raises:
        CommandError: if the target exists, or the copy fails.
    """
    _check_exists(folder)
    if target.exists():
        raise CommandError(f"{target} exists; choose a new folder")
    try:
        target.mkdir(mode=0o700, parents=True)
        copy = target / FILE_NAME
        os.close(os.open(copy, os.O_RDWR | os.O_CREAT, 0o600))
        with closing(open_reader(folder)) as source, closing(sqlite3.connect(copy)) as connection:
            source.backup(connection)
            connection.execute("UPDATE head SET is_running = 0")
            connection.commit()
            empty_log(connection)
        (target / COMMIT_LOG_NAME).touch(mode=0o600)
        report = inspect(target, is_thorough=True)
    except (JournalError, OSError, sqlite3.Error) as error:
        raise CommandError(f"cannot copy {folder} to {target}: {error}") from error
    if not report.is_intact:
        raise CommandError(f"the copy in {target} is damaged: {report.summary}")
    _print(f"copied {report.num_programs} programs to {target}")


def compact(folder: Path) -> None:
    """Give unused space of the journal back to the disk.

    Raises:
        CommandError: if a server uses the folder, or the disk is full.
    """
    before = _size(folder)
    with _locked(folder) as connection:
        compact_file(connection)
    _print(f"compacted {folder / FILE_NAME} from {before:,} to {_size(folder):,} bytes")


def delete(folder: Path, programs: Sequence[str]) -> None:
    """Remove programs with all of their content, ended or not.

    Raises:
        CommandError: if a server uses the folder, or a program is unknown.
        UsageError: if the ids of several programs begin with one of `programs`.
    """
    with _locked(folder) as connection:
        ids = [_find(connection, word, folder) for word in programs]
        erase_programs(connection, ids)
    _print(f"deleted {len(ids)} programs from {folder / FILE_NAME}")


def _find(connection: sqlite3.Connection, word: str, folder: Path) -> str:
    """Return the id of the program whose id begins with a word."""
    query = "SELECT id FROM program WHERE substr(id, 1, length(:prefix)) = :prefix LIMIT :most"
    parameters = {"prefix": prefix_of(word), "most": MAX_SHOWN + 1}
    ids = [id_ for (id_,) in connection.execute(query, parameters)]
    if not ids:
        raise CommandError(f"there is no program {word} in {folder}")
    return unique_id(word, ids)


@contextmanager
def _locked(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the journal of a folder that no server uses for writing.

    Raises:
        CommandError: also if a reader still uses earlier content: before the command, which then
            changes nothing, or after it.
    """
    _check_exists(folder)
    try:
        lock = lock_folder(folder)
        try:
            report = inspect(folder, is_thorough=True)
            if not report.is_intact:
                raise CommandError(f"the journal is damaged: {report.summary}")
            with closing(open_writer(folder)) as connection:
                # The commit log is emptied first, because a deletion removes rows that prove lines.
                if not empty_log(connection):
                    raise CommandError(
                        f"a reader uses the journal in {folder}, as a check or a backup; repeat "
                        "the command after its end"
                    )
                (folder / COMMIT_LOG_NAME).write_bytes(b"")
                yield connection
                if not empty_log(connection):
                    raise CommandError(
                        f"the change is written, but the files in {folder} still contain the "
                        "earlier content, because a reader uses it; after its end, "
                        "`conure journal compact` removes the content"
                    )
        finally:
            os.close(lock)
    except JournalError as error:
        raise CommandError(str(error)) from error
    except sqlite3.Error as error:
        raise CommandError(f"cannot write the journal in {folder}: {error}") from error


def _check_exists(folder: Path) -> None:
    if not (folder / FILE_NAME).exists() and not (folder / COMMIT_LOG_NAME).exists():
        raise CommandError(f"there is no journal in {folder}")


def _size(folder: Path) -> int:
    path = folder / FILE_NAME
    return path.stat().st_size if path.exists() else 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
