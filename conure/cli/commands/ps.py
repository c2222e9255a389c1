"""`conure ps`: list the programs of a server."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from conure.adapters.client import Client
from conure.server.program.status import ProgramSummary

from ..command import ExitCode, UsageError, add_url, connect
from ..program_ids import PAGE_LIMIT
from ..terminal import duration, pretty, table

STATUSES = ("running", "done", "failed", "cancelled", "deadline_exceeded")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure ps`."""
    add_url(parser)
    parser.add_argument("-a", "--all", action="store_true", help="also programs that have ended")
    parser.add_argument("--status", choices=STATUSES, help="only programs with this status")
    parser.add_argument(
        "-n", type=int, default=20, dest="limit", help="at most this many (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one line per program, the newest first."""
    if arguments.limit < 1:
        raise UsageError(f"-n is {arguments.limit}; it must be at least 1")
    status = arguments.status or (None if arguments.all else "running")
    with connect(arguments.url) as client:
        programs, has_more = _newest(client, status, arguments.limit)
    if has_more:
        sys.stderr.write(f"these are the newest {arguments.limit}; a larger -n lists more\n")
    if arguments.json:
        sys.stdout.write(pretty(programs) + "\n")
        return ExitCode.DONE
    if not programs:
        hint = "" if arguments.all or arguments.status else "; -a lists those that have ended, too"
        sys.stderr.write(f"no programs{hint}\n")
        return ExitCode.DONE
    now = datetime.now(UTC)
    rows = [_row(program, now) for program in programs]
    sys.stdout.write(table(("PROGRAM", "NAME", "STATUS", "CREATED", "TOOK", "CALLS"), rows))
    return ExitCode.DONE


def _newest(client: Client, status: str | None, limit: int) -> tuple[list[ProgramSummary], bool]:
    """Return up to `limit` programs, and whether there are more."""
    programs: list[ProgramSummary] = []
    cursor = None
    while True:
        num_missing = limit - len(programs)
        page = client.programs(status=status, cursor=cursor, limit=min(num_missing, PAGE_LIMIT))
        programs += page.programs
        cursor = page.next
        if cursor is None or len(programs) >= limit:
            return programs, cursor is not None


def _row(program: ProgramSummary, now: datetime) -> tuple[str, ...]:
    # The server's clock may be ahead.
    created = min(datetime.fromisoformat(program.created_at), now)
    ended = None if program.finished_at is None else datetime.fromisoformat(program.finished_at)
    return (
        program.id,
        program.name or "-",
        program.status,
        f"{duration((now - created).total_seconds())} ago",
        duration(((ended or now) - created).total_seconds()),
        "-" if program.calls is None else str(program.calls),
    )
