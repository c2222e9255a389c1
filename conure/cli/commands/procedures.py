"""`conure procedures`: store procedures, move their aliases, list, show and remove them.

list    print all versions
show    print one version as JSON
put     store a version
alias   let an alias name another version
remove  remove a version, or an alias
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conure.adapters.client import Client
from conure.server.program.procedures import DEFAULT_ALIAS, StoredProcedure

from ..command import ExitCode, add_url, connect
from ..submission_file import read_submission
from ..terminal import pretty, table

ACTIONS = {
    "list": "print all versions of all procedures",
    "show": "print one version with its parameters, results and program as JSON",
    "put": "store a version and point its alias at it; an unchanged program gets no new version",
    "alias": "point an alias at another version with the same parameters and results",
    "remove": "remove an alias, or a version that no alias names; running programs keep their copy",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `conure procedures`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        add_url(action)
        if name == "list":
            action.add_argument("--json", action="store_true", help="print JSON")
        if name == "show":
            action.add_argument(
                "reference", metavar="REFERENCE", help="NAME, NAME:ALIAS or NAME@VERSION"
            )
        if name == "remove":
            action.add_argument("reference", metavar="REFERENCE", help="NAME@VERSION or NAME:ALIAS")
        if name in ("put", "alias"):
            action.add_argument("name", metavar="NAME", help="name of the procedure")
        if name == "put":
            action.add_argument(
                "file",
                type=Path,
                metavar="FILE",
                help="program as JSON, or a text in the decoder language (.py, .decoder, "
                ".template)",
            )
            action.add_argument(
                "--alias",
                default=DEFAULT_ALIAS,
                help="alias that names this version from now on (default: %(default)s)",
            )
            action.add_argument(
                "--pin-s",
                type=float,
                metavar="S",
                help="keep the constant beginnings of its prompts in the engines' KV for S seconds",
            )
        if name == "alias":
            action.add_argument("alias", metavar="ALIAS", help="name of the alias")
            action.add_argument("version", metavar="VERSION", help="32 hexadecimal digits")


def run(arguments: argparse.Namespace) -> int:
    """Execute one action."""
    with connect(arguments.url) as client:
        match arguments.action:
            case "list":
                _list(client, as_json=arguments.json)
            case "show":
                sys.stdout.write(pretty(client.procedure(arguments.reference)) + "\n")
            case "put":
                _put(client, arguments)
            case "remove":
                _remove(client, arguments.reference)
            case _:
                moved = client.move_alias(arguments.name, arguments.alias, arguments.version)
                sys.stdout.write(f"{_reference(moved)}\n")
    return ExitCode.DONE


def _put(client: Client, arguments: argparse.Namespace) -> None:
    body = read_submission(arguments.file, inputs=(), needs_all=False)
    stored = client.store_procedure(
        arguments.name, body, alias=arguments.alias, pin_s=arguments.pin_s
    )
    sys.stdout.write(f"{_reference(stored)}\n")


def _remove(client: Client, reference: str) -> None:
    name, separator, alias = reference.partition(":")
    if separator:
        client.remove_alias(name, alias)
    else:
        client.remove_procedure(reference)
    sys.stdout.write(f"removed {reference}\n")


def _list(client: Client, *, as_json: bool) -> None:
    stored = client.procedures()
    if as_json:
        sys.stdout.write(pretty(stored) + "\n")
        return
    rows = [(each.name, each.version, ", ".join(each.aliases) or "-") for each in stored]
    if not rows:
        sys.stderr.write("no procedures; `conure procedures put NAME FILE` stores one\n")
        return
    sys.stdout.write(table(("NAME", "VERSION", "ALIASES"), rows))


def _reference(procedure: StoredProcedure) -> str:
    return f"{procedure.name}@{procedure.version}"
