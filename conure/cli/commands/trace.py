"""`conure trace`: export what the calls of programs read and wrote, as lines of JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from conure.adapters.training import training_examples

from ..command import ExitCode, add_url, connect
from ..program_ids import HELP, find_program
from ..terminal import json_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure trace`."""
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help=HELP)
    add_url(parser)
    parser.add_argument(
        "--token-ids", action="store_true", help="include the token ids of prompts and outputs"
    )
    parser.add_argument(
        "--examples",
        action="store_true",
        help="print one example for fine-tuning per complete output instead of spans",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one span, or one example, per line."""
    with connect(arguments.url) as client:
        for program in arguments.programs:
            spans = client.attach(find_program(client, program)).trace(
                token_ids=arguments.token_ids
            )
            lines: Iterable[Any] = training_examples(spans) if arguments.examples else spans
            sys.stdout.writelines(map(json_line, lines))
    return ExitCode.DONE
