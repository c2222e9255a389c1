"""What the commands share: exit codes, errors, and the address of the server."""

from __future__ import annotations

import argparse
import sys
from enum import IntEnum
from pathlib import Path

from conure.adapters.client import Client, Retry
from conure.adapters.client.connection import DEFAULT_URL, address_of
from conure.server.program.decoding.unicode_text import escape_controls
from conure.server.program.errors import ConureError, ProgramError


class ExitCode(IntEnum):
    """What the exit code of a command means."""

    DONE = 0
    FAILED = 1
    """The server cannot start, the program failed, or a check found a problem."""
    USAGE = 2
    """The command line is wrong."""
    UNREACHABLE = 3
    """No server answers at the address."""
    INTERRUPTED = 130
    """Ctrl-C."""


class UsageError(Exception):
    """The command line is wrong. The message is one line."""


class CommandError(Exception):
    """A command failed. The message is one line for the user."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


def print_error(error: object) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"conure: {escape_controls(' '.join(str(error).split()))}\n")


def describe_error(error: ConureError) -> str:
    """Return code, message and position of an error in one line."""
    where = f" (at {error.path})" if error.path else ""
    return f"{error.code}: {error.message}{where}"


def file_path(text: str) -> Path:
    """Return the path of an argument.

    Raises:
        ArgumentTypeError: if it is empty, as an unset variable of a shell is.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, the address of the server."""
    parser.add_argument(
        "--url",
        help=f"address of the server (default: $CONURE_URL, or {DEFAULT_URL})",
    )


def server_address(url: str | None) -> str:
    """Return the address of the server that `--url` names; None: the default.

    Raises:
        UsageError: if `url` is not the URL of a server.
    """
    try:
        return address_of(url, name="--url")
    except ProgramError as exc:
        raise UsageError(exc.message) from exc


def connect(url: str | None, *, wait_s: float = 0.0) -> Client:
    """Return a client of the server at `url`.

    Args:
        url: `http://HOST:PORT`; None: the default of `--url`.
        wait_s: how long to wait for the server to come back after it is lost.

    Raises:
        UsageError: if `url` is not the URL of a server.
    """
    retry = Retry(unreachable_timeout_s=wait_s, first_contact_timeout_s=0.0)
    return Client(server_address(url), retry=retry)
