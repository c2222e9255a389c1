"""`conure cancel`: cancel a program."""

from __future__ import annotations

import argparse
import sys

from conure.adapters.client import Client
from conure.server.program.errors import NotFoundError

from ..command import ExitCode, add_url, connect, describe_error, print_error
from ..program_ids import HELP, find_program
from ..terminal import pretty


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure cancel`."""
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help=HELP)
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Cancel programs. A program that has ended does not change; a missing one is reported."""
    code = ExitCode.DONE
    cancelled: list[dict[str, str]] = []
    with connect(arguments.url) as client:
        # An ambiguous id ends the command before anything is cancelled.
        programs = [find_program(client, word) for word in arguments.programs]
        try:
            for program in programs:
                status = _cancel(client, program)
                if status is None:
                    code = ExitCode.FAILED
                elif arguments.json:
                    cancelled.append({"id": program, "status": status})
                else:
                    sys.stdout.write(f"{program}: {status}\n")
        finally:  # also if the server is lost after some programs
            if arguments.json:
                sys.stdout.write(pretty(cancelled) + "\n")
    return code


def _cancel(client: Client, program: str) -> str | None:
    """Cancel a program and return its status; report it and return None if it is missing."""
    try:
        return client.attach(program).cancel().status
    except NotFoundError as exc:
        print_error(describe_error(exc))
        return None
