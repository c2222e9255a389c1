"""`conure run`: submits a program from a file, follows its events, prints what came out.

A client of the public routes that knows the language of programs. Refuses to know the
server's inside: it talks to any server that speaks them.

Kept true: values go to stdout, progress and errors to stderr; a stream that breaks is taken
up again after the last event that was seen, also by a server that was restarted; whoever
stops following is told how to find the program again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ..program.decode import decode_submission
from ..program.errors import ProgramError
from ..program.graph import Graph

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
SILENCE_S = 60.0
"""A stream that says nothing for so long is broken: a live one says a comment every 15 s."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0
"""Between two attempts to reach the server again; doubled each time."""
_PASSING = (502, 503, 504)
"""What a server says that stops or starts."""


class _UsageError(Exception):
    """The file, an input or another argument is not what it should be."""


class _LostError(Exception):
    """The server was out of reach for too long."""


def run_file(
    file: Path, *, inputs: Sequence[str], url: str, as_json: bool, wait_s: float = 30.0
) -> int:
    """Runs the program in `file` and returns the exit code.

    Args:
        file: a program, or a submission (`{"program": ..., "inputs": ...}`), as JSON.
        inputs: `NAME=TEXT`, `NAME=@FILE` or `NAME:=JSON`.
        url: address of the server.
        as_json: print the whole status instead of the outputs.
        wait_s: how long a server that went away may take to come back.
    """
    try:
        _check_url(url)
        if not wait_s >= 0:
            raise _UsageError(f"--wait is {wait_s}; it must be 0 or more seconds")
        body = _read_submission(file)
        body["inputs"].update(map(_read_input, inputs))
        _check_inputs(file, body)
    except _UsageError as exc:
        return _complain(str(exc), EXIT_USAGE)
    timeout = httpx.Timeout(30.0, read=SILENCE_S)
    try:
        with httpx.Client(base_url=url, timeout=timeout) as client:
            return _run(client, body, url=url.rstrip("/"), as_json=as_json, wait_s=wait_s)
    except httpx.HTTPStatusError as exc:
        return _complain(_problem(exc.response), EXIT_FAILED)
    except httpx.TransportError as exc:
        hint = "is the server running (`conure serve`)?"
        return _complain(f"cannot reach {url}: {exc}; {hint}", EXIT_UNREACHABLE)


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"conure: {message}\n")
    return code


def _check_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise _UsageError(f"{url!r} is no URL of a server: {exc}") from exc
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _UsageError(f"{url!r} is no URL of a server; it looks like http://127.0.0.1:8400")


def _read_submission(file: Path) -> dict[str, Any]:
    """The submission in a file, with a dict of its own as `inputs`."""
    try:
        content = msgspec.json.decode(file.read_bytes())
    except OSError as exc:
        raise _UsageError(f"{file}: {exc.strerror or exc}") from exc
    except msgspec.DecodeError as exc:
        raise _UsageError(f"{file}: {exc}") from exc
    if not isinstance(content, dict):
        raise _UsageError(f"{file}: not a JSON object")
    submission = content if "program" in content else {"program": content}
    given = submission.get("inputs", {})
    if not isinstance(given, dict):
        raise _UsageError(f"{file}: `inputs` is not a JSON object")
    return {**submission, "inputs": dict(given)}


