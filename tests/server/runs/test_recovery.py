"""Programs that go on in the next life of the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.engine.engine import Engine
from conure.engine.fake import FakeRunner
from conure.server.program.errors import ProgramError
from conure.server.program.ir import Generate
from conure.server.program.objective import Performance
from conure.server.program.status import Problem
from conure.server.prompts.model import Model
from conure.server.runs.call import Call, Host
from conure.server.runs.execution import NodeState
from conure.server.runs.run import Run
from conure.server.runs.sharing import Sharing
from conure.server.scheduling.policy import Rank
from conure.server.store.journal import ValueRecord

from ..inprocess import Disk, Program, answer, call, client, desk_of, expr, read, say, var

GROWING = [
    {
        "id": "p",
        "op": "generate",
        "prompt": [
            {"text": "Think: "},
            {"output": "one", "max_tokens": 64},
            {"text": "\nFound: "},
            {"input": "found"},
            {"text": "\nSo: "},
            {"output": "two", "max_tokens": 64},
        ],
    },
    client("find", "found", args={"q": var("one")}),
    say("end", "E", read("two")),
]


async def check_events(program: Program) -> list[Any]:
    """Every event once and in order, from wherever a reader takes it up."""
    whole = await program.events()
    seqs = [event.seq or 0 for event in whole]
    assert seqs == sorted(set(seqs))
    for at, seq in enumerate(seqs):
        assert await program.events(seq) == whole[at + 1 :]
    return whole


async def test_a_growing_prompt_goes_on_behind_its_committed_outputs(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(GROWING, outputs=["end"], trace=True)
        asked = await program.event("client.requested")
        one = await program.value("one")
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        # Nobody is asked twice, and the question that stands can be answered.
        status = await program.put("found", "gold", asked.data["request_id"])
        assert status.value == "gold"
        text = f"Think: {one}\nFound: gold\nSo: "
        assert one == answer("Think: ")
        assert await program.value("two") == answer(text)
        ended = await program.end()
        assert await program.value("end") == answer("E" + answer(text))
        traces = ended.nodes["p"].trace
        assert traces
        assert [bytes(trace.prompt_ids).decode() for trace in traces] == [text]
        events = await check_events(program)
        requests = [e.data["request_id"] for e in events if e.type == "client.requested"]
        assert requests == [asked.data["request_id"]]
        assert ended.nodes["p"].attempt == 2
        assert ended.nodes["find"].attempt == 1
        assert ended.nodes["end"].attempt == 1
        assert await desk.num_held() == [(0, 0)]


async def test_only_calls_without_a_committed_value_run_again(tmp_path: Path) -> None:
    nodes = [
        say("first", "x"),
        say("second", read("first"), ignore_eos=True, max_tokens=400),
        say("last", read("second")),
    ]
    async with desk_of(tmp_path, time_per_output_token=0.01) as desk:
        program = await desk.submit(nodes, outputs=["last"])
        first = await program.value("first")
        await program.event("node.started", node="second")
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        assert (await program.get("first", wait_s=0)).value == first
        ended = await program.end()
        attempts = {name: node.attempt for name, node in ended.nodes.items()}
        assert attempts == {"first": 1, "second": 2, "last": 1}
        events = await check_events(program)
        counts = Counter((e.type, e.data.get("node")) for e in events)
        assert counts["node.started", "first"] == counts["node.started", "last"] == 1
        assert counts["node.started", "second"] == 2
        assert counts["node.restarted", "second"] == 1
        assert set(Counter(e.data["variable"] for e in events if "value" in e.data).values()) == {1}


async def test_what_the_disk_did_not_get_is_done_again(tmp_path: Path) -> None:
    """As after a crash: values stood in memory, and nobody outside had heard of them."""
    ran: list[str] = []

    def note(text: str) -> str:
        ran.append(text)
        return text

    nodes = [client("go", "v"), expr("a", var("v")), call("f", "note", args={"text": var("a")})]
    async with desk_of(tmp_path, {"note": note}) as desk:
        program = await desk.submit(nodes, outputs=["f"])
        asked = await program.event("client.requested")
        disk = Disk(desk)
        putting = asyncio.create_task(program.put("v", "one"))
        await disk.came.wait()
        assert desk.executor._runs[program.id].execution.values == {"v": "one", "a": "one"}
        await desk.executor.stop()
        assert (await asyncio.gather(putting, return_exceptions=True))[0] is not None
    assert ran == [], "a function waits for the disk"
    async with desk_of(tmp_path, {"note": note}) as desk:
        program = Program(desk, program.id)
        assert (await program.get("v", wait_s=0)).status == "running"
        await program.put("v", "two", asked.data["request_id"])
        assert await program.value("f") == "two"
        await program.end()
    assert ran == ["two"]


async def test_ends_of_nodes_and_lost_inputs_are_remembered(tmp_path: Path) -> None:
    nodes = [
        expr("off", {"lit": 1}, when={"lit": False}),
        expr("bad", {"parse_json": ["{"]}, on_error="isolate"),
        say("reader", read("lost"), on_error="isolate"),
        expr("all", {"first": [var("off"), var("bad"), var("reader"), var("given"), var("x")]}),
        client("ask", "x"),
    ]
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(nodes, outputs=["all"], variables={"lost": {}, "given": {}})
        await program.put_error("lost", "no.input")
        await program.event("client.requested")
        assert (await program.get("reader")).status == "failed"
    for _ in range(2):
        async with desk_of(tmp_path) as desk:
            program = Program(desk, program.id)
            statuses = [await program.get(name, 0) for name in ("off", "bad", "lost", "reader")]
            assert [s.status for s in statuses] == ["skipped", "failed", "failed", "failed"]
            assert statuses[3].error == Problem(code="no.input", message="no")
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        await program.put("given", None)
        await program.put("x", "last")
        assert await program.value("all") == "last"
        ended = await program.end()
        assert ended.status == "done"
        types = Counter(e.type for e in await check_events(program))
        assert types["node.failed"] == 2
        assert types["variable.failed"] == types["client.requested"] == 1


async def test_retries_are_counted_across_lives_and_restarts_are_not(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([client("a", "x", retries=1)], outputs=["x"])
        await program.event("client.requested")
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        await program.put_error("x", "once")
        again = await program.event("client.requested", count=2)
        assert again.data["attempt"] == 2
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        await program.put_error("x", "twice", again.data["request_id"])
        ended = await program.end()
        assert ended.error == Problem(code="twice", message="no")


async def test_a_session_is_what_it_was(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([], variables={"a": {}, "b": {}}, open=True)
        await program.append(
            nodes=[say("x", read("a"), read("b"))], inputs={"a": "A"}, outputs=["x"]
        )
        await program.put("b", "B")
        value = await program.value("x")
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        status = await program.status()
        assert (status.status, status.outputs) == ("running", ["x"])
        assert {n: v.value for n, v in status.variables.items()} == {"a": "A", "b": "B", "x": value}
        for taken in ("a", "b", "x"):
            with pytest.raises(ProgramError):
                await program.append(nodes=[expr("y", {"lit": 1}, taken)])
        await program.append(nodes=[expr("y", {"parse_json": ["{"]}), expr("z", var("x"))])
        assert await program.value("z") == value
        await program.append(close=True)
        assert (await program.end()).status == "done"
        await check_events(program)


async def test_a_question_put_on_demand_can_be_answered_in_the_next_life(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(
            [client("a", "x"), expr("b", var("x"))], outputs=["b"], start="demand"
        )
        await program.get("b", wait_s=0)
        asked = await program.event("client.requested")
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        await program.put("x", 1, asked.data["request_id"])
        assert await program.value("b") == 1
        await program.end()


async def test_a_function_that_is_gone_fails_its_node_and_not_the_server(tmp_path: Path) -> None:
    nodes = [client("a", "x"), call("f", "gone", args={"x": var("x")}), call("g", "gone")]
    gate = asyncio.Event()

    async def gone(x: object = None) -> None:
        await gate.wait()

    async with desk_of(tmp_path, {"gone": gone}) as desk:
        program = await desk.submit(nodes, outputs=["f"])
        await program.event("client.requested")
        other = await desk.submit([client("a", "x")], outputs=["x"])
    async with desk_of(tmp_path) as desk:
        ended = await Program(desk, program.id).end()
        assert ended.error
        assert ended.error.code == "call.unknown_function"
        await Program(desk, other.id).put("x", 1)


async def test_a_deadline_is_a_time_of_day(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([client("a", "x")], outputs=["x"], deadline_s=0.3)
        await program.event("client.requested")
        await desk.executor.stop()
        await asyncio.sleep(0.3)  # the server is away while it passes
    async with desk_of(tmp_path) as desk:
        assert (await Program(desk, program.id).end()).status == "deadline_exceeded"


async def test_an_ended_program_is_read_from_the_journal(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit(
            [say("a", "x"), expr("off", {"lit": 1}, when={"lit": False}), client("c", "v")],
            inputs={"i": {"k": 1}},
            outputs=["a"],
        )
        await program.put("v", None)
        before = await program.end()
        events = await program.events()
    async with desk_of(tmp_path) as desk:
        program = Program(desk, program.id)
        assert msgspec.to_builtins(await program.status()) == msgspec.to_builtins(before)
        for name, variable in before.variables.items():
            assert await program.get(name) == variable
        assert await program.events() == events
        assert await program.cancel() == await program.status()


# --- a call that goes on --------------------------------------------------------------------


@pytest.mark.parametrize("body", ["a call", "an expression"])
async def test_a_map_that_enters_only_after_a_restart_has_its_items_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    node = say("s", "S ", read("x"))
    if body == "an expression":
        node = expr("s", {"concat": ["S ", var("x")]})
    wide = {"id": "m", "op": "map", "items": var("docs"), "as": "x", "body": [node]}
    docs = [f"d{i}" for i in range(300)]
    start = Run.start
    async with desk_of(tmp_path, max_queued_calls=8) as desk:
        monkeypatch.setattr(Run, "start", lambda _: None)  # killed when the program is on disk
        submitted = await desk.submit(
            [{**wide, "collect": {"all": "s"}}], inputs={"docs": docs}, outputs=["all"]
        )
    monkeypatch.setattr(Run, "start", start)
    async with desk_of(tmp_path, max_queued_calls=8) as desk:
        program = Program(desk, submitted.id)
        assert (await program.end()).status == "done"
        told = [e.data["nodes"] for e in await program.events() if e.type == "nodes.appended"]
        assert [node for nodes in told for node in nodes] == [f"s.{i}" for i in range(300)]


def resumed(text: str, ids: list[int], tokenizer_hash: str = "") -> Call:
    """A call whose first output stands, as it was journaled."""
    model = Model.of(Engine(FakeRunner(), 1).hello())
    model = replace(model, tokenizer_hash="ours")
    node = msgspec.convert(
        {
            "op": "generate",
            "id": "n",
            "prompt": [{"text": "A:"}, {"output": "a"}, {"text": " B:"}, {"output": "b"}],
        },
        Generate,
    )
    host: Host = None  # type: ignore[assignment]  # nothing here talks to it
    resumed = Call(
        "p",
        NodeState(node),
        model,
        Sharing(),
        host,
        hashes=(),
        reads=(),
        constants=(),
        came_s=0.0,
        rank=Rank(0.0, ""),
        performance=Performance("latency", None, 0),
        salt="",
        keeps_all=False,
        traces=False,
    )
    record = ValueRecord(
        program="p",
        variable="a",
        value=b'""',
        text=text,
        token_ids=ids,
        tokenizer_hash=tokenizer_hash or "ours",
        epoch=1,
        attempt=1,
    )
    resumed.restore({"a": record}, {}, 1)
    return resumed


def following(call: Call) -> bytes:
    """The ids up to the second output, as the bytes that they are."""
    return bytes(call.ids + call.encode(1, call.render(1, {})).ids)


def test_ids_of_another_tokenizer_are_not_taken_for_ours() -> None:
    assert following(resumed("xy", list(b"xy"))) == b"A:xy B:"
    assert following(resumed("xy", [1, 2, 3])) == b"A:\1\2\3 B:", "ids, not text, are what stands"
    assert following(resumed("xy", [1, 2, 3], "theirs")) == b"A:xy B:"


def test_what_a_stop_string_cut_out_of_a_token_is_filled_again() -> None:
    call = resumed("xyz", list(b"xy"))
    assert bytes(call.ids) == b"A:xy"
    assert following(call) == b"A:xyz B:"
