"""`conure logs`: print the events of a program."""

from __future__ import annotations

import argparse
import sys

import msgspec

from conure.server.program.decoding.unicode_text import escape_controls
from conure.server.program.status import Event

from ..command import ExitCode, add_url, connect
from ..program_ids import HELP, find_program

DETAILS = frozenset({"program", "node", "seq", "at", "attempt"})
"""Fields that a line shows at its start, or not at all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure logs`."""
    parser.add_argument("program", metavar="PROGRAM", help=HELP)
    add_url(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new events until the program ends"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(arguments: argparse.Namespace) -> int:
    """Print one line per event, without the streamed text of single tokens."""
    with connect(arguments.url, wait_s=30.0) as client:
        program = client.attach(find_program(client, arguments.program))
        for event in program.events(follow=arguments.follow):
            if event.seq is not None:
                sys.stdout.write(_line(event, as_json=arguments.json) + "\n")
                sys.stdout.flush()
    return ExitCode.DONE


def _line(event: Event, *, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode({"type": event.type, **event.data}).decode()
    at = str(event.data.get("at", ""))[11:23]
    node = str(event.data.get("node", ""))
    details = {key: value for key, value in event.data.items() if key not in DETAILS}
    text = msgspec.json.encode(details).decode() if details else ""
    parts = (at, f"{event.type:<18}", node, text)
    return escape_controls(" ".join(part for part in parts if part).rstrip())
