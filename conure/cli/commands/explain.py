"""`conure explain`: what a program would do, or what it did."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conure.server.program.explanation.rendering import to_mermaid, to_text

from ..command import ExitCode, add_url, connect
from ..program_ids import find_program, prefix_of
from ..submission_file import STDIN, add_inputs, read_submission
from ..terminal import pretty


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure explain`."""
    parser.add_argument(
        "program",
        metavar="FILE|ID",
        help="FILE: a program or a submission as JSON, or a text (.py, .decoder, .template), - for "
        "stdin; ID: the id of a program, or its first digits",
    )
    add_inputs(
        parser,
        "value of an input, as for `conure run`; a value that is not given counts as unknown",
    )
    parser.add_argument(
        "--as",
        dest="form",
        choices=("text", "json", "mermaid"),
        default="text",
        help="format of the output (default: %(default)s)",
    )
    add_url(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print an explanation."""
    file = Path(arguments.program)
    with connect(arguments.url) as client:
        if file == STDIN or not _is_program(arguments.program) or file.exists():
            body = read_submission(file, arguments.inputs, needs_all=False)
            explanation = client.explain(body)
        else:
            explanation = client.explain(find_program(client, arguments.program))
    match arguments.form:
        case "json":
            sys.stdout.write(pretty(explanation) + "\n")
        case "mermaid":
            sys.stdout.write(to_mermaid(explanation))
        case _:
            sys.stdout.write(to_text(explanation))
    return ExitCode.DONE


def _is_program(word: str) -> bool:
    """Return whether a word that does not name a file names a program."""
    return word.startswith("p_") or prefix_of(word) is not None
