"""Parser of server-sent events.

Responsibility: the event-stream format (comments, three line ends, fields split over chunks at any
byte) and the encoding of a program's events as its messages.
Out of scope: connections; the caller feeds chunks and gets events.
Invariants: the events do not depend on the chunk boundaries. An event is returned only once its
blank line was received.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import msgspec

from conure.server.program.errors import ConureError
from conure.server.program.status import Event, EventType

MAX_EVENT_BYTES = 256 * 1024 * 1024
"""A longer event is an error, as no Conure server sends one; it bounds the parser's memory."""

_BOM = b"\xef\xbb\xbf"


class SSEMessage(NamedTuple):
    """One message. `event` is `message` if the stream does not name it."""

    id: str | None
    event: str
    data: str


class SSEParser:
    """Parses the chunks of an event stream into messages."""

    def __init__(self) -> None:
        self._tail = b""
        """What was received after the last complete message, or line."""
        self._pieces: list[bytes] = []
        """Chunks without a line end that follow the tail. They are joined once, at the next line
        end: an event may have 16 MiB, in chunks of 64 KiB."""
        self._num_bytes = 0
        """Of the tail and the pieces."""
        self._started = False
        self._id: str | None = None
        self._event = ""
        self._data: list[bytes] = []
        self._is_inside_message = False
        """Lines of a message were parsed, but not yet its blank line."""

    def feed(self, chunk: bytes) -> list[SSEMessage]:
        """Return the messages that a chunk completes.

        Raises:
            ConureError: `client.stream` if one message is longer than `MAX_EVENT_BYTES`.
        """
        self._pieces.append(chunk)
        self._num_bytes += len(chunk)
        if self._started and self._has_no_line_end(chunk):
            self._check_length(self._num_bytes + sum(map(len, self._data)))
            return []
        buffer = b"".join((self._tail, *self._pieces))
        self._pieces.clear()
        if not self._started:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._set_tail(buffer)
                return []
            self._started = True
            buffer = buffer.removeprefix(_BOM)
        if b"\r" in buffer or self._is_inside_message:
            return self._feed_lines(buffer)
        # Fast path for the format of a Conure server: split into complete messages.
        *blocks, tail = buffer.split(b"\n\n")
        self._set_tail(tail)
        messages = []
        for block in blocks:
            for line in block.split(b"\n"):
                self._parse_line(line)
            if (message := self._dispatch()) is not None:
                messages.append(message)
        self._check_length(self._num_bytes)
        return messages

    def _has_no_line_end(self, chunk: bytes) -> bool:
        """Return whether a chunk completes no line, and so no message."""
        # A final "\r" of the tail ends a line, unless "\n" follows.
        return not (b"\n" in chunk or b"\r" in chunk or self._tail.endswith(b"\r"))

    def _set_tail(self, tail: bytes) -> None:
        self._tail, self._num_bytes = tail, len(tail)

    def _feed_lines(self, buffer: bytes) -> list[SSEMessage]:
        # A final "\r" may be the first half of "\r\n", so it is kept for the next chunk.
        rest = b""
        if buffer.endswith(b"\r"):
            buffer, rest = buffer[:-1], b"\r"
        lines = buffer.splitlines(keepends=True)
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            rest = lines.pop() + rest
        self._set_tail(rest)
        messages = []
        for line in lines:
            content = line.rstrip(b"\r\n")
            self._is_inside_message = bool(content)
            if content:
                self._parse_line(content)
            elif (message := self._dispatch()) is not None:
                messages.append(message)
        self._check_length(len(rest) + sum(map(len, self._data)))
        return messages

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > MAX_EVENT_BYTES:
            raise ConureError(
                "client.stream",
                f"an event exceeds {MAX_EVENT_BYTES:,} bytes, so its stream was closed; is this a "
                "Conure server?",
            )

    def _parse_line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode(errors="replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode(errors="replace")

    def _dispatch(self) -> SSEMessage | None:
        message = None
        if self._data:
            data = b"\n".join(self._data).decode(errors="replace")
            message = SSEMessage(self._id, self._event or "message", data)
        # The standard keeps the last id for later messages. Here an id belongs to one event:
        # deltas have none, and must not inherit that of the event before.
        self._id, self._event, self._data = None, "", []
        return message


class Cursor:
    """A reader's position in the events of one program, over any number of connections."""

    def __init__(self, after: int = 0) -> None:
        self.after = after
        """Sequence number of the last returned event; a new connection continues after it."""
        self._parser = SSEParser()

    def reconnect(self) -> None:
        """Discard the incomplete event of a broken connection."""
        self._parser = SSEParser()

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that a chunk completes, without those returned before."""
        events = []
        for message in self._parser.feed(chunk):
            event = _event(message)
            if event.seq is not None:
                if event.seq <= self.after:
                    continue
                self.after = event.seq
            events.append(event)
        return events


def _event(message: SSEMessage) -> Event:
    try:
        data = msgspec.json.decode(message.data)
        seq = None if message.id is None else int(message.id)
    except ValueError as problem:
        raise ConureError(
            "client.stream",
            f"invalid event {message.data[:200]!r} ({problem}); is this a Conure server?",
        ) from problem
    return Event(seq=seq, type=cast(EventType, message.event), data=data)
