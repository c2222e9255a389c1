"""Tests of the connection to an engine that need no faults; those are in `test_faults`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from conure.engine import protocol
from conure.server.engines import connection
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


def step(number: int, *reports: protocol.Report, epoch: int) -> protocol.StepReport:
    """Return the report of a step."""
    return protocol.StepReport(epoch, number, reports=list(reports), num_free=10, num_cached=0)


async def test_other_callbacks_run_between_the_reports_of_a_large_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DELIVERY_S", 0.0)
    async with server_harness(tmp_path) as harness:
        engine = harness.executor.services.engine("engine-0")
        assert isinstance(engine, EngineConnection)
        received: list[protocol.Report | str] = []
        context = engine.new_context(received.append, "p")
        first, second = protocol.Filled(context, 1, 0, 0), protocol.Tokens(context, [1], "a")
        third = protocol.Tokens(context, [2], "b")
        engine._handle_steps([step(1, first, second, epoch=engine.epoch)])
        asyncio.get_running_loop().call_soon(received.append, "another callback")
        assert received == [first]
        engine._handle_steps([step(2, third, epoch=engine.epoch)])
        for _ in range(3):
            await asyncio.sleep(0)
    assert received == [first, second, "another callback", third]


async def test_reports_that_wait_together_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DELIVERY_S", 0.0)
    async with server_harness(tmp_path) as harness:
        engine = harness.executor.services.engine("engine-0")
        assert isinstance(engine, EngineConnection)
        received: list[protocol.Report] = []
        context = engine.new_context(received.append, "p")
        engine._handle_steps(
            [step(1, *[protocol.Filled(context, 1, 0, 0)] * 2, epoch=engine.epoch)]
        )
        for number, text in enumerate("bcd"):
            report = protocol.Tokens(context, [number], text)
            engine._handle_steps([step(2 + number, report, epoch=engine.epoch)])
        for _ in range(3):
            await asyncio.sleep(0)
    assert [report.text for report in received if isinstance(report, protocol.Tokens)] == ["bcd"]


async def test_a_lost_engine_delivers_no_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DELIVERY_S", 0.0)
    async with server_harness(tmp_path) as harness:
        engine = harness.executor.services.engine("engine-0")
        assert isinstance(engine, EngineConnection)
        received: list[protocol.Report] = []
        context = engine.new_context(received.append, "p")
        reports = [protocol.Filled(context, 1, 0, 0)] * 2
        engine._handle_steps([step(1, *reports, epoch=engine.epoch)])
        engine._mark_lost("killed")
        await asyncio.sleep(0)
    assert len(received) == 1
