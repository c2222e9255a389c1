"""Frames between server and engine: a length, then one msgpack value.

A frame is four bytes of length (big-endian, payload only) and that many bytes of msgpack.
The server sends `Commands`, the engine one `Hello` and then a `Step` per step. The kind of a
frame follows from its direction and place, so nothing on the wire names a type, and decoding
builds nothing but the records of `api` (never pickle: a frame from a stranger is an error,
not a program).

The engine is one thread that computes, so its end drains what is there between steps and
sleeps when idle (`FrameSocket`). Refuses to know what a frame is for.
"""

from __future__ import annotations

import select
import socket
from typing import Final, TypeAlias, TypeVar

import msgspec

from .api import Commands, Hello, Step

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""The largest frame is a Hello with a tokenizer in it: tens of MiB."""
HEADER_BYTES: Final = 4
_READ_BYTES: Final = 256 * 1024

Frame: TypeAlias = Commands | Hello | Step
_T = TypeVar("_T")

_ENCODER: Final = msgspec.msgpack.Encoder()
_COMMANDS: Final = msgspec.msgpack.Decoder(Commands)
_HELLO: Final = msgspec.msgpack.Decoder(Hello)
_STEP: Final = msgspec.msgpack.Decoder(Step)


class FrameError(Exception):
    """What came over the wire is no frame, or what should go is too large for one."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame, length included.

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
    """Return what the server sent.

    Raises:
        FrameError: if the payload is no `Commands`.
    """
    return _decode(_COMMANDS, payload)


def decode_hello(payload: bytes) -> Hello:
    """Return the first frame of an engine.

    Raises:
        FrameError: if the payload is no `Hello`.
    """
    return _decode(_HELLO, payload)


def decode_step(payload: bytes) -> Step:
    """Return a frame of an engine after its first.

    Raises:
        FrameError: if the payload is no `Step`.
    """
    return _decode(_STEP, payload)


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a frame of {len(payload)} bytes cannot be read: {error}") from error


class FrameSocket:
    """Whole frames over a connected stream socket, for a single thread.

    Reading never blocks unless asked to. Writing waits for room, and goes on reading
    meanwhile: two peers that both write cannot lock each other out.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a socket; it becomes non-blocking."""
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._is_closed = False

    def receive(self, *, wait: bool, wake: int | None = None) -> list[bytes] | None:
        """Return the payloads that are there, in order; None once the peer has closed.

        With `wait`, sleep until at least one is there, or the file descriptor `wake` is
        readable. Frames that came whole before the peer closed are returned first.

        Raises:
            FrameError: if a frame is too large or the peer closed in the middle of it.
        """
        self._drain()
        frames = self._cut()
        awaited = [self._sock.fileno(), *([] if wake is None else [wake])]
        while wait and not frames and not self._is_closed:
            readable, _, _ = select.select(awaited, [], [])
            self._drain()
            frames = self._cut()
            if wake in readable:
                break
        if frames or not self._is_closed:
            return frames
        if self._buffer:
            raise FrameError("the peer closed in the middle of a frame")
        return None

    def send(self, frame: Frame) -> bool:
        """Write a frame whole; False where the peer has closed.

        Raises:
            FrameError: if the frame is too large.
        """
        rest = memoryview(encode(frame))
        while rest and not self._is_closed:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                readable, _, _ = select.select([self._sock], [self._sock], [])
                if readable:
                    self._drain()
            except (BrokenPipeError, ConnectionResetError):
                self._is_closed = True
        return not rest

    def _drain(self) -> None:
        """Move what the kernel has into the buffer."""
        while not self._is_closed:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            self._buffer += data
            self._is_closed = not data

    def _cut(self) -> list[bytes]:
        """Take the whole frames off the buffer."""
        frames: list[bytes] = []
        buffer, at = self._buffer, 0
        while len(buffer) - at >= HEADER_BYTES:
            begin = at + HEADER_BYTES
            end = begin + _length_of(buffer[at:begin])
            if end > len(buffer):
                break
            frames.append(bytes(buffer[begin:end]))
            at = end
        if at:
            del buffer[:at]
        return frames


def _length_of(header: bytes | bytearray) -> int:
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    return length
