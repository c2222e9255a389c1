"""Tests of faults: dead or frozen engines, full disks, functions that raise."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server import executor
from conure.server.engines import fleet
from conure.server.engines.command_line import EngineCommandLine
from conure.server.engines.connection import EngineConnection, EngineStartError
from conure.server.program.errors import UnavailableError
from conure.server.prompts.prompt import RenderedPrompt
from conure.server.prompts.tokenizer import EncodedText
from conure.server.runtime.calls import suspects
from conure.server.runtime.calls.llm_call import LLMCall

from .inprocess import (
    WAIT_S,
    Program,
    ServerHarness,
    answer,
    client,
    expr,
    generate,
    insert,
    server_harness,
    var,
)


def send(harness: ServerHarness, number: signal.Signals, name: str = "engine-0") -> None:
    """Send a signal to an engine's process."""
    assert harness.executor.services.fleet is not None
    process = harness.executor.services.fleet.engines[name]._process
    assert process is not None
    os.kill(process.pid, number)


def speed_up_restarted_engines(harness: ServerHarness) -> None:
    """Configure engines that start from now on to take no time per token."""
    fleet = harness.executor.services.fleet
    assert fleet is not None
    fast = msgspec.structs.replace(fleet._options.command.config, time_per_output_token=0.0)
    fleet._options = replace(fleet._options, command=EngineCommandLine(fast))


SHARED = "The beginning that all of them have in common. " * 4
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60}
"""Options of an output of 60 tokens."""
SLOW_S = 0.1
"""Time per token. A LONG output then takes 6 s, long enough for a signal to reach the engine."""
WORK = [
    *(generate(f"c{i}", SHARED, str(i), **LONG) for i in range(6)),
    {
        "id": "p",
        "op": "generate",
        "prompt": [
            {"text": SHARED},
            {"output": "one", "max_tokens": 3},
            {"input": "found"},
            {"output": "two", "max_tokens": 64},
        ],
    },
    client("find", "found", args={"q": var("one")}),
    expr("all", [*(var(f"c{i}") for i in range(6)), var("two")]),
]


def endless(prompt: str) -> str:
    """Return the fake engine's text for a prompt under LONG."""
    return ((answer(prompt) + " ") * 60)[:60]


