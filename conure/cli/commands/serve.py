"""`conure serve`: the arguments of a server, and its start."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conure.engine.config import ConfigField, fields_of
from conure.engine.protocol import EngineError
from conure.server.config import Config, default_data_folder

from ..command import CommandError, ExitCode, UsageError, file_path

EXAMPLES = """\
examples:
  conure serve                                the small built-in model, nothing to download
  conure serve Qwen/Qwen2.5-0.5B-Instruct     a model from the Hugging Face Hub
  conure serve ./my-model --dtype bfloat16    a directory in Hugging Face format
  conure serve --engine fake                  no model: every answer is made up, for tests
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every field of `Config`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory or Hugging Face model name (default: the small built-in model)",
    )
    parser.add_argument(
        "--functions",
        metavar="MODULE",
        help="module that defines a dict `functions`, for the call nodes of programs",
    )
    groups: dict[str, argparse._ActionsContainer] = {"options": parser}
    for field in fields_of(Config):
        title = field.option.group
        if title is not None:
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_flag(groups[title], field)


def _add_flag(group: argparse._ActionsContainer, field: ConfigField) -> None:
    """Add the flag of one configuration field."""
    option = field.option
    name = f"--{option.flag or field.name.replace('_', '-')}"
    if field.kind is bool:
        group.add_argument(name, dest=field.name, action="store_true", help=option.help)
        return
    shown = "" if field.default is None else f" (default: {field.default})"
    group.add_argument(
        name,
        dest=field.name,
        type=file_path if field.kind is Path else field.kind,
        default=field.default,
        choices=option.choices,
        metavar=option.metavar,
        help=option.help + shown,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a server until a signal stops it."""
    config = config_of(arguments)
    functions = load_functions(arguments.functions) if arguments.functions else {}
    if sys.stderr.isatty():
        sys.stderr.write(loading(config) + "\n")
    from conure.server.server_process import ServeError, serve

    try:
        serve(config, functions=functions)
    except ServeError as exc:
        raise CommandError(str(exc)) from exc
    return ExitCode.DONE


def loading(config: Config) -> str:
    """Return the line that is shown until the server listens; a large model takes long to load."""
    if config.engine == "fake":
        return "Starting ..."
    if config.dummy_weights is not None:
        return f"Making random weights for {config.dummy_weights} ..."
    if config.model is None:
        return "Loading the built-in model ..."
    if Path(config.model).exists():
        return f"Loading {config.model}{_size_of(Path(config.model))} ..."
    return f"Loading {config.model}; the first start downloads it from the Hugging Face Hub ..."


def _size_of(folder: Path) -> str:
    """Return the size of a model as text, or an empty text if it has no readable weights (the
    engine reports the reason).
    """
    from conure.engine.models.inspection import size_on_disk

    try:
        return f", {size_on_disk(folder) / 1e9:.1f} GB"
    except (EngineError, OSError):
        return ""


def config_of(arguments: argparse.Namespace) -> Config:
    """Return the configuration that parsed arguments describe.

    Raises:
        ConfigError: if a setting is out of bounds.
        UsageError: if a file or directory does not exist.
    """
    if arguments.model is not None:
        check_model_argument(arguments.model)
    if arguments.dummy_weights is not None and not Path(arguments.dummy_weights).exists():
        raise UsageError(f"config {arguments.dummy_weights} does not exist")
    if arguments.script is not None and not arguments.script.is_file():
        raise UsageError(f"script {arguments.script} does not exist")
    settings = {
        field.name: getattr(arguments, field.name)
        for field in fields_of(Config)
        if field.option.group is not None
    }
    settings["data"] = arguments.data or default_data_folder()
    model = arguments.model
    if model is not None and model.startswith("~"):
        model = str(Path(model).expanduser())
    return Config(model=model, **settings)


def check_model_argument(model: str) -> None:
    """Reject what cannot be a model, with the reason.

    Raises:
        UsageError: if the path does not exist, or is a file.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError as exc:  # the user does not exist
        raise UsageError(f"model directory {model} does not exist") from exc
    if model.endswith(".gguf"):
        raise UsageError(
            f"{model} is a GGUF file, which Conure does not read; give the directory or the name "
            "of the same model in Hugging Face format (config.json and *.safetensors)"
        )
    if path.is_file():
        raise UsageError(f"{model} is a file; give the directory that contains it")
    if model.startswith(("/", ".", "~")) and not path.exists():
        raise UsageError(f"model directory {model} does not exist")


def load_functions(module_name: str) -> Mapping[str, Callable[..., Any]]:
    """Return the functions that call nodes may use.

    An error in the code of the module keeps its traceback.

    Raises:
        UsageError: if the module or one of its imports is missing, or if the module lacks the dict
            `functions`.
    """
    if not all(map(str.isidentifier, module_name.split("."))):
        raise UsageError(
            f"--functions {module_name}: not the name of a module; give for example `tools` for "
            "tools.py in the working directory"
        )
    # As `python -m` does: import from the working directory.
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise UsageError(f"cannot import module {module_name!r}: {exc}") from exc
    functions = getattr(module, "functions", None)
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise UsageError(
            f"module {module_name!r} must define `functions`, a dict of names to callables"
        )
    return functions
