"""`conure run`: submits a program from a file, follows its events, prints what came out.

A plain HTTP client of the public routes. Refuses to know the server's inside: it talks to
any server that speaks them.

Kept true: values go to stdout, progress and errors to stderr; a stream that breaks is taken
up again after the last event that was seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3
MAX_RECONNECTS = 5


class _FileError(Exception):
    """The file or an input cannot be read as what it should be."""


def run_file(file: Path, *, inputs: Sequence[str], url: str, as_json: bool) -> int:
    """Runs the program in `file` and returns the exit code.

    Args:
        file: a program, or a submission (`{"program": ..., "inputs": ...}`), as JSON.
        inputs: `NAME=TEXT`, `NAME=@FILE` or `NAME:=JSON`.
        url: address of the server.
        as_json: print the whole status instead of the outputs.
    """
    try:
        body = _read_submission(file, inputs)
    except (_FileError, OSError, msgspec.DecodeError) as exc:
        return _complain(f"{file}: {exc}", EXIT_USAGE)
    timeout = httpx.Timeout(30.0, read=60.0)
    try:
        with httpx.Client(base_url=url, timeout=timeout) as client:
            return _run(client, body, as_json=as_json)
    except httpx.HTTPStatusError as exc:
        return _complain(_problem(exc.response), EXIT_FAILED)
    except (httpx.TransportError, httpx.InvalidURL) as exc:
        return _complain(f"cannot reach {url}: {exc}", EXIT_UNREACHABLE)


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"conure: {message}\n")
    return code


def _read_submission(file: Path, inputs: Sequence[str]) -> dict[str, Any]:
    content = msgspec.json.decode(file.read_bytes())
    if not isinstance(content, dict):
        raise _FileError("not a JSON object")
    submission = content if "program" in content else {"program": content}
    given = dict(submission.get("inputs", {}))
    for text in inputs:
        name, equals, value = text.partition("=")
        if not equals:
            raise _FileError(f"the input {text!r} is not NAME=VALUE")
        if name.endswith(":"):
            given[name[:-1]] = msgspec.json.decode(value)
        elif value.startswith("@"):
            given[name] = Path(value[1:]).read_text(encoding="utf-8")
        else:
            given[name] = value
    return {**submission, "inputs": given}


def _run(client: httpx.Client, body: dict[str, Any], *, as_json: bool) -> int:
    accepted = _json(client.post("/v1/programs", json=body))
    path = f"/v1/programs/{quote(accepted['id'], safe='')}"
    sys.stderr.write(f"{accepted['id']}: accepted\n")
    for event, data in _events(client, path):
        _tell(event, data)
    status = _json(client.get(path))
    if as_json:
        sys.stdout.write(_pretty(status) + "\n")
    else:
        _print_outcome(status)
    return EXIT_DONE if status["status"] == "done" else EXIT_FAILED


def _json(response: httpx.Response) -> Any:
    response.raise_for_status()
    return response.json()


def _events(client: httpx.Client, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The program's events to its end, over as many connections as it takes."""
    last = 0
    for _ in range(MAX_RECONNECTS):
        with client.stream("GET", f"{path}/events", params={"after": last}) as response:
            if response.is_error:
                response.read()
                response.raise_for_status()
            for sequence, event, data in read_events(response.iter_lines()):
                last = last if sequence is None else sequence
                yield event, data
                if event == "program.finished":
                    return
    raise httpx.RemoteProtocolError("the stream of events keeps breaking")


def read_events(lines: Iterator[str]) -> Iterator[tuple[int | None, str, dict[str, Any]]]:
    """Reads server-sent events: (sequence number or None, type, data); skips comments."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "event" in fields:
                sequence = int(fields["id"]) if "id" in fields else None
                yield sequence, fields["event"], msgspec.json.decode(fields.get("data", "{}"))
            fields = {}
            continue
        name, _, value = line.partition(":")
        if name:
            fields[name] = value.removeprefix(" ")


def _tell(event: str, data: dict[str, Any]) -> None:
    if event == "client.requested":
        sys.stderr.write(f"waits for the client step {data.get('name')!r} to be answered\n")
    elif event in ("node.finished", "node.restarted"):
        sys.stderr.write(f"{data.get('node')}: {event.removeprefix('node.')}\n")
    elif event in ("node.failed", "node.killed", "node.skipped"):
        what = event.removeprefix("node.")
        sys.stderr.write(f"{data.get('node')}: {what}, {data.get('code')}: {data.get('message')}\n")


def _print_outcome(status: dict[str, Any]) -> None:
    variables = status.get("variables", {})
    for name in status.get("outputs", []):
        variable = variables.get(name, {})
        if "value" in variable:
            value = variable["value"]
            text = value if isinstance(value, str) else _pretty(value)
        else:
            error = variable.get("error", {})
            text = f"({variable.get('status', 'unknown')}: {error.get('message', 'no value')})"
        sys.stdout.write(f"--- {name}\n{text}\n")
    if "receipt" in status:
        sys.stdout.write(f"--- receipt\n{_pretty(status['receipt'])}\n")


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _problem(response: httpx.Response) -> str:
    try:
        problem = response.json()
        where = f" (at {problem['path']})" if "path" in problem else ""
        return f"{problem['code']}: {problem['detail']}{where}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
