"""Programs that a hostile client sends: every turn stays short, and every program ends.

Turns are compared by the steps that programs count, not by seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conure.server import explainer
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ProgramError, RunError
from conure.server.program.expressions import regex
from conure.server.prompts.tokenizer import EncodedText, PromptPiece, Tokenizer
from conure.server.runtime.calls.prompt_encoder import INLINE_CHARS
from conure.server.runtime.persistence import outbox
from conure.server.runtime.quota import QuotaLimits
from conure.server.runtime.slot_work import INLINE_STEPS
from conure.server.runtime.turns import STEPS_PER_TURN

from ..inprocess import (
    DelayedJournalWriter,
    Program,
    ServerHarness,
    client,
    expr,
    generate,
    server_harness,
    var,
)
from ..service_double import in_process
from .loop_lag import loop_lag

MAX_PIECE = 2 * INLINE_STEPS + 128 * 40
"""Steps of the largest piece of work: a trial after another one, or the nodes of a map's batch."""
MAX_LAG_S = 2.0
"""Far more than any turn takes: a lag beyond it is work without turns."""

TURNS = {"len": {"each": [{"range": [0, 15_000]}, "i", {"add": [var("i"), 1]}]}}
SEARCHES = {"len": {"each": [{"range": [0, 4_500]}, "i", {"find": ["", "(a{0,30}){0,30}"]}]}}
COPY = {"concat": [var("x"), ""]}


def growing(num_outputs: int) -> Any:
    outputs = [{"output": f"o{i}", "max_tokens": 1} for i in range(num_outputs)]
    return {"id": "g", "op": "generate", "prompt": [{"text": "x"}, *outputs]}


def nested_maps(width: int) -> Any:
    item = expr("e", var("j"))
    ranged = {"op": "map", "items": {"range": [width]}}
    inner = {"id": "b", **ranged, "as": "j", "body": [item], "collect": {"w": "e"}}
    return {"id": "a", **ranged, "as": "i", "body": [inner], "collect": {"z": "w"}}


HOSTILE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "fence": (
        [expr("p", {"first": [{"parse_json": var("x")}, 1]}, on_error="isolate")],
        {"x": "```" + "a" * 200_000},
    ),
    "searches": ([expr(f"e{i}", SEARCHES, on_error="isolate") for i in range(5)], {}),
    "inputs": (
        [generate(f"g{i}", {"input": SEARCHES}, on_error="isolate") for i in range(5)],
        {},
    ),
    "turns": ([expr(f"e{i}", TURNS, on_error="isolate") for i in range(20)], {}),
    "conditions": ([expr(f"e{i}", i, when=TURNS, on_error="isolate") for i in range(10)], {}),
    "chain": ([expr(f"e{i}", var(f"e{i - 1}") if i else 1) for i in range(1_000)], {}),
    "outputs": ([growing(300)], {}),
    "nested maps": ([nested_maps(30)], {}),
    "yields": (
        [
            generate("g", "x", max_tokens=64),
            *(
                {
                    "id": f"y{i}",
                    "op": "yield",
                    "mode": "partial",
                    "value": [{"partial": "g"}, TURNS],
                    "on_error": "isolate",
                }
                for i in range(5)
            ),
        ],
        {},
    ),
}


async def submit(harness: ServerHarness, nodes: list[Any], inputs: dict[str, Any]) -> Program:
    return await harness.submit(nodes, inputs=inputs)


@pytest.mark.parametrize("name", HOSTILE)
async def test_every_turn_is_short(tmp_path: Path, name: str) -> None:
    nodes, inputs = HOSTILE[name]
    async with server_harness(tmp_path) as harness, loop_lag() as lag:
        program = await submit(harness, nodes, inputs)
        await program.end()
        turns = harness.executor.services.turns
        assert turns.num_turns > 0
        assert turns.max_steps <= STEPS_PER_TURN + MAX_PIECE
        assert lag.worst_s < MAX_LAG_S


async def test_node_after_the_same_node_twice_runs(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("a", 1), expr("b", 2, after=["a", "a"])])
        assert (await program.end()).status == "done"


