"""The entry point of the command line: the table of commands, the parser, and exit codes.

Every error is one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from itertools import filterfalse
from typing import Any, NamedTuple, NoReturn

from conure.engine.config import ConfigError
from conure.server.program.decoding.unicode_text import is_unicode
from conure.server.program.errors import ConureError, UnavailableError

from .command import CommandError, ExitCode, UsageError, describe_error, print_error


class Command(NamedTuple):
    """One command. Its module is named like the command."""

    name: str
    summary: str


COMMANDS = (
    Command("serve", "start a server"),
    Command("run", "run a program and print its outputs"),
    Command("explain", "show what a program would do, or did"),
    Command("chat", "talk to the model of a server"),
    Command("ps", "list programs"),
    Command("logs", "print the events of a program"),
    Command("trace", "export what the calls of programs read and wrote"),
    Command("cancel", "cancel a program"),
    Command("procedures", "store and list procedures"),
    Command("journal", "check, back up or clean up the journal of a server"),
    Command("doctor", "find out why a server cannot start or is slow"),
    Command("bench", "measure a running server"),
    Command("demo", "show in 15 seconds how much faster whole programs run"),
    Command("completion", "print a script that completes commands in a shell"),
)

EXAMPLES = """\
examples:
  conure serve                              start a server with the small built-in model
  conure serve Qwen/Qwen2.5-0.5B-Instruct   the same with a model of the Hugging Face Hub
  conure run --example                      run a small program on the server

`conure COMMAND --help` describes a command.
exit codes: 0 done, 1 failed, 2 wrong usage, 3 server unreachable, 130 interrupted
"""

DETAILED_LOG = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""The log format of a server, and of other commands when a user asks for details."""

EXTRA_OF_MODULE = {
    "litestar": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
    "httptools": "serve",
    "re2": "serve",
    "tokenizers": "serve",
    "jinja2": "serve",
    "prometheus_client": "serve",
    "torch": "serve",
    "transformers": "serve",
    "safetensors": "serve",
    "numpy": "serve",
    "llguidance": "serve",
    "jsonschema": "serve",
    "langchain_core": "langchain",
    "llama_index": "llamaindex",
    "shtab": "all",
}
"""The extra of the package that installs a module."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _exit_code(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has ended, as in `conure logs ID | head`
        _discard_unwritten()
        return ExitCode.DONE
    except OSError as exc:
        logging.getLogger(__name__).debug("an error of the operating system", exc_info=exc)
        where = "" if exc.filename is None else f"{exc.filename}: "
        with contextlib.suppress(OSError):  # stderr may be what cannot be written
            print_error(f"{where}{exc.strerror or exc}")
        _discard_unwritten()
        return ExitCode.FAILED
    return code


def _discard_unwritten() -> None:
    """Discard what stdout and stderr cannot write; Python would try to write it again at exit."""
    with open(os.devnull, "wb") as null:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except OSError:
                os.dup2(null.fileno(), stream.fileno())


def _exit_code(arguments: list[str]) -> int:
    """Run one command, and print its error as one line."""
    if not arguments:
        sys.stdout.write(build_parser(None).format_help())
        return ExitCode.DONE
    try:
        return _run(arguments)
    except (UsageError, ConfigError) as exc:
        print_error(exc)
        return ExitCode.USAGE
    except CommandError as exc:
        print_error(exc)
        return exc.code
    except UnavailableError as exc:
        print_error(describe_error(exc) if exc.code != "client.unreachable" else exc)
        return ExitCode.UNREACHABLE
    except ConureError as exc:
        print_error(describe_error(exc))
        return ExitCode.FAILED
    except ModuleNotFoundError as exc:
        extra = EXTRA_OF_MODULE.get((exc.name or "").split(".")[0])
        if extra is None:
            raise
        needed = f"`conure {arguments[0]}` needs the package {exc.name}"
        print_error(f"{needed}: pip install 'conure[{extra}]'")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        if sys.stderr.isatty():  # the terminal has shown ^C
            sys.stderr.write("\n")
        return ExitCode.INTERRUPTED


def _run(argv: list[str]) -> int:
    name = next((word for word in argv if not word.startswith("-")), None)
    if name is not None and name not in {command.name for command in COMMANDS}:
        raise UsageError(_unknown(name))
    try:
        arguments, unknown = build_parser(name).parse_known_args(argv)
        if unknown:
            raise UsageError(_unrecognized(arguments.parser, unknown[0]))
    except SystemExit as exc:
        # argparse exits on errors, on --help and on --version.
        return exc.code if isinstance(exc.code, int) else ExitCode.USAGE
    is_detailed = name == "serve" or arguments.log_level in ("debug", "info")
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format=DETAILED_LOG if is_detailed else "conure: %(message)s",
        stream=sys.stderr,
    )
    try:
        code: int = arguments.module.run(arguments)
    except UnicodeEncodeError as exc:
        # In an argument, Python reads bytes that are not UTF-8 as characters that cannot be sent.
        if (word := next(filterfalse(is_unicode, argv), None)) is None:
            raise
        raise UsageError(f"the argument {os.fsencode(word)!r} is not UTF-8 text") from exc
    return code


def _unknown(name: str) -> str:
    names = [command.name for command in COMMANDS]
    if close := difflib.get_close_matches(name, names, n=1):
        return f"unknown command {name!r}; did you mean `conure {close[0]}`?"
    return f"unknown command {name!r}; commands: {', '.join(names)}"


def _unrecognized(parser: argparse.ArgumentParser, word: str) -> str:
    flags = re.findall(r"--[a-z][a-z-]*", parser.format_usage())
    close = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see `{parser.prog} --help`"
    return f"`{parser.prog}` has no argument {word!r}; {hint}"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser(name: str | None, *, all_commands: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        name: the command whose arguments are added, and whose module is imported.
        all_commands: add the arguments of every command.
    """
    parser = _Parser(
        prog="conure",
        description="A server for LLM applications that runs whole programs of LLM calls.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.summary, description=command.summary)
        if all_commands or command.name == name:
            module = importlib.import_module(f".commands.{command.name}", __package__)
            module.add_arguments(child)
            child.set_defaults(module=module, parser=child)
            _add_log_level(child)
    return parser


class _Version(argparse.Action):
    """Print the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from conure import __version__

        sys.stdout.write(f"conure {__version__}\n")
        parser.exit(ExitCode.DONE)


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    levels = ("debug", "info", "warning", "error")
    parser.add_argument(
        "--log-level",
        choices=levels,
        default="warning",
        help="minimum severity of log messages on stderr (default: %(default)s)",
    )


if __name__ == "__main__":
    sys.exit(main())
