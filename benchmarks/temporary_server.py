"""A temporary Conure server for a command or a `with` block.

    python benchmarks/temporary_server.py [OPTION OF conure serve ...] -- COMMAND [ARGUMENT ...]

The command receives the server's URL in the environment variable CONURE_URL, and its exit code
is returned. The server listens on a free port and stores its data in a temporary folder. The
server is always stopped when the block ends. If the server does not start, the error contains
its last lines of output.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
STOP_S = 20.0
_ADDRESS = re.compile(r"http://[\w.\[\]:]*?:\d+")


class ServerStartError(RuntimeError):
    """The server did not start; the message ends with its last lines of output."""


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return the environment of a child process that imports `conure` from a checkout."""
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


class TemporaryServer(NamedTuple):
    """A server that runs."""

    url: str
    pid: int
    data: Path
    """The folder of its journal."""


CONURE = ("-m", "conure.cli.main")
"""Arguments of Python that run the command line."""


@contextlib.contextmanager
def served(*options: str, program: Sequence[str] = CONURE, root: Path = ROOT) -> Iterator[str]:
    """Start `conure serve` with these options and yield its URL once it is ready.

    Args:
        options: of `conure serve`.
        program: arguments of Python that run the command line.
        root: the checkout whose code runs.

    Raises:
        StartError: If the server ends or does not become ready in time.
    """
    with started(*options, program=program, root=root) as server:
        yield server.url


@contextlib.contextmanager
def started(
    *options: str, program: Sequence[str] = CONURE, root: Path = ROOT
) -> Iterator[TemporaryServer]:
    """Start `conure serve` as `served` does, and yield its process and folder, too.

    Raises:
        StartError: If the server ends or does not become ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="conure-") as data:
        arguments = ["serve", "--port", "0", "--data", data, *options]
        process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            # Without safe paths, Python looks for modules in the working folder first.
            env={**environment(root), "PYTHONSAFEPATH": "1"},
        )
        output = _ServerOutput(process)
        try:
            yield TemporaryServer(_ready(process, output), process.pid, Path(data))
        finally:
            stop(process)
            output.join()


class _ServerOutput:
    """Reads a server's output, so that the pipe never fills, and finds its URL in the output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self.last: deque[str] = deque(maxlen=30)
        self.address: str | None = None
        self.is_settled = threading.Event()
        """Set when the URL is known or the output has ended."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._lines:
            for line in self._lines:
                self.last.append(line)
                found = _ADDRESS.search(line)
                if found and self.address is None:
                    self.address = found.group()
                    self.is_settled.set()
        self.is_settled.set()

    def join(self) -> None:
        """Wait until the server has closed its output."""
        self._thread.join()


def _ready(process: subprocess.Popen[str], output: _ServerOutput) -> str:
    """Return the server's URL once `/readyz` answers 200."""
    deadline = time.monotonic() + START_S
    output.is_settled.wait(START_S)
    with httpx.Client(timeout=10) as client:
        while output.address and process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{output.address}/readyz").status_code == 200:
                    return output.address
            time.sleep(0.05)
    code = process.poll()
    state = f"not ready after {START_S:.0f} s" if code is None else f"it ended with {code}"
    raise ServerStartError(f"the server did not start ({state}):\n{''.join(output.last)}")


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process, by force if it does not end in time."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run the command after `--` with a server that has the options before `--`."""
    if "--" not in arguments or arguments[-1] == "--":
        print(
            "usage: temporary_server.py [OPTION OF conure serve ...] -- COMMAND ...",
            file=sys.stderr,
        )
        return 2
    split = arguments.index("--")
    try:
        with served(*arguments[:split]) as url:
            command = arguments[split + 1 :]
            return subprocess.call(command, env={**environment(), "CONURE_URL": url})
    except ServerStartError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
