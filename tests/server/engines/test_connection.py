"""Tests of the connection to an engine that need no faults; those are in `test_faults`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from conure.engine import protocol
from conure.server.engines.connection import EngineConnection

from ..inprocess import server_harness


class RecordingTransport:
    """Keeps the frames that are written."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, frame: bytes) -> None:
        """Keep a frame without its length."""
        self.frames.append(frame[4:])


async def test_abort_leaves_at_once_after_earlier_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        engine = harness.executor.services.engine("engine-0")
        assert isinstance(engine, EngineConnection)
        context = engine.new_context(lambda _: None, "p")
        transport = RecordingTransport()
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_transport", transport)
            engine.send(protocol.Status(7))
            assert not transport.frames, "other commands leave with the loop's iteration"
            engine.abort(context, lambda _: None)
            (frame,) = transport.frames
            engine._flush()  # the one that `send` has scheduled
            assert len(transport.frames) == 1, "no empty frame"
    sent = msgspec.msgpack.decode(frame, type=protocol.Commands)
    assert [type(command) for command in sent.commands] == [protocol.Status, protocol.Abort]
