"""Frames over a real socket pair."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from conure.engine import api, frames
from conure.engine.frames import FrameError, FrameSocket


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours), theirs


def commands(*items: api.Command) -> api.Commands:
    return api.Commands(list(items))


def test_every_command_comes_back_as_it_was() -> None:
    sent = commands(
        api.Fill(1, [1, 2, 3], parent=2, parent_len=4, salt="s", rank=1.5),
        api.Generate(1, api.Sampling(9, stop=("a",), stop_token_ids=(3,)), group="g"),
        api.Update(1, 2.0, None),
        api.Free(1, 5),
        api.Abort(2),
        api.Status(3),
        api.Ping(4),
    )
    assert frames.decode_commands(frames.encode(sent)[frames.HEADER_BYTES :]) == sent


def test_every_report_comes_back_as_it_was() -> None:
    sent = api.Step(
        1,
        2,
        3,
        4,
        [
            api.Filled(1, 2, 3, 4, 5),
            api.Tokens(1, [7], "x"),
            api.Finished(1, "stop", "x", 1, "", 2, "end"),
            api.Finished(1, "stop", "x", 1, "", 2, 9),
            api.Failed(1, "a.b", "c"),
            api.StatusReport(*range(12)),
            api.Pong(1),
        ],
    )
    assert frames.decode_step(frames.encode(sent)[frames.HEADER_BYTES :]) == sent


def test_frames_that_come_in_pieces_are_put_together(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    first, second = frames.encode(commands(api.Ping(1))), frames.encode(commands(api.Ping(2)))
    stream = first + second
    for byte in stream[:-1]:
        theirs.send(bytes([byte]))
    assert ours.receive(wait=False) == [first[4:]]
    assert ours.receive(wait=False) == []
    theirs.send(stream[-1:])
    assert ours.receive(wait=True) == [second[4:]]


def test_a_peer_that_closes_is_noticed_after_its_last_frame(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.send(frames.encode(commands(api.Ping(1))))
    theirs.close()
    assert len(ours.receive(wait=True) or []) == 1
    assert ours.receive(wait=True) is None
    assert ours.receive(wait=False) is None


def test_a_peer_that_closes_within_a_frame_is_an_error(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.send(frames.encode(commands(api.Ping(1)))[:-1])
    theirs.close()
    with pytest.raises(FrameError, match="middle of a frame"):
        ours.receive(wait=True)


def test_a_length_beyond_the_bound_is_refused_before_anything_is_kept(
    pair: tuple[FrameSocket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.send((frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError, match=f"larger than {frames.MAX_FRAME_BYTES}"):
        ours.receive(wait=True)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode([[["unknown", 1]]]), b"\x91\x91\x93\xa4ping"]
)
def test_bytes_that_are_no_commands_are_a_frame_error(payload: bytes) -> None:
    with pytest.raises(FrameError, match="cannot be read"):
        frames.decode_commands(payload)


def test_two_peers_that_both_write_more_than_a_socket_holds_do_not_lock() -> None:
    ours, theirs = socket.socketpair()
    frame = commands(api.Fill(1, list(range(1_000_000))))
    received: list[api.Commands] = []

    def talk(end: FrameSocket) -> None:
        assert end.send(frame)
        received.extend(map(frames.decode_commands, end.receive(wait=True) or []))

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


def test_writing_to_a_peer_that_has_gone_says_so(pair: tuple[FrameSocket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    assert not ours.send(commands(api.Ping(1)))
