"""Programs from submission to receipt: an executor, a journal and the fake engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from conure.engine import protocol
from conure.server.config import Config
from conure.server.engines.connection import EngineConnection, EngineStartError
from conure.server.engines.fleet import Fleet
from conure.server.executor import Executor, StartError
from conure.server.program.errors import ConflictError, NotFoundError, ProgramError, PromptError
from conure.server.runtime import timers
from conure.server.store.journal import Journal, JournalError

from .inprocess import (
    ServerHarness,
    answer,
    call,
    client,
    expr,
    generate,
    insert,
    server_harness,
    var,
)


async def test_a_start_that_is_cancelled_closes_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun = asyncio.Event()

    async def start_forever(_: Fleet) -> None:
        has_begun.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "start", start_forever)
        starting = asyncio.create_task(Executor(Config(data=tmp_path, engine="fake")).start())
        await has_begun.wait()
        starting.cancel()
        await asyncio.wait([starting])
    assert starting.cancelled()
    async with server_harness(tmp_path) as harness:
        assert await harness.num_held() == [(0, 0)]


async def test_a_start_reports_one_of_two_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_to_start(_: Fleet) -> None:
        await asyncio.sleep(0)
        raise EngineStartError("no engine")

    async def fail_to_read(_: Journal) -> None:
        raise JournalError("store.damaged", "damaged")

    monkeypatch.setattr(Fleet, "start", fail_to_start)
    monkeypatch.setattr(Journal, "unfinished", fail_to_read)
    with pytest.raises(StartError, match="no engine"):
        await Executor(Config(data=tmp_path, engine="fake")).start()
    gc.collect()
    assert not caplog.records


async def test_all_node_kinds_work_together(tmp_path: Path) -> None:
    threads: list[str] = []

    def shout(text: str) -> str:
        threads.append(threading.current_thread().name)
        return text.upper()

    async def count(text: str) -> dict[str, int]:
        return {"letters": len(text)}

    async with server_harness(tmp_path, {"shout": shout, "count": count}) as harness:
        program = await harness.submit(
            [
                generate("write", "Write about ", insert("topic"), ":", writes="text"),
                expr("twice", {"concat": [var("text"), "!", var("text")]}),
                call("loud", "shout", args={"text": var("twice")}),
                call("size", "count", args={"text": var("loud")}),
                client("look", "found", args={"n": {"get": [var("size"), "letters"]}}),
                generate("last", "Say ", insert("found"), " of ", insert("size"), writes="end"),
            ],
            inputs={"topic": "rain"},
            outputs=["end"],
        )
        requested = await program.event("client.requested")
        text = answer("Write about rain:")
        loud = f"{text}!{text}".upper()
        assert requested.data["args"] == {"n": len(loud)}
        assert requested.data["name"] == "step"
        await program.put("found", "a lot", requested.data["request_id"])
        status = await program.end()
        assert status.status == "done"
        values = {name: v.value for name, v in status.variables.items()}
        assert values["loud"] == loud
        assert values["end"] == answer(f'Say a lot of {{"letters":{len(loud)}}}')
        assert {node.status for node in status.nodes.values()} == {"done"}
        assert threads != [threading.main_thread().name]
        assert await harness.num_held() == [(0, 0)]


async def test_prompt_grows_through_outputs_and_a_client_step(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            {
                "id": "t",
                "op": "generate",
                "prompt": [
                    {"text": "Question: "},
                    {"input": "q"},
                    {"text": "\nThought: "},
                    {"output": "thought", "max_tokens": 64},
                    {"text": "\nSearch: "},
                    {"output": "search", "max_tokens": 64},
                    {"text": "\nFound: "},
                    {"input": "found"},
                    {"text": "\nAnswer: "},
                    {"output": "end", "max_tokens": 64},
                ],
            },
            client("find", "found", args={"query": var("search")}),
        ]
        program = await harness.submit(nodes, inputs={"q": "why?"}, outputs=["end"], trace=True)
        requested = await program.event("client.requested")
        # The first outputs can be read while the prompt waits in its middle.
        text = "Question: why?\nThought: "
        thought = answer(text)
        assert await program.value("thought") == thought
        text += f"{thought}\nSearch: "
        search = answer(text)
        assert requested.data["args"] == {"query": search}
        await program.put("found", "this")
        text += f"{search}\nFound: this\nAnswer: "
        assert await program.value("end") == answer(text)
        status = await program.end()
        traces = await program.traced_calls()
        assert bytes(traces[-1].prompt_ids).decode() == text
        receipt = status.receipt
        assert receipt
        # The prompt of every output is everything before it; only new text is computed.
        tokens = receipt.prompt_tokens
        assert tokens.logical == sum(len(trace.prompt_ids) for trace in traces)
        assert tokens.shared.generated == 2 * len(thought) + len(search)
        assert tokens.computed == len(text) - len(thought) - len(search)
        assert receipt.critical_path == ["find", "t"]
        assert receipt.critical_path_s <= receipt.wall_s
        assert await harness.num_held() == [(0, 0)]


async def test_when_and_after_control_execution(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [
                generate("no", "never", when={"eq": [var("n"), 2]}),
                generate("reader", "reads ", insert("no")),
                expr("kept", {"first": [var("reader"), "else"]}),
                generate("yes", "always", when="n", after=["no"]),
                expr("late", {"lit": 1}, after=["yes"]),
            ],
            inputs={"n": 1},
            outputs=["kept", "late"],
        )
        assert await program.value("kept") == "else"
        skipped = await program.get("reader")
        assert skipped.status == "skipped"
        assert skipped.error
        assert skipped.error.code == "node.when"
        status = await program.end()
        assert status.status == "done"
        phases = {name: node.status for name, node in status.nodes.items()}
        assert phases == {
            "no": "skipped",
            "reader": "skipped",
            "kept": "done",
            "yes": "done",
            "late": "done",
        }
        assert status.receipt
        assert status.receipt.calls == 1, "what was skipped is no call"
        order = [e.data["node"] for e in await program.events() if e.type == "node.finished"]
        assert order.index("yes") < order.index("late")


async def test_failed_and_skipped_nodes_resolve_readers(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [
                expr("bad", {"parse_json": ["{"]}, on_error="isolate"),
                expr("next", var("bad")),
                generate("far", "x", insert("next")),
                expr("off", {"lit": 1}, when={"lit": False}),
                client("open", "never"),
            ],
            outputs=["far", "off", "never"],
        )
        far, off = await asyncio.gather(program.get("far"), program.get("off"))
        assert (far.status, off.status) == ("failed", "skipped")
        assert far.error
        assert far.error.code == "expr.json", "the reason is the one at the beginning of the chain"
        assert (await program.status()).status == "running"
        assert (await program.get("never", wait_s=0)).status == "running"
        await program.put("never", 1)
        ended = await program.end()
        assert ended.status == "failed", "an output failed"
        assert ended.error
        assert ended.error.code == "expr.json"


async def test_failure_ends_the_program_unless_isolated(tmp_path: Path) -> None:
    nodes = [
        expr("bad", {"get": [{"parse_json": ["["]}, 0]}),
        client("other", "step"),
        expr("good", {"lit": 1}),
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, outputs=["step", "good"])
        status = await program.end()
        assert status.status == "failed"
        assert status.nodes["bad"].status == "failed"
        assert status.nodes["other"].status == "killed"
        assert status.error == status.variables["step"].error
        jobs = {"risky": {"on_error": "isolate"}}
        nodes[0]["job"] = "risky"
        program = await harness.submit(nodes, outputs=["step", "good"], jobs=jobs)
        assert await program.value("good") == 1
        await program.put("step", 2)
        status = await program.end()
        assert status.status == "done"
        assert status.nodes["bad"].status == "failed"


async def test_failure_caused_by_a_commit_ends_the_program_once(tmp_path: Path) -> None:
    """A reader of a value fails in the turn in which the value is committed."""
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(
            [generate("write", "x", writes="text"), expr("bad", {"parse_json": [var("text")]})],
            outputs=["bad"],
        )
        status = await program.end()
        assert status.nodes["write"].status == "done"
        assert status.nodes["bad"].status == "failed"
        events = await program.events()
        assert [e.type for e in events].index("program.finished") == len(events) - 1
        assert [e.type for e in events].count("node.finished") == 1


async def test_function_errors_hide_their_text(
    tmp_path: Path,
) -> None:
    def secret() -> None:
        raise ValueError("hunter2")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    def leave() -> None:
        raise SystemExit(1)

    def odd() -> object:
        return object()

    def empty() -> Any:
        return next(iter(()))

    functions = {f.__name__: f for f in (secret, cancelled, leave, odd, empty)}
    async with server_harness(tmp_path, functions) as harness:
        nodes = [call(name, name, on_error="isolate") for name in functions]
        program = await harness.submit(nodes, outputs=["secret"])
        status = await program.end()
        for node in status.nodes.values():
            assert node.status == "failed"
            assert node.error
            assert node.error.code == "call.failed"
            assert "hunter2" not in node.error.message
        with pytest.raises(ProgramError) as refused:
            await harness.submit([call("x", "nope")])
        assert (refused.value.code, refused.value.path) == (
            "call.unknown_function",
            "program.nodes[0].function",
        )


async def test_blocking_functions_do_not_block_others(tmp_path: Path) -> None:
    gate = threading.Event()

    def block() -> bool:
        return gate.wait(60)

    async with server_harness(tmp_path, {"block": block}) as harness:
        try:
            blocked = await harness.submit([call(f"b{i}", "block") for i in range(24)])
            # Long enough to be encoded in a thread.
            long = await harness.submit([generate("x", "long " * 1_000)], outputs=["x"])
            assert await long.value("x") == answer("long " * 1_000)
        finally:
            gate.set()
        assert (await blocked.end()).status == "done"


@pytest.mark.parametrize("ends", ["node", "job", "outer", "program"])
async def test_timeouts_fail_with_their_code(tmp_path: Path, ends: str) -> None:
    jobs: dict[str, dict[str, Any]] = {
        "slow": {"parent": "above"},
        "above": {"on_error": "isolate", "timeout_s": 0.2 if ends == "outer" else 60},
    }
    if ends == "job":
        jobs["slow"]["timeout_s"] = 0.2
    node = generate("slow", "x", job="slow", ignore_eos=True, max_tokens=8_000)
    if ends == "node":
        node["timeout_s"] = 0.2
    options: dict[str, Any] = {"deadline_s": 0.2} if ends == "program" else {}
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        program = await harness.submit([node], jobs=jobs, outputs=["slow"], **options)
        slow = await program.get("slow")
        status = await program.end()
        code = {
            "node": "node.timeout",
            "job": "job.timeout",
            "outer": "job.timeout",
            "program": "program.deadline_exceeded",
        }[ends]
        assert slow.error
        assert slow.error.code == code
        assert status.status == ("deadline_exceeded" if ends == "program" else "failed")
        assert await harness.num_held() == [(0, 0)]


async def test_node_names_are_free(tmp_path: Path) -> None:
    """A node may have the name of an internal key."""
    async with server_harness(tmp_path) as harness:
        names = ["deadline", "lease", "main", "program", "None"]
        program = await harness.submit(
            [expr(name, {"lit": 1}) for name in names] + [client("open", "never")],
            outputs=names,
            deadline_s=0.3,
        )
        assert (await program.end()).status == "deadline_exceeded"


async def test_attached_program_ends_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers, "LEASE_S", 1.0)
    async with server_harness(tmp_path) as harness:
        kept = await harness.submit([client("a", "x")], outputs=["x"], detach=False)
        waiting = asyncio.create_task(kept.get("x"))
        lost = await harness.submit([client("a", "x")], outputs=["x"], detach=False)
        free = await harness.submit([client("a", "x")], outputs=["x"])
        # Not as one of its readers.
        await asyncio.wait_for(harness.executor.programs._live[lost.id].outbox.wait_ended(), 60)
        assert (await lost.status()).error is not None
        assert (await free.status()).status == "running"
        assert (await kept.status()).status == "running"
        await kept.put("x", 1)
        assert (await waiting).value == 1
        await free.cancel()


async def test_too_long_prompts_are_rejected(tmp_path: Path) -> None:
    async with server_harness(tmp_path, context_len=512) as harness:
        with pytest.raises(PromptError) as refused:
            await harness.submit([generate("x", "y" * 500, max_tokens=13)])
        assert refused.value.code == "prompt.too_long"
        assert refused.value.path == "program.nodes[0]"
        for word in ("500", "13", "512", "--context-len"):
            assert word in refused.value.message
        with pytest.raises(PromptError):  # the value is in the prompt eight times
            repeated = generate("x", *[insert("v")] * 8, max_tokens=13)
            await harness.submit([repeated], inputs={"v": "y" * 80})
        program = await harness.submit([generate("x", "y" * 500, max_tokens=12)], outputs=["x"])
        assert await program.value("x") == answer("y" * 500)[:12]
        program = await harness.submit(
            [client("a", "v"), generate("x", insert("v"), max_tokens=13)], outputs=["x"]
        )
        await program.event("client.requested")
        await program.put("v", "y" * 500)
        failed = await program.get("x")
        assert failed.error
        assert failed.error.code == "prompt.too_long"
        for word in ("500", "13", "512", "--context-len", "node x"):
            assert word in failed.error.message
        # What is not going to run is not too long.
        program = await harness.submit(
            [generate("x", "y" * 500, max_tokens=13, when={"lit": False})]
        )
        assert (await program.end()).status == "done"


async def test_ignored_options_are_rejected(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        for option, value, code in (
            ("policy", "fcfs", "policy.not_served"),
            ("tokens", "kept", "program.unsupported"),
        ):
            options: dict[str, Any] = {option: value}
            with pytest.raises(ProgramError) as refused:
                await harness.submit([generate("x", "y")], **options)
            assert refused.value.code == code
            assert refused.value.path == f"options.{option}"


async def test_program_can_require_the_server_policy(tmp_path: Path) -> None:
    async with server_harness(tmp_path, policy="fcfs") as harness:
        status = await (await harness.submit([generate("x", "y")], policy="fcfs")).end()
        assert status.nodes["x"].why == "fcfs: it was empty; 1 of 1 considered engines had room"


async def test_call_status_explains_its_placement(tmp_path: Path) -> None:
    task = "the same long beginning of every part, so that it is worth keeping. "
    parts = [generate(f"m{i}", task, f"part {i}") for i in range(3)]
    reduce = generate("r", *(insert(f"m{i}") for i in range(3)))
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([*parts, reduce], outputs=["r"])
        nodes = (await program.end()).nodes
    assert nodes["m0"].why == "conure: it was empty; 1 of 1 considered engines had room"
    shared = len(task) - len(task) % 16
    assert "1 calls of its group run here" in nodes["m1"].why
    assert f"{len(task)} of {len(task) + 6} prompt tokens are here" in nodes["m2"].why, shared


@pytest.mark.parametrize("seed", [None, 7])
async def test_failed_call_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """Up to `retries` times, each time with another seed; engine deaths do not count."""
    seeds: list[int] = []
    send = EngineConnection.send

    def note(engine: EngineConnection, *commands: protocol.Command) -> None:
        seeds.extend(c.sampling.seed for c in commands if isinstance(c, protocol.GenerateCommand))
        send(engine, *commands)

    monkeypatch.setattr(EngineConnection, "send", note)
    async with server_harness(tmp_path) as harness:
        fields: dict[str, Any] = {"as": "value", "seed": seed, "retries": 2, "on_error": "isolate"}
        nodes = [generate("x", "abc", **fields)]
        program = await harness.submit(nodes, outputs=["x"])
        failed = await program.get("x")
        assert failed.error
        assert failed.error.code == "output.not_json"
        status = await program.end()
        assert status.nodes["x"].attempt == 3
        again = [e.data["why"] for e in await program.events() if e.type == "node.restarted"]
        assert again == ["output.not_json"] * 2
    assert len(set(seeds)) == 3


async def test_programs_are_invisible_to_other_tenants(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("a", "x")], outputs=["x"], open=True, key="k")
        other = ServerHarness(harness.executor, "other")
        foreign = type(program)(other, program.id)
        for attempt in (
            foreign.get("x", 0),
            foreign.status(),
            foreign.cancel(),
            foreign.put("x", 1),
            foreign.append(close=True),
            anext(foreign.read()),
        ):
            with pytest.raises(NotFoundError):
                await attempt
        again = await other.submit([client("a", "x")], outputs=["x"], open=True, key="k")
        assert again.id != program.id, "keys are a tenant's own"
        with pytest.raises(ConflictError):
            await harness.submit([], key="k")
        await program.cancel()
        await again.cancel()


async def test_tighter_deadline_runs_first(tmp_path: Path) -> None:
    """The other program has no deadline, and one call runs at a time, until it is cancelled."""
    settings: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "time_per_call": 3_600}
    hurry = {"x": {"deadline_s": 1}}
    async with server_harness(tmp_path, **settings) as harness:
        first, patient, hasty = [
            await harness.submit(
                [generate("x", f"{name:40}")], outputs=["x"], objectives=objectives
            )
            for name, objectives in (("first", {}), ("patient", {}), ("hasty", hurry))
        ]
        await first.event("node.started")
        await patient.event("node.queued")
        await hasty.event("node.queued")
        await first.cancel()
        before = await hasty.event("node.started")
        await hasty.cancel()
        after = await patient.event("node.started")
        assert (before.seq or 0) < (after.seq or 0)
        await patient.cancel()
