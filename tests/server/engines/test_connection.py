"""Tests of the connection to an engine that need no faults; those are in `test_faults`."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from conure.engine import protocol
from conure.engine.config import EngineConfig
from conure.server.engines import connection
from conure.server.engines.command_line import EngineCommandLine
from conure.server.engines.connection import EngineConnection, EngineStartError

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


@pytest.fixture
async def busy_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineConnection]:
    """An engine whose reports take so long that each iteration of the loop delivers one."""
    monkeypatch.setattr(connection, "DELIVERY_S", 0.0)
    async with server_harness(tmp_path) as harness:
        engine = harness.executor.services.engine("engine-0")
        assert isinstance(engine, EngineConnection)
        yield engine


def end_step(engine: EngineConnection, *reports: protocol.Report) -> None:
    """Let the server receive the reports of a step."""
    report = protocol.StepReport(
        engine.epoch,
        1,
        num_free=10,
        num_cached=0,
        num_tokens=0,
        is_idle=False,
        reports=[*reports],
    )
    engine._handle_steps([report])


async def test_other_callbacks_run_between_the_reports_of_a_large_step(
    busy_engine: EngineConnection,
) -> None:
    received: list[protocol.Report | str] = []
    context = busy_engine.new_context(received.append, "p")
    first, second = protocol.Filled(context, 1, 0, 0), protocol.Tokens(context, [1], "a")
    third = protocol.Tokens(context, [2], "b")
    end_step(busy_engine, first, second)
    asyncio.get_running_loop().call_soon(received.append, "another callback")
    assert received == [first]
    end_step(busy_engine, third)
    for _ in range(3):
        await asyncio.sleep(0)
    assert received == [first, second, "another callback", third]


async def test_reports_that_wait_together_are_merged(busy_engine: EngineConnection) -> None:
    received: list[protocol.Report] = []
    context = busy_engine.new_context(received.append, "p")
    end_step(busy_engine, *[protocol.Filled(context, 1, 0, 0)] * 2)
    for number, text in enumerate("bcd"):
        end_step(busy_engine, protocol.Tokens(context, [number], text))
    for _ in range(3):
        await asyncio.sleep(0)
    assert [report.text for report in received if isinstance(report, protocol.Tokens)] == ["bcd"]


async def test_a_lost_engine_delivers_no_reports(busy_engine: EngineConnection) -> None:
    received: list[protocol.Report] = []
    context = busy_engine.new_context(received.append, "p")
    end_step(busy_engine, *[protocol.Filled(context, 1, 0, 0)] * 2)
    busy_engine._mark_lost("killed")
    await asyncio.sleep(0)
    assert len(received) == 1


async def start_script(
    monkeypatch: pytest.MonkeyPatch, script: str, start_s: float
) -> EngineConnection:
    """Start a Python program in place of an engine; `file` is its socket."""

    def argv(_: EngineCommandLine, descriptor: int, beats: int, epoch: int) -> list[str]:
        opened = f"import os, socket, sys, time; file = socket.socket(fileno={descriptor})"
        return [sys.executable, "-c", f"{opened}; {script}"]

    monkeypatch.setattr(EngineCommandLine, "argv", argv)
    return await EngineConnection.start(
        "engine-0",
        1,
        EngineCommandLine(EngineConfig()),
        on_lost=lambda engine, reason: None,
        start_s=start_s,
        hang_s=60,
        freeze_s=60,
    )


WARN = "print('a warning', file=sys.stderr, flush=True)"


@pytest.mark.parametrize(
    ("script", "start_s", "message"),
    [
        (f"{WARN}; os.kill(os.getpid(), 9)", 60, "ended by signal 9 .*memory; .*: a warning"),
        (f"{WARN}; sys.exit(1)", 60, "^a warning$"),
        ("sys.exit(1)", 60, "closed its connection before it was ready"),
        (f"{WARN}; file.recv(1)", 0.5, "did not start within 0.5 s"),
        (f"{WARN}; file.send(bytes([0, 0, 0, 1, 7])); file.recv(1)", 60, "malformed frame"),
    ],
)
async def test_a_failed_start_says_why(
    monkeypatch: pytest.MonkeyPatch, script: str, start_s: float, message: str
) -> None:
    with pytest.raises(EngineStartError, match=message):
        await start_script(monkeypatch, script, start_s)


async def test_a_hello_of_another_version_is_refused_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, busy_engine: EngineConnection
) -> None:
    hello = msgspec.to_builtins(msgspec.structs.replace(busy_engine.hello, protocol=-1))
    del hello["num_ids"]  # another version has other fields
    frame = msgspec.msgpack.encode(hello)
    sent = len(frame).to_bytes(4, "big") + frame
    with pytest.raises(EngineStartError, match="version -1, the server uses"):
        await start_script(monkeypatch, f"{WARN}; file.sendall({sent!r}); file.recv(1)", 60)


async def test_cancelled_start_closes_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = socket.socketpair()
    is_starting = asyncio.Event()

    async def start_forever(*args: object, **options: object) -> None:
        is_starting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(socket, "socketpair", lambda: pair)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_forever)
    start = asyncio.create_task(
        EngineConnection.start(
            "engine-0",
            1,
            EngineCommandLine(EngineConfig()),
            on_lost=lambda engine, reason: None,
            start_s=60,
            hang_s=60,
            freeze_s=60,
        )
    )
    await is_starting.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [end.fileno() for end in pair] == [-1, -1]
