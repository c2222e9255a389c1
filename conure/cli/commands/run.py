"""`conure run`: submit a program from a file, follow its events, print its outputs.

Invariants: outputs go to stdout, progress, summary and errors to stderr. A broken event stream is
resumed after the last received event, also across a restart of the server. When following ends
early, the user gets the command that finds the program again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from msgspec import UNSET

from conure.adapters.client import Run
from conure.server.program.errors import UnavailableError
from conure.server.program.status import ProgramStatus, VariableStatus

from ..command import CommandError, ExitCode, UsageError, add_url, connect, server_address
from ..submission_file import add_inputs, graph_of, read_submission
from ..terminal import PrintedFailures, json_line, pretty, progress, summary

EXAMPLE = Path(__file__).parents[1] / "example.decoder"
"""A program that the built-in model can answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure run`."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="program or submission as JSON, or a text in the decoder language (.py, .decoder, "
        ".template); - reads stdin",
    )
    parser.add_argument(
        "--example", action="store_true", help="run a small program of the package instead"
    )
    add_inputs(
        parser,
        "value of an input, as text; NAME=@FILE reads it from a file, NAME:=JSON parses it",
    )
    add_url(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="S",
        dest="wait_s",
        help="seconds to wait for a lost server to return (default: %(default)g)",
    )
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="NAME",
        dest="outputs",
        help="print only this output, without a heading",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print one line per node that ends, instead of the live view of a terminal",
    )
    parser.add_argument(
        "--receipt", action="store_true", help="print the receipt as JSON on stderr"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record what every call reads and writes, and write it to FILE as lines of JSON",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole status as JSON instead of the outputs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the program in a file, and return 0 if it ended without an error."""
    if not arguments.wait_s >= 0:
        raise UsageError(f"--wait is {arguments.wait_s}; it must be at least 0 seconds")
    file = _file_of(arguments)
    with connect(arguments.url, wait_s=arguments.wait_s) as client:
        body = read_submission(file, arguments.inputs)
        _check_outputs(arguments.outputs, body)
        if arguments.trace is None:
            return _run(client.submit(body, follow=True), arguments)
        body["options"] = {**body.get("options", {}), "trace": True}
        with _open_trace(arguments.trace) as trace:
            submitted = client.submit(body, follow=True)
            try:
                code = _run(submitted, arguments)
            except OSError:  # stdout cannot be written
                _write_trace(trace, submitted)
                raise
            if code != ExitCode.INTERRUPTED:
                _write_trace(trace, submitted)
        return code


def _run(submitted: Run, arguments: argparse.Namespace) -> ExitCode:
    """Show the program until it ends, and print its outputs."""
    url = server_address(arguments.url)
    failures = PrintedFailures()
    try:
        status = _follow(submitted, url, failures, is_verbose=arguments.verbose)
    except KeyboardInterrupt:
        sys.stderr.write(f"{submitted.id} keeps running: {_commands(submitted.id, url)}\n")
        return ExitCode.INTERRUPTED
    except UnavailableError as exc:
        found = f"{submitted.id} is stored; when the server is back, see it"
        message = f"lost the server: {exc}; {found}: {_commands(submitted.id, url)}"
        raise CommandError(message, ExitCode.UNREACHABLE) from exc
    _print(status, arguments, failures)
    return ExitCode.DONE if status.status == "done" else ExitCode.FAILED


def _file_of(arguments: argparse.Namespace) -> Path:
    if arguments.example:
        if arguments.file is not None:
            raise UsageError("--example is a program; give no FILE with it")
        sys.stderr.write(f"program: {EXAMPLE}\n")
        return EXAMPLE
    if arguments.file is None:
        raise UsageError("`conure run` needs a FILE; `conure run --example` runs a small program")
    file: Path = arguments.file
    return file


def _check_outputs(names: Sequence[str], body: Mapping[str, Any]) -> None:
    graph = graph_of(body) if names else None
    if graph is None:
        return
    for name in names:
        if name not in graph.outputs:
            known = ", ".join(graph.outputs) or "none"
            raise UsageError(f"--output {name}: the program has no such output; it has {known}")


def _commands(program: str, url: str) -> str:
    return f"conure logs {program} -f --url {url}; stop it: conure cancel {program} --url {url}"


def _follow(
    submitted: Run, url: str, failures: PrintedFailures, *, is_verbose: bool
) -> ProgramStatus:
    """Show the program until it ends, and return its final status."""
    if is_verbose or sys.stderr.isatty():
        sys.stderr.write(f"{submitted.id}: accepted\n")
    with progress(url, failures, is_verbose=is_verbose) as view:
        for event in submitted.events():
            failures.note(event)
            view.show(event)
    return submitted.status()


def _open_trace(file: Path) -> TextIO:
    try:
        return file.open("a", encoding="utf-8")  # an earlier trace is kept until there is a new one
    except OSError as exc:
        raise UsageError(f"--trace {file}: {exc.strerror or exc}") from exc


def _write_trace(file: TextIO, submitted: Run) -> None:
    try:
        with file:  # the end of the block writes the rest
            with contextlib.suppress(OSError):  # a pipe
                file.truncate(0)
            file.writelines(map(json_line, submitted.trace()))
    except OSError as exc:
        raise CommandError(f"--trace {file.name}: {exc.strerror or exc}") from exc


def _print(status: ProgramStatus, arguments: argparse.Namespace, failures: PrintedFailures) -> None:
    if arguments.json:
        sys.stdout.write(pretty(status) + "\n")
        return
    names = arguments.outputs or status.outputs
    for name in names:
        text = _text(status.variables.get(name))
        if text is None:
            sys.stderr.write(f"{name}: {_reason(status.variables.get(name), failures)}\n")
        elif len(names) > 1 and not arguments.outputs:
            sys.stdout.write(f"--- {name}\n{text}\n")
        else:
            sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    for name in names:
        variable = status.variables.get(name)
        if variable is not None and variable.truncated:
            sys.stderr.write(f"{name}: cut off by max_tokens or the end of the context\n")
    if status.error is not UNSET:
        failure = failures.describe(status.error.code, status.error.message)
        if failure:
            sys.stderr.write(f"{status.status}: {failure}\n")
    if status.receipt is not UNSET:
        sys.stderr.write(f"{status.id}: {status.status} · {summary(status.receipt)}\n")
        if arguments.receipt:
            sys.stderr.write(pretty(status.receipt) + "\n")


def _text(variable: VariableStatus | None) -> str | None:
    """Return the value of an output as text, or None if it has none."""
    if variable is None or variable.value is UNSET:
        return None
    return variable.value if isinstance(variable.value, str) else pretty(variable.value)


def _reason(variable: VariableStatus | None, failures: PrintedFailures) -> str:
    """Return why an output has no value, without the failure if it was printed before."""
    if variable is None:
        return "no value"
    if variable.error is UNSET:
        return f"{variable.status}, no value"
    failure = failures.describe(variable.error.code, variable.error.message)
    return variable.status + (f", {failure}" if failure else "")
