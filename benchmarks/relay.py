"""A longer wire: a TCP relay that delivers every piece of data a fixed time after it came.

    python benchmarks/relay.py HOST PORT DELAY_S

Prints its own port, then relays connections to HOST:PORT until its input ends. Stands for the
network between an application and its server; knows nothing of what is said over it. Kept
true: pieces keep their order, and no piece waits for the delay of another.
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
def distant(url: str, round_trip_s: float) -> Iterator[str]:
    """Yields another URL of a server, from which its answers take this much longer."""
    address = urlsplit(url)
    assert address.hostname is not None
    process = subprocess.Popen(
        [sys.executable, __file__, address.hostname, str(address.port), str(round_trip_s / 2)],
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
    """Relays connections, for as long as the process lives."""
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    while True:
        near, _ = server.accept()
        far = socket.create_connection((host, port))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_pass_on, args=(*pair, delay_s), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Reads pieces and has them delivered when they are due; an empty one is the end."""
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
    with contextlib.suppress(OSError):  # gone meanwhile
        while True:
            at_s, data = due.get()
            # An event loop's timers are only good to a millisecond or two.
            time.sleep(max(0.0, at_s - time.monotonic()))
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)


def main(arguments: Sequence[str]) -> int:
    """Relays what the command line says."""
    if len(arguments) != 3:
        print("usage: relay.py HOST PORT DELAY_S", file=sys.stderr)
        return 2
    host, port, delay_s = arguments
    threading.Thread(target=relay, args=(host, int(port), float(delay_s)), daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