async def check_work(program: Program) -> None:
    """Check that all texts are the same as without faults."""
    one = answer(SHARED)[:3]
    expected = [endless(f"{SHARED}{i}") for i in range(6)]
    assert await program.value("all") == [*expected, answer(f"{SHARED}{one}it")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_programs_survive_a_dead_or_frozen_engine(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with server_harness(tmp_path, time_per_output_token=SLOW_S, max_sequences=4) as harness:
        [before] = await harness.executor.engines()
        program = await harness.submit(WORK, outputs=["all"])
        await program.event("client.requested")  # one output is committed
        await program.event("node.delta")
        speed_up_restarted_engines(harness)
        send(harness, number)
        restarted = await program.event("node.restarted")
        assert restarted.data["attempt"] == 2
        assert restarted.data["engine"] == "engine-0"
        await program.put("found", "it")
        await check_work(program)
        ended = await program.end()
        assert ended.nodes["p"].attempt == 1, "a call between two outputs is filled again"
        attempts = [ended.nodes[f"c{i}"].attempt for i in range(6)]
        assert 2 in attempts
        assert max(attempts) == 2
        events = await program.events()
        commits = [e.data["variable"] for e in events if e.type == "variable.committed"]
        assert len(commits) == len(set(commits))
        [after] = await harness.executor.engines()
        assert after.epoch > before.epoch
        assert (after.report.num_held, after.report.num_contexts) == (0, 0)


async def test_calls_move_from_a_dead_engine(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=SLOW_S, num_engines=2) as harness:
        programs = [
            await harness.submit([generate("x", "word ", str(i), **LONG)]) for i in range(4)
        ]
        for program in programs:
            await program.event("node.delta")
        where = [(await program.status()).nodes["x"].engine for program in programs]
        assert set(where) == {"engine-0", "engine-1"}
        speed_up_restarted_engines(harness)
        send(harness, signal.SIGKILL, "engine-0")
        for i, (program, name) in enumerate(zip(programs, where, strict=True)):
            assert await program.value("x") == endless(f"word {i}")
            node = (await program.end()).nodes["x"]
            assert node.attempt == (2 if name == "engine-0" else 1)


async def test_call_fails_after_three_engine_deaths(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        poison = generate("x", "bad ", ignore_eos=True, max_tokens=8_000, on_error="isolate")
        program = await harness.submit([poison, expr("y", var("x"))], outputs=["y"])
        for attempt in (1, 2, 3):
            await program.event("node.started", node="x", count=attempt)
            send(harness, signal.SIGKILL)
        ended = await program.end()
        assert ended.error
        assert ended.error.code == "engine.lost"
        assert ended.nodes["x"].attempt == 3
        other = await harness.submit([generate("z", "good")])
        assert await other.value("z") == answer("good")


async def test_innocent_calls_survive_repeated_engine_deaths(tmp_path: Path) -> None:
    """The engine dies whenever the poisonous call starts, with all calls that run on it."""
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        innocent = [await harness.submit([generate("x", f"word {i}", **LONG)]) for i in range(10)]
        for program in innocent:
            await program.event("node.delta")
        poison = await harness.submit([generate("x", "bad ", ignore_eos=True, max_tokens=8_000)])

        async def kill_engine_at_each_start() -> None:
            async for event in poison.read():
                if event.type == "node.started":
                    send(harness, signal.SIGKILL)

        killing = asyncio.create_task(kill_engine_at_each_start())
        for i, program in enumerate(innocent):
            assert await program.value("x") == endless(f"word {i}")
        ended = await poison.end()
        await killing
        assert ended.error
        assert ended.error.code == "engine.lost"
        assert ended.nodes["x"].attempt >= 3
        assert harness.executor.services.suspects.is_open


async def test_long_line_on_stderr_does_not_block_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def argv(self: EngineCommandLine, descriptor: int, heartbeat: int, epoch: int) -> list[str]:
        code = (
            "import sys; sys.stderr.write('x' * 300_000); sys.stderr.flush(); "
            "from conure.engine.__main__ import main; sys.exit(main(sys.argv[1:]))"
        )
        fds = ["--fd", str(descriptor), "--heartbeat", str(heartbeat), "--epoch", str(epoch)]
        return [sys.executable, "-c", code, *fds, "--config", self.config.to_json()]

    monkeypatch.setattr(EngineCommandLine, "argv", argv)
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([generate("x", "hello")])
        assert await program.value("x") == answer("hello")


async def test_engine_start_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    start = EngineConnection.start
    errors: list[Exception] = [EngineStartError("no memory"), OSError("no processes")]

    async def fails_twice(*args: Any, **kwargs: Any) -> EngineConnection:
        if errors:
            raise errors.pop()
        return await start(*args, **kwargs)

    async with server_harness(tmp_path) as harness:
        monkeypatch.setattr(EngineConnection, "start", fails_twice)
        send(harness, signal.SIGKILL)
        program = await harness.submit([generate("x", "hello")])
        assert await program.value("x") == answer("hello")
        assert errors == []


async def test_limits_are_those_of_the_smallest_engine(tmp_path: Path) -> None:
    async with server_harness(tmp_path, num_engines=2) as harness:
        services = harness.executor.services
        assert services.fleet is not None
        max_lens: asyncio.Queue[int] = asyncio.Queue()
        on_arrived = services.fleet._on_arrived

        def note(engine: EngineConnection) -> None:
            on_arrived(engine)
            max_lens.put_nowait(services.model.max_len)

        services.fleet._on_arrived = note
        full = services.model.max_len
        command = services.fleet._options.command
        small = EngineCommandLine(msgspec.structs.replace(command.config, num_blocks=20))
        for config, expected in ((small, 20 * 16), (command, full)):
            services.fleet._options = replace(services.fleet._options, command=config)
            send(harness, signal.SIGKILL, "engine-1")
            assert await asyncio.wait_for(max_lens.get(), WAIT_S) == expected


async def test_stopped_server_leaves_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if an engine has started but has not sent its hello yet."""
    started: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec
    again = asyncio.Event()

    async def remember(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
        process = await create(*args, **kwargs)
        started.append(process)
        if len(started) == 2:
            again.set()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", remember)
    async with server_harness(tmp_path) as harness:
        send(harness, signal.SIGKILL)
        await asyncio.wait_for(again.wait(), 60)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


async def test_encoder_error_fails_only_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = LLMCall.encode

    def breaks(self: LLMCall, slot: int, rendered: RenderedPrompt) -> EncodedText:
        if self.node.id == "bad":
            raise RuntimeError("hunter2")
        return encode(self, slot, rendered)

    monkeypatch.setattr(LLMCall, "encode", breaks)
    async with server_harness(tmp_path) as harness:
        for words in ("x", "long " * 800):  # encoded on the event loop, encoded in a thread
            nodes = [
                generate(name, words, on_error="isolate") for name in ("bad", "b", "c", "good")
            ]
            program = await harness.submit(nodes, outputs=["good"])
            assert await program.value("good") == answer(words)
            bad = await program.get("bad")
            assert bad.error
            assert bad.error.code == "server.internal"
            assert "hunter2" not in bad.error.message
            await program.end()


async def test_running_programs_survive_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [client("a", "v"), generate("x", insert("v")), generate("y", insert("x"))],
            outputs=["y"],
        )
        await program.event("client.requested")
        writer = harness.executor.services.journal._writer
        attempt = writer._try_commit
        refused = asyncio.Event()
        loop = asyncio.get_running_loop()

        def full(group: Any) -> Exception | None:
            loop.call_soon_threadsafe(refused.set)
            return sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(writer, "_try_commit", full)
        putting = asyncio.create_task(program.put("v", "go"))
        await asyncio.wait_for(refused.wait(), 60)
        for _ in range(2):
            with pytest.raises(UnavailableError) as raised:
                await harness.submit([generate("z", "new")], key="k")
            assert (raised.value.code, raised.value.status) == ("store.unavailable", 503)
            assert raised.value.retry_after_s
        (reason,) = (await harness.executor.ready()).reasons
        assert reason == "the journal cannot be written: database or disk is full"
        assert (await program.get("v", wait_s=0)).status == "running"
        assert not putting.done()
        monkeypatch.setattr(writer, "_try_commit", attempt)
        assert (await putting).value == "go"
        assert await program.value("y") == answer(answer("go"))
        await program.end()
        assert harness.executor.services.call_quota.num_calls == 0
        again = await harness.submit([generate("z", "new")], key="k")
        assert await again.value("z") == answer("new")


async def test_calls_of_a_rejected_program_are_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        is_running = threading.Event()

        def full(group: Any) -> Exception | None:
            assert is_running.wait(60)
            return sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(harness.executor.services.journal._writer, "_try_commit", full)
        submitting = asyncio.create_task(
            harness.submit([generate("x", "hi"), generate("y", insert("x"))])
        )
        async with asyncio.timeout(60):
            while await harness.num_held() == [(0, 0)]:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)
        is_running.set()
        with pytest.raises(UnavailableError):
            await submitting
        assert await harness.num_held() == [(0, 0)]
        assert (
            harness.executor.programs._live,
            harness.executor.services.call_quota.num_calls,
        ) == ({}, 0)


async def test_put_times_out_if_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "DURABILITY_TIMEOUT_S", 0.05)
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "v"), client("b", "w")], outputs=["w"])
        await program.event("client.requested")
        writer = harness.executor.services.journal._writer
        attempt = writer._try_commit
        full = sqlite3.OperationalError("full")
        monkeypatch.setattr(writer, "_try_commit", lambda group: full)
        with pytest.raises(UnavailableError):
            await program.put("v", 1)
        monkeypatch.setattr(writer, "_try_commit", attempt)
        assert await program.value("v") == 1
        assert (await program.put("v", 1)).status == "done"
        await program.cancel()


async def test_a_suspect_no_longer_blocks_others_after_its_probation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "PROBATION_S", 0.0)
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        endless: dict[str, Any] = {"ignore_eos": True, "max_tokens": 8_000}
        programs = [await harness.submit([generate("x", name, **endless)]) for name in "ab"]
        for program in programs:
            await program.event("node.delta")
        send(harness, signal.SIGKILL)
        for program in programs:
            await program.event("node.started", count=2)
