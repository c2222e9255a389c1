"""Frames over a real socket pair."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from conure.engine import framing, protocol
from conure.engine.framing import FrameError, FrameSocket


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours), theirs


def commands(*items: protocol.Command) -> protocol.Commands:
    return protocol.Commands(list(items))


def test_commands_survive_a_round_trip() -> None:
    sent = commands(
        protocol.Fill(1, [1, 2, 3], parent=2, parent_len=4, salt="s", rank=1.5),
        protocol.GenerateCommand(
            1, protocol.SamplingParams(9, stop=("a",), stop_token_ids=(3,)), group="g"
        ),
        protocol.Update(1, 2.0, None),
        protocol.Free(1, 5),
        protocol.Abort(2),
        protocol.Status(3),
        protocol.Ping(4),
    )
    assert framing.decode_commands(framing.encode(sent)[framing.HEADER_BYTES :]) == sent


def test_reports_survive_a_round_trip() -> None:
    sent = protocol.StepReport(
        1,
        2,
        3,
        4,
        5,
        False,
        [
            protocol.Filled(1, 2, 3, 4, 5),
            protocol.Tokens(1, [7], "x"),
            protocol.Finished(1, "stop", "x", 1, "", 2, "end"),
            protocol.Finished(1, "stop", "x", 1, "", 2, 9),
            protocol.Failed(1, "a.b", "c"),
            protocol.Aborted(1, 2, 3),
            protocol.StatusReport(*range(12)),
            protocol.Pong(1),
        ],
    )
    assert framing.decode_step(framing.encode(sent)[framing.HEADER_BYTES :]) == sent


def test_partial_frames_are_joined(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    first, second = (
        framing.encode(commands(protocol.Ping(1))),
        framing.encode(commands(protocol.Ping(2))),
    )
    stream = first + second
    for byte in stream[:-1]:
        theirs.send(bytes([byte]))
    assert ours.receive(wait=False) == [first[4:]]
    assert ours.receive(wait=False) == []
    theirs.send(stream[-1:])
    assert ours.receive(wait=True) == [second[4:]]


def test_close_is_detected_after_the_last_frame(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.send(framing.encode(commands(protocol.Ping(1))))
    theirs.close()
    assert len(ours.receive(wait=True) or []) == 1
    assert ours.receive(wait=True) is None
    assert ours.receive(wait=False) is None


def test_close_within_a_frame_is_an_error(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.send(framing.encode(commands(protocol.Ping(1)))[:-1])
    theirs.close()
    with pytest.raises(FrameError, match="middle of a frame"):
        ours.receive(wait=True)


def test_oversized_frame_is_rejected(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.send((framing.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError, match=f"larger than {framing.MAX_FRAME_BYTES}"):
        ours.receive(wait=True)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode([[["unknown", 1]]]), b"\x91\x91\x93\xa4ping"]
)
def test_malformed_commands_are_a_frame_error(payload: bytes) -> None:
    with pytest.raises(FrameError, match="cannot be decoded"):
        framing.decode_commands(payload)


def test_simultaneous_large_sends_do_not_deadlock() -> None:
    ours, theirs = socket.socketpair()
    frame = commands(protocol.Fill(1, list(range(1_000_000))))
    received: list[protocol.Commands] = []

    def talk(end: FrameSocket) -> None:
        assert end.send(frame)
        received.extend(map(framing.decode_commands, end.receive(wait=True) or []))

    with ours, theirs:
        threads = [
            threading.Thread(target=talk, args=(FrameSocket(sock),), daemon=True)
            for sock in (ours, theirs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert received == [frame, frame]


def test_send_to_a_closed_peer_returns_false(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    assert not ours.send(commands(protocol.Ping(1)))


def test_socket_with_a_high_file_descriptor_sleeps_and_sends(high_descriptor: int) -> None:
    ours, theirs = socket.socketpair()
    frame = commands(protocol.Fill(1, list(range(1_000_000))))
    peer = FrameSocket(theirs)
    with theirs, socket.socket(fileno=os.dup2(ours.fileno(), high_descriptor)) as high:
        ours.close()
        echo = threading.Thread(target=lambda: peer.receive(wait=True) and peer.send(frame))
        echo.start()
        engine = FrameSocket(high)
        assert engine.send(frame)
        assert engine.receive(wait=True) == [framing.encode(frame)[framing.HEADER_BYTES :]]
        echo.join(20)


def test_wake_descriptor_ends_a_wait(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, _ = pair
    wake, sink = os.pipe()
    os.write(sink, b"x")
    assert ours.receive(wait=True, wake=wake) == []
    os.close(wake)
    os.close(sink)
