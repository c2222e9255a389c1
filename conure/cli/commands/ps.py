"""`conure ps`: list the programs of a server."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from conure.server.program.status import ProgramSummary

from ..command import ExitCode, add_url, connect
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
    status = arguments.status or (None if arguments.all else "running")
    with connect(arguments.url) as client:
        page = client.programs(status=status, limit=arguments.limit)
    programs = page.programs
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
    if page.next is not None:
        sys.stderr.write(f"these are the newest {arguments.limit}; a larger -n lists more\n")
    return ExitCode.DONE


def _row(program: ProgramSummary, now: datetime) -> tuple[str, ...]:
    created = datetime.fromisoformat(program.created_at)
    ended = None if program.finished_at is None else datetime.fromisoformat(program.finished_at)
    return (
        program.id,
        program.name or "-",
        program.status,
        f"{duration((now - created).total_seconds())} ago",
        duration(((ended or now) - created).total_seconds()),
        "-" if program.calls is None else str(program.calls),
    )
