"""Frames between server and engine: a length, then one msgpack value.

A frame is four bytes of payload length (big-endian) and the msgpack payload. The server sends
`Commands`; the engine sends one `Hello` and then `StepReport`s. Direction and position determine
the type of a frame, so frames carry no type name, and decoding only builds the records of
`protocol`. (Never pickle: a malicious frame must be an error, not code.)

The engine computes in a single thread. It reads the available frames between steps, and sleeps
while it is idle (`FrameSocket`).
"""

from __future__ import annotations

import select
import socket
from typing import Final, TypeAlias, TypeVar

import msgspec

from .protocol import Commands, Hello, StepReport

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""The largest frame is a Hello with its tokenizer: tens of MiB."""
HEADER_BYTES: Final = 4
_READ_BYTES: Final = 256 * 1024

Frame: TypeAlias = Commands | Hello | StepReport
_T = TypeVar("_T")

_ENCODER: Final = msgspec.msgpack.Encoder()
_COMMANDS: Final = msgspec.msgpack.Decoder(Commands)
_HELLO: Final = msgspec.msgpack.Decoder(Hello)
_STEP: Final = msgspec.msgpack.Decoder(StepReport)


class FrameError(Exception):
    """A received frame is malformed, or a frame exceeds `MAX_FRAME_BYTES`."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame, including its length.

    Raises:
        FrameError: if it is larger than `MAX_FRAME_BYTES`.
    """
    buffer = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(frame, buffer, HEADER_BYTES)
    length = len(buffer) - HEADER_BYTES
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    buffer[:HEADER_BYTES] = length.to_bytes(HEADER_BYTES, "big")
    return bytes(buffer)


def decode_commands(payload: bytes) -> Commands:
    """Decode a frame from the server.

    Raises:
        FrameError: if the payload is not a `Commands`.
    """
    return _decode(_COMMANDS, payload)


def decode_hello(payload: bytes) -> Hello:
    """Decode the first frame of an engine.

    Raises:
        FrameError: if the payload is not a `Hello`.
    """
    return _decode(_HELLO, payload)


def decode_step(payload: bytes) -> StepReport:
    """Decode a later frame of an engine.

    Raises:
        FrameError: if the payload is not a `StepReport`.
    """
    return _decode(_STEP, payload)


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a frame of {len(payload)} bytes cannot be decoded: {error}") from error


class FrameSocket:
    """Sends and receives whole frames over a connected stream socket, for one thread.

    Receiving only blocks on request. Sending blocks until the frame is written, and reads
    meanwhile, so that two peers that both send cannot deadlock.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a socket and make it non-blocking."""
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._is_closed = False

    def receive(self, *, wait: bool, wake: int | None = None) -> list[bytes] | None:
        """Return the available payloads in order, or None once the peer has closed.

        With `wait`, sleep until at least one payload is available or the file descriptor `wake`
        is readable. Frames that arrived before the peer closed are returned first.

        Raises:
            FrameError: if a frame is too large, or the peer closed in the middle of one.
        """
        self._drain()
        frames = self._take_frames()
        while wait and not frames and not self._is_closed:
            happened = self._wait(select.POLLIN, wake)
            self._drain()
            frames = self._take_frames()
            if wake in happened:
                break
        if frames or not self._is_closed:
            return frames
        if self._buffer:
            raise FrameError("the peer closed in the middle of a frame")
        return None

    def send(self, frame: Frame) -> bool:
        """Write a whole frame. Return False if the peer has closed.

        Raises:
            FrameError: if the frame is too large.
        """
        rest = memoryview(encode(frame))
        while rest and not self._is_closed:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                happened = self._wait(select.POLLIN | select.POLLOUT)
                if happened[self._sock.fileno()] != select.POLLOUT:
                    self._drain()
            except (BrokenPipeError, ConnectionResetError):
                self._is_closed = True
        return not rest

    def _wait(self, events: int, wake: int | None = None) -> dict[int, int]:
        """Wait for events of the socket, or until the file descriptor `wake` is readable.

        Returns:
            The events by file descriptor. An error or a closed peer is an event, too.
        """
        poll = select.poll()  # unlike `select`, it accepts file descriptors above 1,023
        poll.register(self._sock, events)
        if wake is not None:
            poll.register(wake, select.POLLIN)
        return dict(poll.poll())

    def _drain(self) -> None:
        """Read all received bytes into the buffer."""
        while not self._is_closed:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            self._buffer += data
            self._is_closed = not data

    def _take_frames(self) -> list[bytes]:
        """Remove the complete frames from the buffer, and return their payloads."""
        frames: list[bytes] = []
        buffer, at = self._buffer, 0
        while len(buffer) - at >= HEADER_BYTES:
            begin = at + HEADER_BYTES
            end = begin + _payload_length(buffer[at:begin])
            if end > len(buffer):
                break
            frames.append(bytes(buffer[begin:end]))
            at = end
        if at:
            del buffer[:at]
        return frames


def _payload_length(header: bytes | bytearray) -> int:
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    return length
