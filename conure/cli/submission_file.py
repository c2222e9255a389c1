"""The submission that `conure run` sends: a program file and the values of its inputs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from conure.server.language.compiler import compile_source
from conure.server.program.decoding.bodies import decode_submission
from conure.server.program.errors import ProgramError
from conure.server.program.graph.graph import Graph
from conure.server.program.graph.inputs import missing_inputs, read_inputs
from conure.server.program.suggestion import suggestion

from .command import UsageError

STDIN = Path("-")
LANGUAGES = {".py": "decoder", ".decoder": "decoder", ".template": "template"}
"""The languages of texts, by the suffix of their files. Other files are JSON."""


def add_inputs(parser: argparse.ArgumentParser, description: str) -> None:
    """Add `-p`, which sets an input. It may be given several times."""
    parser.add_argument(
        "-p",
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="inputs",
        help=description,
    )


def read_submission(file: Path, inputs: Sequence[str], *, needs_all: bool = True) -> dict[str, Any]:
    """Return the submission in a file, with the inputs of the command line.

    Args:
        file: a program, or a submission (`{"program": ..., "inputs": ...}`, or `{"source": ...}`
            with a text), as JSON, or a text in one of `LANGUAGES`; `-` is stdin.
        inputs: `NAME=TEXT`, `NAME=@FILE` or `NAME:=JSON`.
        needs_all: whether every input without a default must have a value.

    Raises:
        UsageError: if the file or an input cannot be read, or an input lacks a value.
    """
    body = _decode(file)
    body["inputs"].update(map(read_input, inputs))
    if needs_all:
        _check_inputs(file, body)
    return body


def _decode(file: Path) -> dict[str, Any]:
    """Return the submission in a file, with a new dict as `inputs`."""
    try:
        data = sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
        language = _language_of(file, data)
        if language is not None:
            text = data.decode()
            return {"source": text, "language": language, "name": file.stem, "inputs": {}}
        content = msgspec.json.decode(data)
    except UnicodeDecodeError as exc:
        raise UsageError(f"{file} is not UTF-8 text") from exc
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror or exc}") from exc
    except msgspec.DecodeError as exc:
        hint = "" if file.suffix == ".json" else f"; names of texts end in {', '.join(LANGUAGES)}"
        raise UsageError(f"{file}: {exc}{hint}") from exc
    if not isinstance(content, dict):
        raise UsageError(f"{file}: expected a JSON object")
    is_submission = "program" in content or "source" in content
    submission = content if is_submission else {"program": content}
    for name in ("inputs", "options"):
        if not isinstance(submission.get(name, {}), dict):
            raise UsageError(f"{file}: `{name}` must be a JSON object")
    return {**submission, "inputs": dict(submission.get("inputs", {}))}


def _language_of(file: Path, data: bytes) -> str | None:
    """Return the language of a text; None for JSON."""
    if file == STDIN:
        return None if data.lstrip().startswith((b"{", b"[")) else "decoder"
    return LANGUAGES.get(file.suffix)


def read_input(text: str) -> tuple[str, Any]:
    """Return name and value of one `-p` argument.

    Raises:
        UsageError: if it lacks a name, or its value cannot be read.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"-p {text}: expected NAME=VALUE")
    try:
        if name.endswith(":"):
            return name[:-1], msgspec.json.decode(value)
        if value.startswith("@"):
            return name, Path(value[1:]).read_text(encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"-p {name}: cannot read {value[1:]}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"-p {name}: {value[1:]} is not UTF-8 text") from exc
    except msgspec.DecodeError as exc:
        raise UsageError(f"-p {name}= needs JSON: {exc}") from exc
    return name, value


def graph_of(body: Mapping[str, Any]) -> Graph | None:
    """Return the graph of a submission; None if this process cannot build it.

    The server checks the program, too, and has all of its libraries.

    Raises:
        UsageError: if the program lacks one of the inputs.
    """
    inputs = body["inputs"]
    try:
        if "source" in body:
            source, language = body["source"], body.get("language", "decoder")
            if not isinstance(source, str):
                return None
            return Graph.build(compile_source(source, language, inputs=inputs), inputs)
        submission = decode_submission(msgspec.json.encode(body))
        return Graph.build(submission.program, inputs, open=submission.open)
    except ProgramError as problem:
        if problem.code == "program.unknown_input":
            raise UsageError(str(problem)) from problem
        return None
    except ModuleNotFoundError:
        return None


def _check_inputs(file: Path, body: Mapping[str, Any]) -> None:
    """Check that a closed program has all input values it needs, so that it cannot wait forever.

    Raises:
        UsageError: if inputs lack a value, or a text does not read one; the message names them.
    """
    graph = graph_of(body)
    if graph is None or body.get("open"):
        return
    inputs = body["inputs"]
    read = read_inputs(graph)
    # The server accepts a value for a declared input that no statement reads.
    if "source" in body and (unread := sorted(inputs.keys() - read)):
        hint = suggestion(unread[0], read, f"it reads {_named(sorted(read))}")
        raise UsageError(f"{file}: no statement reads input `{unread[0]}`; {hint}")
    if body.get("options", {}).get("require_inputs") is False:
        return
    if missing := missing_inputs(graph):
        raise UsageError(f"{file}: no value for input {_named(missing)}; use -p NAME=VALUE")


def _named(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "no input"
