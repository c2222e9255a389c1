"""Engines that die or freeze, disks that refuse, code that raises: programs go on or say why."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conure.server import executor
from conure.server.engines import engine, fleet
from conure.server.engines.engine import Engine, EngineStartError
from conure.server.engines.fleet import FleetOptions
from conure.server.program.errors import UnavailableError
from conure.server.prompts.prompt import Rendered
from conure.server.prompts.tokenizer import Encoded
from conure.server.runs.call import Call

from .inprocess import Desk, Program, answer, client, desk_of, expr, read, say, var


def send(desk: Desk, number: signal.Signals, name: str = "engine-0") -> None:
    """Send a signal to an engine's process."""
    assert desk.executor._fleet is not None
    process = desk.executor._fleet.engines[name]._process
    assert process is not None
    os.kill(process.pid, number)


SHARED = "The beginning that all of them have in common. " * 4
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60}
"""An output that takes a while: 0.6 s at 10 ms a token."""
WORK = [
    *(say(f"c{i}", SHARED, str(i), **LONG) for i in range(6)),
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
    """What the fake engine says to a prompt under LONG."""
    return ((answer(prompt) + " ") * 60)[:60]


async def check_work(program: Program) -> None:
    """All of it has the text that it would have had."""
    one = answer(SHARED)[:3]
    expected = [endless(f"{SHARED}{i}") for i in range(6)]
    assert await program.value("all") == [*expected, answer(f"{SHARED}{one}it")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_engine_costs_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(executor, "FleetOptions", partial(FleetOptions, hang_s=1.5))
    monkeypatch.setattr(engine, "PING_EVERY_S", 0.05)
    async with desk_of(tmp_path, time_per_output_token=0.01, max_sequences=4) as desk:
        [before] = await desk.executor.engines()
        program = await desk.submit(WORK, outputs=["all"])
        await program.event("client.requested")  # one output stands, others run or wait
        await program.event("node.delta")
        send(desk, number)
        restarted = await program.event("node.restarted")
        assert restarted.data["attempt"] == 2
        assert restarted.data["engine"] == "engine-0"
        await program.put("found", "it")
        await check_work(program)
        ended = await program.end()
        assert ended.nodes["p"].attempt == 1, "it held nothing that cannot be filled again"
        attempts = [ended.nodes[f"c{i}"].attempt for i in range(6)]
        assert 2 in attempts
        assert max(attempts) == 2
        events = await program.events()
        commits = [e.data["variable"] for e in events if e.type == "variable.committed"]
        assert len(commits) == len(set(commits))
        [after] = await desk.executor.engines()
        assert after.epoch > before.epoch
        assert (after.report.num_held, after.report.num_contexts) == (0, 0)


async def test_calls_of_a_dead_engine_move_to_one_that_lives(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.01, num_engines=2) as desk:
        programs = [await desk.submit([say("x", "word ", str(i), **LONG)]) for i in range(4)]
        for program in programs:
            await program.event("node.delta")
        where = [(await program.status()).nodes["x"].engine for program in programs]
        assert set(where) == {"engine-0", "engine-1"}
        send(desk, signal.SIGKILL, "engine-0")
        for i, (program, name) in enumerate(zip(programs, where, strict=True)):
            assert await program.value("x") == endless(f"word {i}")
            node = (await program.end()).nodes["x"]
            assert node.attempt == (2 if name == "engine-0" else 1)


async def test_a_call_under_which_engines_die_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.01) as desk:
        poison = say("x", "bad ", ignore_eos=True, max_tokens=8_000, on_error="isolate")
        program = await desk.submit([poison, expr("y", var("x"))], outputs=["y"])
        for attempt in (1, 2, 3):
            await program.event("node.started", node="x", count=attempt)
            send(desk, signal.SIGKILL)
        ended = await program.end()
        assert ended.error
        assert ended.error.code == "engine.lost"
        assert ended.nodes["x"].attempt == 3
        other = await desk.submit([say("z", "good")])
        assert await other.value("z") == answer("good")


async def test_an_engine_that_does_not_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    start = Engine.start
    errors: list[Exception] = [EngineStartError("no memory"), OSError("no processes")]

    async def fails_twice(*args: Any, **kwargs: Any) -> Engine:
        if errors:
            raise errors.pop()
        return await start(*args, **kwargs)

    async with desk_of(tmp_path) as desk:
        monkeypatch.setattr(Engine, "start", fails_twice)
        send(desk, signal.SIGKILL)
        program = await desk.submit([say("x", "hello")])
        assert await program.value("x") == answer("hello")
        assert errors == []


async def test_a_server_that_stops_leaves_no_engine_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an engine has just been started and has not said hello."""
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
    async with desk_of(tmp_path) as desk:
        send(desk, signal.SIGKILL)
        await asyncio.wait_for(again.wait(), 10)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


async def test_a_prompt_that_breaks_the_encoder_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Call.encode

    def breaks(self: Call, slot: int, rendered: Rendered) -> Encoded:
        if self.node.id == "bad":
            raise RuntimeError("hunter2")
        return encode(self, slot, rendered)

    monkeypatch.setattr(Call, "encode", breaks)
    async with desk_of(tmp_path) as desk:
        for words in ("x", "long " * 800):  # on the loop, in a thread
            nodes = [say(name, words, on_error="isolate") for name in ("bad", "b", "c", "good")]
            program = await desk.submit(nodes, outputs=["good"])
            assert await program.value("good") == answer(words)
            bad = await program.get("bad")
            assert bad.error
            assert bad.error.code == "server.internal"
            assert "hunter2" not in bad.error.message
            await program.end()


async def test_a_disk_that_refuses_costs_no_program_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(
            [client("a", "v"), say("x", read("v")), say("y", read("x"))], outputs=["y"]
        )
        await program.event("client.requested")
        writer = desk.executor.journal._writer
        attempt = writer._attempt
        refused = asyncio.Event()
        loop = asyncio.get_running_loop()

        def full(group: Any) -> Exception | None:
            loop.call_soon_threadsafe(refused.set)
            return sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(writer, "_attempt", full)
        putting = asyncio.create_task(program.put("v", "go"))
        await asyncio.wait_for(refused.wait(), 5)
        for _ in range(2):
            with pytest.raises(UnavailableError) as told:
                await desk.submit([say("z", "new")], key="k")
            assert (told.value.code, told.value.http_status) == ("store.unavailable", 503)
            assert told.value.retry_after_s
        assert "the journal cannot be written" in (await desk.executor.ready()).reasons
        assert (await program.get("v", wait_s=0)).status == "running"
        assert not putting.done()
        monkeypatch.setattr(writer, "_attempt", attempt)
        assert (await putting).value == "go"
        assert await program.value("y") == answer(answer("go"))
        await program.end()
        assert desk.executor.room.num_calls == 0
        again = await desk.submit([say("z", "new")], key="k")
        assert await again.value("z") == answer("new")


async def test_calls_of_a_program_that_the_disk_refuses_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.01) as desk:
        is_running = threading.Event()

        def full(group: Any) -> Exception | None:
            assert is_running.wait(5)
            return sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(desk.executor.journal._writer, "_attempt", full)
        submitting = asyncio.create_task(desk.submit([say("x", "hi"), say("y", read("x"))]))
        async with asyncio.timeout(5):
            while await desk.num_held() == [(0, 0)]:  # noqa: ASYNC110 - nobody may be told
                await asyncio.sleep(0.001)
        is_running.set()
        with pytest.raises(UnavailableError):
            await submitting
        assert await desk.num_held() == [(0, 0)]
        assert (desk.executor._runs, desk.executor.room.num_calls) == ({}, 0)


async def test_a_put_that_the_disk_does_not_take_in_time_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "ANSWERS_WITHIN_S", 0.05)
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([client("a", "v"), client("b", "w")], outputs=["w"])
        await program.event("client.requested")
        writer = desk.executor.journal._writer
        attempt = writer._attempt
        full = sqlite3.OperationalError("full")
        monkeypatch.setattr(writer, "_attempt", lambda group: full)
        with pytest.raises(UnavailableError):
            await program.put("v", 1)
        monkeypatch.setattr(writer, "_attempt", attempt)
        assert await program.value("v") == 1
        assert (await program.put("v", 1)).status == "done"
        await program.cancel()
