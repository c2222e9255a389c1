"""A Conure server of one's own, for as long as a command or a `with` block lasts.

    python benchmarks/own_server.py [OPTION OF conure serve ...] -- COMMAND [ARGUMENT ...]

The command finds the server's address in the environment variable CONURE_URL, and its exit
code is ours. The server gets a free port and a data folder that is gone afterwards. Knows
the command line of `conure serve` and `/readyz`; refuses to know what is asked of the server.

Kept true: however the block ends, the server is gone when it has ended, and a server that
does not come up is an error that shows what it said.
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

import httpx

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
STOP_S = 20.0
_ADDRESS = re.compile(r"http://[\w.\[\]:]*?:\d+")


class StartError(RuntimeError):
    """The server did not come up; the message ends with its last lines."""


def environment() -> dict[str, str]:
    """The environment of a child that imports `conure` from this checkout."""
    paths = [str(ROOT / ".src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@contextlib.contextmanager
def served(*options: str) -> Iterator[str]:
    """Starts `conure serve` with these options and yields its URL once it can serve.

    Raises:
        StartError: if it ends or stays silent before it is ready.
    """
    with tempfile.TemporaryDirectory(prefix="conure-") as data:
        arguments = ["serve", "--port", "0", "--data", data, *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "conure.server.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        output = _Output(process)
        try:
            yield _ready(process, output)
        finally:
            _stop(process)
            output.join()


class _Output:
    """Reads what a server says, so that it never blocks on a full pipe, and finds its address."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self.last: deque[str] = deque(maxlen=30)
        self.address: str | None = None
        self.is_settled = threading.Event()
        """Set once the address is known or there will be none."""
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
        """Waits until the server has closed its end."""
        self._thread.join()


def _ready(process: subprocess.Popen[str], output: _Output) -> str:
    """The server's URL, once `/readyz` answers 200."""
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
    raise StartError(f"the server did not come up ({state}):\n{''.join(output.last)}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    """Runs the command after `--` against a server with the options before it."""
    if "--" not in arguments or arguments[-1] == "--":
        print("usage: own_server.py [OPTION OF conure serve ...] -- COMMAND ...", file=sys.stderr)
        return 2
    split = arguments.index("--")
    try:
        with served(*arguments[:split]) as url:
            command = arguments[split + 1 :]
            return subprocess.call(command, env={**environment(), "CONURE_URL": url})
    except StartError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