def _read_input(text: str) -> tuple[str, Any]:
    """Name and value of one `-p`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise _UsageError(f"-p {text}: not NAME=VALUE")
    try:
        if name.endswith(":"):
            return name[:-1], msgspec.json.decode(value)
        if value.startswith("@"):
            return name, Path(value[1:]).read_text(encoding="utf-8")
    except OSError as exc:
        raise _UsageError(f"-p {name}: cannot read {value[1:]}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise _UsageError(f"-p {name}: {value[1:]} is not UTF-8 text") from exc
    except msgspec.DecodeError as exc:
        raise _UsageError(f"-p {name}= takes JSON: {exc}") from exc
    return name, value


def _check_inputs(file: Path, body: dict[str, Any]) -> None:
    """Refuse a program that would wait for a value which nobody is about to give.

    Raises:
        _UsageError: naming the inputs without a value.
    """
    try:
        submission = decode_submission(msgspec.json.encode(body))
        graph = Graph.build(submission.program, submission.inputs, open=submission.open)
    except ProgramError:
        return  # the server has the last word on what a program is
    if submission.open:
        return
    missing = [
        name
        for name in sorted(graph.inputs - submission.inputs.keys())
        if graph.get_consumers(name) or name in graph.outputs
    ]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise _UsageError(f"{file}: no value for the input {names}; give it with -p NAME=VALUE")


def _run(
    client: httpx.Client, body: dict[str, Any], *, url: str, as_json: bool, wait_s: float
) -> int:
    accepted = _json(client.post("/v1/programs", json=body))
    program = accepted["id"]
    path = f"/v1/programs/{quote(program, safe='')}"
    sys.stderr.write(f"{program}: accepted\n")
    try:
        status = _follow(client, path, _Patience(wait_s))
    except KeyboardInterrupt:
        sys.stderr.write(f"it goes on as {program}; stop it with: curl -X DELETE {url}{path}\n")
        return EXIT_INTERRUPTED
    except _LostError as exc:
        kept = f"the program is kept as {program}; once the server is back: curl {url}{path}"
        return _complain(f"lost {url}: {exc}; {kept}", EXIT_UNREACHABLE)
    if as_json:
        sys.stdout.write(_pretty(status) + "\n")
    else:
        _print_outcome(status)
    return EXIT_DONE if status["status"] == "done" else EXIT_FAILED


class _Patience:
    """How long a server that went away may still take to come back."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.heard()

    def heard(self) -> None:
        """The server said something."""
        self._gone_since: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def pause(self, reason: object) -> None:
        """Wait a little before the next attempt.

        Raises:
            _LostError: if the server has been silent for too long.
        """
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
            sys.stderr.write(f"the connection broke ({reason}); trying to take it up again\n")
        left_s = self._gone_since + self._wait_s - now
        if left_s <= 0:
            raise _LostError(f"no answer for {self._wait_s:g} s ({reason})")
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)


def _follow(client: httpx.Client, path: str, patience: _Patience) -> dict[str, Any]:
    """Tells the program's events until its end, and returns its status then."""
    for event, data in _events(client, path, patience):
        _tell(event, data, path)
    while True:
        try:
            status: dict[str, Any] = _json(client.get(path))
            return status
        except httpx.TransportError as exc:
            patience.pause(exc)
        except httpx.HTTPStatusError as exc:
            if exc.response.status_code not in _PASSING:
                raise
            patience.pause(_problem(exc.response))


def _json(response: httpx.Response) -> Any:
    response.raise_for_status()
    return response.json()


def _events(
    client: httpx.Client, path: str, patience: _Patience
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The program's events to its end, over as many connections as it takes."""
    last = 0
    while True:
        reason: object = "the stream ended"
        try:
            with client.stream("GET", f"{path}/events", params={"after": last}) as response:
                if response.is_error:
                    response.read()
                    response.raise_for_status()
                for sequence, event, data in read_events(_heard(response, patience)):
                    last = last if sequence is None else sequence
                    yield event, data
                    if event == "program.finished":
                        return
        except httpx.TransportError as exc:
            reason = exc
        except httpx.HTTPStatusError as exc:
            if exc.response.status_code not in _PASSING:
                raise
            reason = _problem(exc.response)
        patience.pause(reason)


def _heard(response: httpx.Response, patience: _Patience) -> Iterator[str]:
    for line in response.iter_lines():
        patience.heard()
        yield line


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


def _tell(event: str, data: dict[str, Any], path: str) -> None:
    if event == "client.requested":
        where = f"{path}/variables/{data.get('output')}"
        sys.stderr.write(f"waits for the client step {data.get('name')!r}: PUT {where}\n")
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
