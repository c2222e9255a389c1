"""A TCP proxy that delivers every chunk of data a fixed time after it arrived.

    python -m conure.cli.delayed_connection HOST PORT DELAY_S

Prints its own port, then forwards connections to HOST:PORT until its standard input ends. It
simulates the network between an application and its server, in a separate process, so that it
takes no time of the application's process. Chunks keep their order, and no chunk waits for the
delay of another.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit


@contextlib.contextmanager
def delayed(url: str, round_trip_s: float) -> Iterator[str]:
    """Yield a URL of the server with a longer round trip."""
    address = urlsplit(url)
    assert address.hostname is not None
    arguments = (address.hostname, str(address.port), str(round_trip_s / 2))
    process = subprocess.Popen(
        [sys.executable, "-m", "conure.cli.delayed_connection", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def relay(host: str, port: int, delay_s: float) -> None:
    """Forward connections until the process ends."""
    server = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{server.getsockname()[1]}\n")
    sys.stdout.flush()
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection((host, port))
        except OSError:  # no server: the client sees that its connection ends
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_forward, args=(*pair, delay_s), daemon=True).start()


def _forward(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Read chunks and schedule their delivery; an empty chunk ends the connection."""
    target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_deliver, args=(due, target), daemon=True).start()
    data = b"begun"
    while data:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        due.put((time.monotonic() + delay_s, data))


def _deliver(due: queue.SimpleQueue[tuple[float, bytes]], target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the connection has ended
        while True:
            at_s, data = due.get()
            # Timers of an event loop are only precise to a millisecond or two.
            time.sleep(max(0.0, at_s - time.monotonic()))
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)


def main(arguments: Sequence[str]) -> int:
    """Run the proxy for the given arguments."""
    if len(arguments) != 3:
        sys.stderr.write("usage: delayed_connection HOST PORT DELAY_S\n")
        return 2
    host, port, delay_s = arguments
    threading.Thread(target=relay, args=(host, int(port), float(delay_s)), daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
