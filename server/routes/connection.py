"""HTTP connections with limits: bytes and seconds of a request, connections, slow readers.

Responsibility: what one connection may hold. `asyncio` protocols only; routes do not see them.

Invariants: a connection that waits for the rest of a request, or for its client to read, ends after
a time. Memory of a connection is bounded before and after the head of a request is parsed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 32 * 1024
"""Bytes of the request line and the headers."""
HEAD_S, BODY_S = 10.0, 60.0
"""Seconds for the head of a request, from its first byte or the start of the connection, and for
its body."""
STALL_S: Final = 30.0
"""Seconds after which a client that does not read its response is disconnected."""
CHECK_S: Final = 1.0
WRITE_BUFFER_BYTES: Final = 32 * 1024
"""Bytes of a response that wait for the client, in addition to the kernel's own buffer."""
RESERVED_FILES: Final = 128
"""File descriptors that are kept for engines, the journal and recovery."""
MAX_CONNECTIONS, MIN_CONNECTIONS = 4_096, 64
MAX_BODY_BYTES_TOTAL: Final = 128 * 1024 * 1024
"""Bytes of the bodies of all requests that are not answered yet."""

HEAD_TOO_LARGE = b"431 Request Header Fields Too Large"
TIMED_OUT = b"408 Request Timeout"
OVERLOADED = b"503 Service Unavailable"


def max_connections() -> int:
    """Return how many connections the process can have: its files, without those it needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, soft - RESERVED_FILES))


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of a server's connections, and what they hold together."""

    max_connections: int
    head_s: float = HEAD_S
    body_s: float = BODY_S
    stall_s: float = STALL_S
    body_bytes: int = 0
    """Bytes of the bodies of all requests that are not answered yet."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with limits."""

    def __init__(self, *, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._num_body_bytes = 0
        self._num_head_bytes = 0
        self._is_in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # --- the connection -------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, or refuse it if there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(OVERLOADED, "server.connections", "too many connections: retry later")
            return
        self._start_deadline(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._stop_deadline()
        self._stop_stall()
        self._release_body()
        super().connection_lost(exc)

    # --- requests -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse a part of a request, unless its head is too large."""
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._deadline is None:
                self._start_deadline(self._limits.head_s)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self._ends_head(data):
                message = f"the head of a request can have at most {MAX_HEAD_BYTES:,} bytes"
                self._refuse(HEAD_TOO_LARGE, "request.head_too_large", message)
                return
        super().data_received(data)

    def _ends_head(self, data: bytes) -> bool:
        """Return whether the head ends within its limit and a body follows."""
        end = data.find(b"\r\n\r\n")
        return end >= 0 and self._num_head_bytes - len(data) + end <= MAX_HEAD_BYTES

    def on_headers_complete(self) -> None:
        """Begin the body."""
        self._is_in_head = False
        self._start_deadline(self._limits.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body, unless the bodies of all requests are too large together."""
        self._num_body_bytes += len(body)
        self._limits.body_bytes += len(body)
        if self._limits.body_bytes > MAX_BODY_BYTES_TOTAL:
            self._refuse(OVERLOADED, "server.bodies", "too many large requests: retry later")
            return
        super().on_body(body)

    def on_response_complete(self) -> None:
        """End the response."""
        self._release_body()
        super().on_response_complete()

    def _release_body(self) -> None:
        self._limits.body_bytes -= self._num_body_bytes
        self._num_body_bytes = 0

    def on_message_complete(self) -> None:
        """End the request."""
        self._stop_deadline()
        self._is_in_head = True
        self._num_head_bytes = 0
        super().on_message_complete()

    def _start_deadline(self, seconds: float) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, self._timed_out)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _timed_out(self) -> None:
        self._deadline = None
        self._refuse(TIMED_OUT, "request.timeout", "the request did not arrive in time")

    def _refuse(self, status: bytes, code: str, message: str) -> None:
        """Answer without the application, and close the connection."""
        if self.transport is None or self.transport.is_closing():
            return
        body = (
            f'{{"type":"urn:conure:problem:{code}","title":"{status[4:].decode()}",'
            f'"status":{int(status[:3])},"detail":"{message}","code":"{code}"}}'
        ).encode()
        head = (
            b"HTTP/1.1 %s\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n"
            b"Retry-After: 1\r\nConnection: close\r\n\r\n" % (status, len(body))
        )
        self.transport.write(head + body)
        self.transport.close()

    # --- responses ------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Stop the response, and disconnect the client if it does not read for long."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.stall_s, self._stalled)

    def resume_writing(self) -> None:
        """Go on with the response."""
        self._stop_stall()
        super().resume_writing()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        self._stall = None
        if self.transport is not None:
            self.transport.abort()
