"""HTTP connections with limits: bytes and seconds of a request, connections, slow readers.

Responsibility: what one connection may hold. `asyncio` protocols only; routes do not see them.

Invariants: a connection that waits for the rest of a request, or for its client to read, ends after
a time. Memory of a connection is bounded before and after the head of a request is parsed. No
refusal is written into a response that has begun. A request with `Upgrade` is answered as without.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any, Final

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 32 * 1024
"""Bytes of the request line and the headers."""
HEAD_S, BODY_S = 10.0, 60.0
"""Seconds for the head of a request, from its first byte or the start of the connection, and for
its body."""
STALL_S: Final = 30.0
"""Seconds after which a client that does not read its response is disconnected."""
WRITE_BUFFER_BYTES: Final = 32 * 1024
"""Bytes of a response that wait for the client, in addition to the kernel's own buffer."""
RESERVED_FILES: Final = 128
"""File descriptors that are kept for engines, the journal and recovery."""
MAX_CONNECTIONS, MIN_CONNECTIONS = 4_096, 64
MAX_BODY_BYTES_TOTAL: Final = 128 * 1024 * 1024
"""Maximum of `ConnectionLimits.body_bytes`."""
HEAD_END: Final = b"\r\n\r\n"

HEAD_TOO_LARGE = b"431 Request Header Fields Too Large"
TIMED_OUT = b"408 Request Timeout"
OVERLOADED = b"503 Service Unavailable"


def max_connections() -> int:
    """Return how many connections the process can have.

    This is its limit of file descriptors minus `RESERVED_FILES`.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, soft - RESERVED_FILES))


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of a server's connections, and the total size of their unanswered bodies."""

    max_connections: int
    head_s: float = HEAD_S
    body_s: float = BODY_S
    stall_s: float = STALL_S
    body_bytes: int = 0
    """Bytes of the bodies of all requests that are not answered yet."""


class _RequestParser(HttpRequestParser):
    """httptools' parser. At the head of a request with `Upgrade` it stops, and keeps the rest.

    httptools calls `on_message_complete` after such a head, also if a body follows.
    """

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        super().__init__(protocol)
        # As uvicorn: a request after one with `Connection: close` is not an error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self.rest: bytes | None = None
        """What follows the head with `Upgrade`."""

    def feed_data(self, data: Any) -> None:
        """Parse data up to the end, or to that of a head with `Upgrade`."""
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            if not self.has_upgrade:
                raise
            self.rest = data[upgrade.args[0] :]

    @property
    def has_upgrade(self) -> bool:
        """Whether the head of the current request has `Upgrade`."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with limits."""

    parser: _RequestParser

    def __init__(self, *, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.parser = _RequestParser(self)
        self._limits = limits
        self._num_body_bytes = 0
        self._num_head_bytes = 0
        self._end_of_head = b""
        """The last bytes of an incomplete head."""
        self._is_in_head = True
        self._has_begun = False
        """A head has its first character."""
        self._num_unanswered = 0
        """Requests with a complete head and without a complete response."""
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
        if self._is_in_head and not self._has_begun and not data.strip(b"\r\n"):
            return  # some clients end a body with an empty line; the connection stays idle
        if self._is_in_head:
            is_within_limit = self._add_to_head(data)
            if self._deadline is None and self._num_unanswered == 0:
                self._start_deadline(self._limits.head_s)
            if not is_within_limit:
                message = f"the head of a request can have at most {MAX_HEAD_BYTES:,} bytes"
                self._refuse(HEAD_TOO_LARGE, "request.head_too_large", message)
                return
        super().data_received(data)
        while self.parser.rest is not None:
            data = self._head_without_upgrade() + self.parser.rest
            self.parser = _RequestParser(self)
            super().data_received(data)

    def _head_without_upgrade(self) -> bytes:
        """Return the head that was parsed last, without `Upgrade`. HTTP lets a server ignore it."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + HEAD_END

    def _add_to_head(self, data: bytes) -> bool:
        """Count the bytes of a head; return whether it is, or ends, within its limit."""
        text = self._end_of_head + data
        self._num_head_bytes += len(data)
        self._end_of_head = text[-len(HEAD_END) + 1 :]
        if self._num_head_bytes <= MAX_HEAD_BYTES:
            return True
        end = text.find(HEAD_END)
        return end >= 0 and self._num_head_bytes - len(text) + end <= MAX_HEAD_BYTES

    def on_message_begin(self) -> None:
        """Begin the head."""
        self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin the body. uvicorn does not read the body of a request that waits for another."""
        if self.parser.has_upgrade:
            return  # the head is parsed again
        self._is_in_head = False
        self._stop_deadline()
        if self._num_unanswered == 0:
            self._start_deadline(self._limits.body_s)
        self._num_unanswered += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body, unless the bodies of all requests are too large together."""
        if self.cycle.response_complete:
            return  # uvicorn drops it
        self._num_body_bytes += len(body)
        self._limits.body_bytes += len(body)
        if self._limits.body_bytes > MAX_BODY_BYTES_TOTAL:
            self._refuse(OVERLOADED, "server.bodies", "too many large requests: retry later")
            return
        super().on_body(body)

    def on_response_complete(self) -> None:
        """End the response."""
        self._release_body()
        self._num_unanswered -= 1
        is_head_incomplete = self._is_in_head and self._has_begun and not self._num_unanswered
        if self._deadline is None and (is_head_incomplete or not self._is_in_head):
            limits = self._limits
            self._start_deadline(limits.head_s if is_head_incomplete else limits.body_s)
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_stall()

    def _release_body(self) -> None:
        self._limits.body_bytes -= self._num_body_bytes
        self._num_body_bytes = 0

    def on_message_complete(self) -> None:
        """End the request."""
        if self.parser.has_upgrade:
            return
        self._stop_deadline()
        self._is_in_head, self._has_begun = True, False
        self._num_head_bytes, self._end_of_head = 0, b""
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
        if self._is_answering():
            self.transport.abort()
            return
        if not self._is_in_head and self._num_unanswered == 0:  # a body after its answer
            self.transport.close()
            self._start_stall()
            return
        body = (
            f'{{"type":"urn:conure:problem:{code}","title":"{status[4:].decode()}",'
            f'"status":{int(status[:3])},"detail":"{message}","code":"{code}"}}'
        ).encode()
        head = (
            b"HTTP/1.1 %s\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n"
            b"%sConnection: close\r\n\r\n"
            % (status, len(body), b"" if status is HEAD_TOO_LARGE else b"Retry-After: 1\r\n")
        )
        self.transport.write(head + body)
        self.transport.close()
        self._start_stall()

    def _is_answering(self) -> bool:
        """Return whether a response has begun, or an earlier request is due one."""
        if self._num_unanswered == 0:
            return False
        is_one_of_several = self._num_unanswered > 1 or self._is_in_head
        return is_one_of_several or self.cycle.response_started

    # --- responses ------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Stop the response, and disconnect the client if it does not read for long."""
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        """Continue the response."""
        self._stop_stall()
        super().resume_writing()
        if self.transport.is_closing():
            self._start_stall()  # the connection closes once the client has read the rest

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also if its client has not read the last response."""
        super().timeout_keep_alive_handler()
        self._start_stall()

    def _start_stall(self) -> None:
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.stall_s, self._stalled)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        self._stall = None
        if self.transport is not None:
            self.transport.abort()
