"""The command line: `conure serve` and `conure run`.

Knows arguments and exit codes: 0 fine, 1 the server cannot start or the program failed, 2
wrong usage, 3 the server cannot be reached, 130 interrupted. Whatever goes wrong is one
line on stderr.

Refuses to know how anything is done: servers and programs run in `commands`, both
loaded when they are needed.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import DEFAULT_HOST, DEFAULT_PORT, Config, ConfigError, default_data
from .scheduling.policy import DEFAULT_POLICY, POLICIES

DONE, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3


_SETTINGS = (
    "host",
    "port",
    "engine",
    "model",
    "dummy_weights",
    "dtype",
    "device",
    "context_len",
    "num_blocks",
    "block_size",
    "step_tokens",
    "max_sequences",
    "threads",
    "batch_invariant",
    "policy",
    "latency_tokens",
    "script",
    "time_per_call",
    "time_per_prompt_token",
    "time_per_output_token",
    "drain_s",
)
"""Settings that the command line and `Config` call by one name."""


class UsageError(Exception):
    """The command line asks for something that cannot be; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exc:
        # argparse exits by itself, also for --help and --version.
        return exc.code if isinstance(exc.code, int) else USAGE
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except (UsageError, ConfigError) as exc:
        return _complain(exc, USAGE)
    except KeyboardInterrupt:
        return 130


def _complain(error: object, code: int) -> int:
    sys.stderr.write(f"conure: {error}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="conure", description="A server for LLM applications: whole programs of LLM calls."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="run a server"))
    _add_run(commands.add_parser("run", help="submit a program and wait for its outputs"))
    return parser


class _Version(argparse.Action):
    """Prints the version; importing the application only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .app import version

        sys.stdout.write(f"conure {version()}\n")
        parser.exit(DONE)


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, default="warning")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_serve)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder or name of a model; without one, the small one that is built in",
    )
    parser.add_argument("--host", default=DEFAULT_HOST, help="a loopback address")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of the journal (default: conure in XDG_STATE_HOME, else ~/.local/state)",
    )
    parser.add_argument("--functions", metavar="MODULE", help="module with a dict `functions`")
    parser.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        help="how long calls may run on after SIGTERM or Ctrl-C (default: %(default)g)",
    )
    _add_log_level(parser)
    scheduling = parser.add_argument_group("scheduling")
    scheduling.add_argument("--policy", choices=tuple(POLICIES), default=DEFAULT_POLICY)
    scheduling.add_argument(
        "--latency-tokens",
        type=int,
        metavar="TOKENS",
        help="how many an engine may hold while somebody waits for one of its calls by itself",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", choices=("local", "fake"), default="local")
    engine.add_argument("--engines", type=int, default=1, metavar="N", help="how many")
    engine.add_argument(
        "--dummy-weights",
        metavar="CONFIG",
        help="make random weights for this config, a file or folder, instead of loading a model",
    )
    engine.add_argument("--dtype", help="of the weights: float32, bfloat16, ...")
    engine.add_argument(
        "--device", help="where it computes: cpu (the default), cuda, cuda:N or auto"
    )
    engine.add_argument("--context-len", type=int, metavar="TOKENS")
    engine.add_argument("--num-blocks", type=int, metavar="N", help="KV blocks in all")
    engine.add_argument("--block-size", type=int, metavar="TOKENS")
    engine.add_argument("--step-tokens", type=int, metavar="TOKENS", help="per step, at most")
    engine.add_argument("--max-sequences", type=int, metavar="N", help="per step, at most")
    engine.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of an engine on a CPU (default: its cores; fewer for a model of less than 8 MB each)",
    )
    engine.add_argument(
        "--batch-invariant",
        action="store_true",
        help="give each output the same tokens whatever else runs, in bfloat16 too; CPU, slower",
    )
    fake = parser.add_argument_group("fake engine")
    fake.add_argument("--script", type=Path, metavar="FILE", help="what it answers")
    fake.add_argument("--time-per-call", type=float, default=0.0, metavar="S")
    fake.add_argument("--time-per-prompt-token", type=float, default=0.0, metavar="S")
    fake.add_argument("--time-per-output-token", type=float, default=0.0, metavar="S")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_run)
    parser.add_argument("file", type=Path, metavar="FILE", help="a program or a submission")
    parser.add_argument(
        "-p",
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="inputs",
        help="an input; @FILE takes its text from a file, NAME:=VALUE takes JSON",
    )
    default_url = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    parser.add_argument(
        "--url",
        default=os.environ.get("CONURE_URL") or default_url,
        help=f"address of the server (default: the variable CONURE_URL, else {default_url})",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="S",
        dest="wait_s",
        help="how long a server that went away may take to come back (default: 30)",
    )
    parser.add_argument("--json", action="store_true", help="print the program's status as JSON")
    _add_log_level(parser)


def _serve(arguments: argparse.Namespace) -> int:
    config = config_of(arguments)
    functions = load_functions(arguments.functions) if arguments.functions else {}
    from .commands.serve import StartError, serve

    try:
        serve(config, functions=functions)
    except StartError as exc:
        return _complain(exc, FAILED)
    return DONE


def config_of(arguments: argparse.Namespace) -> Config:
    """The configuration that a command line asks for.

    Raises:
        ConfigError: if a setting is out of its bounds.
        UsageError: if a file or folder that it names is not there.
    """
    if arguments.model is not None and _is_missing_folder(arguments.model):
        raise UsageError(f"there is no model folder {arguments.model}")
    if arguments.dummy_weights is not None and not Path(arguments.dummy_weights).exists():
        raise UsageError(f"there is no config {arguments.dummy_weights}")
    if arguments.script is not None and not arguments.script.is_file():
        raise UsageError(f"there is no script {arguments.script}")
    if arguments.model is not None and arguments.model.startswith("~"):
        arguments.model = str(Path(arguments.model).expanduser())
    return Config(
        data=arguments.data or default_data(),
        num_engines=arguments.engines,
        **{name: getattr(arguments, name) for name in _SETTINGS},
    )


def _is_missing_folder(model: str) -> bool:
    """Whether `model` can only be a path, and there is nothing at it."""
    looks_like_path = model.startswith(("/", ".", "~"))
    return looks_like_path and not Path(model).expanduser().exists()


def load_functions(module_name: str) -> Mapping[str, Callable[..., Any]]:
    """The functions that `call` nodes may name.

    Raises:
        UsageError: if the module does not load or has no such dict.
    """
    # As `python -m` would: modules beside the user, not beside this script.
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise UsageError(f"cannot load the module {module_name!r}: {exc}") from exc
    functions = getattr(module, "functions", None)
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise UsageError(f"the module {module_name!r} has no dict `functions` of callables")
    return functions


def _run(arguments: argparse.Namespace) -> int:
    from .commands.run import run_file

    return run_file(
        arguments.file,
        inputs=arguments.inputs,
        url=arguments.url,
        as_json=arguments.json,
        wait_s=arguments.wait_s,
    )


if __name__ == "__main__":
    sys.exit(main())