async def test_append_of_a_bare_call_is_refused(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], open=True)
        with pytest.raises(ProgramError) as caught:
            await program.append(nodes=[{"id": "n", "op": "generate"}])
        assert caught.value.code == "program.segment"
        await program.append(nodes=[expr("a", 1)], close=True)
        assert (await program.end()).variables["a"].value == 1


# --- quotas -----------------------------------------------------------------------------------


async def test_values_of_a_program_are_bounded(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        harness.executor.services.quota_limits = QuotaLimits(live_bytes=1_000_000)
        copies = [expr(f"e{i}", COPY) for i in range(30)]
        program = await harness.submit(copies, inputs={"x": "a" * 100_000})
        status = await program.end()
    assert status.status == "failed"
    assert status.error
    assert status.error.code == "quota.live_bytes"
    values = [str(each.value) for each in status.variables.values() if each.status == "done"]
    assert sum(map(len, values)) <= 1_000_000


async def test_requests_to_the_client_are_bounded(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        harness.executor.services.quota_limits = QuotaLimits(journal_bytes=1_000_000)
        steps = [client(f"c{i}", f"v{i}", args={"x": var("x")}) for i in range(30)]
        program = await harness.submit(steps, inputs={"x": "a" * 100_000})
        status = await program.end()
    assert status.error
    assert status.error.code == "quota.journal_bytes"


async def test_steps_of_a_program_are_bounded(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("c", "v"), expr("e", TURNS, after=["c"])])
        await program.event("client.requested")
        run = harness.executor.programs.find_live(program.id, "t")
        assert run is not None
        run.context.work.budget.left = 10_000
        await program.put("v", 1)
        status = await program.end()
    assert status.error
    assert status.error.code == "quota.steps"


async def test_append_beyond_a_quota_changes_nothing(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        harness.executor.services.quota_limits = QuotaLimits(live_bytes=1_000)
        program = await harness.submit([], open=True)
        with pytest.raises(RunError) as caught:
            await program.append(variables={"x": {}}, inputs={"x": "a" * 2_000})
        assert (caught.value.code, caught.value.status) == ("quota.live_bytes", 413)
        await program.append(variables={"x": {}}, inputs={"x": "a"})
        await program.cancel()


async def test_status_of_a_running_program_shows_its_quotas(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("c", "v")], inputs={"x": "abc"})
        quotas = (await program.status()).quotas
        assert quotas
        assert set(quotas) == {"steps", "nodes", "live_bytes", "journal_bytes", "events"}
        assert quotas["nodes"].used == 1
        assert quotas["live_bytes"].used == 3
        await program.cancel()


# --- the end ----------------------------------------------------------------------------------


async def test_large_program_ends_in_turns(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([client("c", "v"), nested_maps(40)])
        await program.event("variable.committed", node="a")
        await program.cancel()
        status = await program.status()
        assert status.status == "cancelled"
        assert {node.status for node in status.nodes.values()} <= {"cancelled", "done"}
        assert harness.executor.services.turns.max_steps <= STEPS_PER_TURN + MAX_PIECE


async def test_reader_that_falls_behind_receives_every_event(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([nested_maps(40)])
        reading = program.read()
        first = await anext(reading)
        await program.end()
        seqs = [first.seq, *[event.seq async for event in reading if event.seq is not None]]
        run = harness.executor.programs.find(program.id, "t")
        assert run is not None
        assert run.events.dropped_seq > 0
        assert seqs == [event.seq for event in await program.events()]
        assert len(seqs) == len(set(seqs))


LONG_TEXT = "word " * 20_000


@pytest.mark.parametrize("value", [LONG_TEXT, [LONG_TEXT], {"lit": {"a": LONG_TEXT}}])
async def test_long_values_are_not_encoded_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    on_loop: list[int] = []
    encode = Tokenizer.encode

    def recorded(self: Tokenizer, pieces: Sequence[PromptPiece], **options: Any) -> EncodedText:
        if threading.current_thread() is threading.main_thread():
            on_loop.append(sum(len(piece.text) for piece in pieces))
        return encode(self, pieces, **options)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("x", value), generate("g", {"input": "x"})])
        status = await program.end()
    error = status.nodes["g"].error
    assert error
    assert error.code == "prompt.too_long"
    assert max(on_loop, default=0) < INLINE_CHARS


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_run_is_not_explained_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    threads: list[threading.Thread] = []

    def recorded(original: Any, *args: Any) -> Any:
        threads.append(threading.current_thread())
        return original(*args)

    for name in ("decode_record", "graph_of", "explain", "with_actual", "stored_status"):
        monkeypatch.setattr(explainer, name, partial(recorded, getattr(explainer, name)))
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr(f"e{i}", i) for i in range(600)])
        await program.end()
        if not is_live:
            harness.executor.programs._recent.clear()
        explained = await harness.executor.explainer.explain_run(program.id, tenant=harness.tenant)
        assert [node.actual_runs for node in explained.nodes] == [1] * 600
    assert len(threads) == (4 if is_live else 5)
    assert threading.main_thread() not in threads


