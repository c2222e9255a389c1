"""`conure cancel`: cancel a program."""

from __future__ import annotations

import argparse
import sys

from ..command import ExitCode, add_url, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure cancel`."""
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help="id of a program")
    add_url(parser)


def run(arguments: argparse.Namespace) -> int:
    """Cancel programs. A program that has ended does not change."""
    with connect(arguments.url) as client:
        for program in arguments.programs:
            status = client.attach(program).cancel()
            sys.stdout.write(f"{program}: {status.status}\n")
    return ExitCode.DONE
