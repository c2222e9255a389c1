"""Server-sent events, read from bytes as they come.

Knows the event-stream format (comments, the three line ends, fields split over chunks at
any byte) and how the server writes an event of a program into it. Refuses to know
connections: whoever reads the network feeds chunks in and takes events out.

Kept true: the events that come out do not depend on where the bytes were cut; an event
whose blank line has not come yet is not given out.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import msgspec

from conure.server.program.errors import ConureError
from conure.server.program.status import Event, EventType

MAX_EVENT_BYTES = 256 * 1024 * 1024
"""A single event beyond this is no event of ours: the stream is cut instead of the memory."""

_BOM = b"\xef\xbb\xbf"


class Message(NamedTuple):
    """One dispatched message; `event` is `message` where the stream names none."""

    id: str | None
    event: str
    data: str


class Parser:
    """Turns chunks of an event stream into messages."""

    def __init__(self) -> None:
        self._tail = b""
        self._started = False
        self._id: str | None = None
        self._event = ""
        self._data: list[bytes] = []
        self._is_within = False
        """Lines of the message whose blank line has not come were taken already."""

    def feed(self, chunk: bytes) -> list[Message]:
        """Take the next bytes; return the messages they complete (often none).

        Raises:
            ConureError: `client.stream` if one message is longer than `MAX_EVENT_BYTES`.
        """
        buffer = self._tail + chunk
        if not self._started:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._tail = buffer
                return []
            self._started = True
            buffer = buffer.removeprefix(_BOM)
        if b"\r" in buffer or self._is_within:
            return self._by_line(buffer)
        # As our server writes: whole messages, taken apart at once.
        *blocks, self._tail = buffer.split(b"\n\n")
        messages = []
        for block in blocks:
            for line in block.split(b"\n"):
                self._line(line)
            if (message := self._dispatch()) is not None:
                messages.append(message)
        self._check_length(len(self._tail))
        return messages

    def _by_line(self, buffer: bytes) -> list[Message]:
        # A final "\r" may be the first half of "\r\n", so it waits for the next chunk.
        held = b""
        if buffer.endswith(b"\r"):
            buffer, held = buffer[:-1], b"\r"
        lines = buffer.splitlines(keepends=True)
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            held = lines.pop() + held
        self._tail = held
        messages = []
        for line in lines:
            content = line.rstrip(b"\r\n")
            self._is_within = bool(content)
            if content:
                self._line(content)
            elif (message := self._dispatch()) is not None:
                messages.append(message)
        self._check_length(len(held) + sum(map(len, self._data)))
        return messages

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > MAX_EVENT_BYTES:
            raise ConureError(
                "client.stream", f"an event is longer than {MAX_EVENT_BYTES} bytes: stream dropped"
            )

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode(errors="replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode(errors="replace")

    def _dispatch(self) -> Message | None:
        message = None
        if self._data:
            data = b"\n".join(self._data).decode(errors="replace")
            message = Message(self._id, self._event or "message", data)
        # The standard keeps the last id for later messages; ours is per event, because
        # a delta has none and must not inherit the one before it.
        self._id, self._event, self._data = None, "", []
        return message


class Cursor:
    """A reader's place in the events of one program, over any number of connections."""

    def __init__(self, after: int = 0) -> None:
        self.after = after
        """Sequence of the last event that was given out; a reconnect asks for what follows."""
        self._parser = Parser()

    def reconnect(self) -> None:
        """Forget the half-read event of the connection that broke."""
        self._parser = Parser()

    def feed(self, chunk: bytes) -> list[Event]:
        """Events that `chunk` completes, without those that were given out before."""
        events = []
        for message in self._parser.feed(chunk):
            event = _event(message)
            if event.seq is not None:
                if event.seq <= self.after:
                    continue
                self.after = event.seq
            events.append(event)
        return events


def _event(message: Message) -> Event:
    try:
        data = msgspec.json.decode(message.data)
        seq = None if message.id is None else int(message.id)
    except ValueError as problem:
        raise ConureError(
            "client.stream", f"not an event of a program: {message.data[:200]!r} ({problem})"
        ) from problem
    return Event(seq=seq, type=cast(EventType, message.event), data=data)