async def test_large_patterns_are_not_compiled_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def recorded(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return compile_text(*args)

    compile_text = regex._compile
    monkeypatch.setattr(regex, "_compile", recorded)
    regex.CACHE.clear()
    finds = [{"find": ["", r"\w{50}abc"]}] * 400
    computed = {"find": ["b", {"concat": [r"\w{50}", "b"]}]}
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([expr("x", finds), expr("y", computed)])
        status = await program.end()
    assert status.status == "done"
    assert len(threads) == 4
    assert threading.main_thread() not in threads


async def test_stop_does_not_wait_for_hostile_programs(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        await harness.submit([expr(f"e{i}", TURNS) for i in range(500)])
        async with asyncio.timeout(60):
            await harness.executor.drain()


# --- memory -----------------------------------------------------------------------------------


async def test_program_of_many_nodes_does_not_run_ahead_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING_BYTES", 4_000)
    async with server_harness(tmp_path) as harness:
        writer = DelayedJournalWriter(harness)
        submitting = asyncio.create_task(submit(harness, [nested_maps(40)], {}))
        await writer.came.wait()
        (run,) = harness.executor.programs
        num_nodes = -1
        while num_nodes < len(run.state.nodes):
            num_nodes = len(run.state.nodes)
            for _ in range(50):
                await asyncio.sleep(0)
        assert num_nodes < 600, "of 1,641 nodes"
        writer.release()
        status = await (await submitting).end()
    assert status.status == "done"
    assert len(status.nodes) == 1_641


async def test_only_calls_have_a_record_of_their_cost(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [generate("g", "x"), expr("e", var("g"))]
        program = await submit(harness, nodes, {})
        await program.end()
        run = harness.executor.programs.find(program.id, harness.tenant)
        assert run is not None
        assert {name: state.has_usage for name, state in run.state.nodes.items()} == {
            "g": True,
            "e": False,
        }


async def test_instances_that_read_the_same_variables_share_the_set(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await submit(harness, [nested_maps(3)], {})
        await program.end()
        run = harness.executor.programs.find(program.id, harness.tenant)
        assert run is not None
        slots = [run.state.graph.slots[f"e.0.{i}"][0] for i in range(3)]
    assert len({id(slot.reads) for slot in slots}) == 1
    assert len({id(slot.may_read) for slot in slots}) == 1


async def test_large_status_is_sent_in_parts(tmp_path: Path) -> None:
    app = create_app(Config(data=tmp_path, engine="fake"))
    async with in_process(app) as http:
        body = {"program": {"nodes": [nested_maps(30)], "outputs": ["z"]}}
        url = (await http.post("/v1/programs", json=body)).json()["url"]
        await http.get(f"{url}/variables/z", params={"wait_s": 60})
        await http.get(f"{url}/events")
        for answer in (await http.get(url), await http.delete(url)):
            assert answer.headers["content-type"] == "application/json"
            assert "content-length" not in answer.headers
            status = answer.json()
            assert status["status"] == "done"
            assert len(status["nodes"]) == 931
            assert len(status["variables"]["z"]["value"]) == 30
        small = (await http.post("/v1/programs", json={"program": {}})).json()["url"]
        assert "content-length" in (await http.get(small)).headers
