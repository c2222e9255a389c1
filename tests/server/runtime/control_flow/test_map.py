"""`map`: order, widths, failures and kills of items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conure.engine import protocol
from conure.server.engines.connection import EngineConnection
from conure.server.program.graph import extension
from conure.server.program.ir import MAX_WIDTH
from conure.server.runtime.node_context import STEPS_PER_END
from conure.server.runtime.turns import STEPS_PER_TURN

from ...inprocess import Program, answer, client, expr, generate, insert, server_harness, var
from .control_nodes import loop, map_, phases

Json = Any


async def test_map_results_follow_item_order(tmp_path: Path) -> None:
    """The items generate different numbers of tokens, so they end in another order."""
    async with server_harness(tmp_path, time_per_output_token=0.002) as harness:
        body = generate("s", "Sum up ", insert("x"), writes="o")
        nodes = [map_("docs", body, collect={"sums": "o"}), generate("all", insert("sums"))]
        docs = [f"doc {i}" for i in range(8)]
        program = await harness.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        sums = [answer(f"Sum up {doc}") for doc in docs]
        assert await program.value("sums") == sums
        assert await program.value("o.3") == sums[3]
        status = await program.end()
        assert status.variables["m.width"].value == 8
        assert status.nodes["s.7"].status == "done"
        appended = [e.data for e in await program.events() if e.type == "nodes.appended"]
        assert [name for e in appended for name in e["nodes"]] == [f"s.{i}" for i in range(8)]
        assert {e["node"] for e in appended} == {"m"}


async def test_map_wider_than_the_queue_is_added_gradually(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_queued_calls=4) as harness:
        nodes = [map_("docs", generate("s", "S ", insert("x")), collect={"all": "s"})]
        docs = [f"doc {i}" for i in range(30)]
        program = await harness.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        num_open = most = 0
        async for event in program.read():
            if event.type == "nodes.appended":
                num_open += len(event.data["nodes"])
                most = max(most, num_open)
            elif event.type == "node.finished" and event.data["node"] != "m":
                num_open -= 1
        assert 1 < most <= 4
        assert await program.value("all") == [answer(f"S {doc}") for doc in docs]
        assert harness.executor.services.call_quota.num_calls == 0


async def test_dependent_maps_finish_with_a_quota_of_one(tmp_path: Path) -> None:
    """The items of the first map use the whole quota and wait for the second."""
    async with server_harness(tmp_path, max_queued_calls=1) as harness:
        first = map_("docs", generate("s", "S ", insert("x"), insert("late")), collect={"all": "s"})
        second = map_("docs", generate("t", "T ", insert("x")), collect={"late": "t"})
        nodes = [first, {**second, "id": "n"}]
        docs = [f"doc {i}" for i in range(6)]
        program = await harness.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        late = [answer(f"T {doc}") for doc in docs]
        assert await program.value("late") == late
        assert len(await program.value("all")) == 6
        await program.end()
        killed = await harness.submit(nodes, inputs={"docs": docs * 20}, outputs=["all"])
        await killed.event("nodes.appended", count=3)
        assert (await killed.cancel()).status == "cancelled"
        assert harness.executor.services.call_quota.num_calls == 0


async def test_waiting_map_continues_when_quota_is_freed(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_queued_calls=4) as harness:
        held = [client("ask", "late"), *(generate(f"h{i}", "H ", insert("late")) for i in range(3))]
        holder = await harness.submit(held, outputs=["h0"])
        body = [client("look", "seen", args={"of": var("x")}), generate("s", "S ", insert("seen"))]
        nodes = [map_("docs", *body, collect={"all": "s"})]
        program = await harness.submit(nodes, inputs={"docs": ["a", "b"]}, outputs=["all"])
        await program.event("client.requested", node="look.0")
        assert "look.1" not in (await program.status()).nodes
        await holder.cancel()
        for index in range(2):
            requested = await program.event("client.requested", node=f"look.{index}")
            await program.put(f"seen.{index}", "x", requested.data["request_id"])
        assert await program.value("all") == [answer("S x")] * 2


async def test_programs_are_accepted_while_a_wide_map_runs(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_queued_calls=4) as harness:
        nodes = [map_("docs", generate("s", "S ", insert("x")), collect={"all": "s"})]
        program = await harness.submit(nodes, inputs={"docs": ["d"] * 40}, outputs=["all"])
        for i in range(8):
            other = await harness.submit([generate("q", f"Q{i}")], outputs=["q"])
            await other.end()
        await program.end()


@pytest.mark.parametrize("inner", ["map", "loop"])
async def test_nested_map_calls_respect_the_quota(tmp_path: Path, inner: str) -> None:
    body = generate("s", "S ", insert("x"))
    nested = (
        {"id": "n", "op": "map", "items": var("two"), "as": "y", "body": [body], "collect": {}}
        if inner == "map"
        else loop(body, count=2)
    )
    async with server_harness(tmp_path, max_queued_calls=8) as harness:
        inputs = {"docs": [f"d{i}" for i in range(30)], "two": [1, 2]}
        program = await harness.submit([map_("docs", nested, collect={})], inputs=inputs)
        most = 0
        async for _ in program.read():
            most = max(most, harness.executor.services.call_quota.num_calls)
        status = await program.end()
        assert sum(node.op == "generate" for node in status.nodes.values()) == 60
        assert 2 < most <= 8


async def test_waiting_maps_share_the_quota(tmp_path: Path) -> None:
    async with server_harness(tmp_path, max_queued_calls=8) as harness:
        nodes = [
            map_("docs", generate("s", "S ", insert("x")), collect={"all": "s"}),
            {**map_("docs", generate("t", "T ", insert("x")), collect={"others": "t"}), "id": "n"},
        ]
        docs = [f"d{i}" for i in range(40)]
        program = await harness.submit(nodes, inputs={"docs": docs}, outputs=["all", "others"])
        order = [
            name[0]
            for event in await program.events()
            if event.type == "nodes.appended"
            for name in event.data["nodes"]
        ]
        assert 14 <= order[:40].count("t") <= 26


async def test_too_large_map_fails_before_items_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "MAX_EXPANDED_NODES", 50)
    async with server_harness(tmp_path, max_queued_calls=4) as harness:
        first = map_("few", generate("s", "S ", insert("x")), collect={"all": "s"})
        second = {
            **map_("more", generate("t", "T ", insert("y")), collect={"others": "t"}),
            "id": "n",
        }
        nodes = [first, second | {"as": "y", "on_error": "isolate"}]
        inputs = {"few": list(range(30)), "more": list(range(30))}
        program = await harness.submit(nodes, inputs=inputs, outputs=["all"])
        status = await program.end()
        error = status.nodes["n"].error
        assert error
        assert error.code == "program.too_large"
        assert (status.status, len(status.nodes)) == ("done", 32)


async def test_partially_added_map_continues_after_restart(tmp_path: Path) -> None:
    docs = [f"d{i}" for i in range(60)]
    nodes = [
        map_("docs", generate("s", "S ", insert("x")), generate("t", "T"), collect={"all": "s"})
    ]
    async with server_harness(tmp_path, max_queued_calls=8, time_per_output_token=0.01) as harness:
        program = await harness.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        await program.event("nodes.appended", count=3)
    async with server_harness(tmp_path, max_queued_calls=8) as harness:
        assert 0 < harness.executor.services.call_quota.num_calls <= 8
        program = Program(harness, program.id)
        assert await program.value("all") == [answer(f"S {doc}") for doc in docs]
        reported = [e.data["nodes"] for e in await program.events() if e.type == "nodes.appended"]
        assert [name for names in reported for name in names] == [
            f"{name}.{i}" for i in range(60) for name in "st"
        ]


async def test_ended_call_is_not_open(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            client("ask", "late"),
            generate("a", "A"),
            generate("b", "B"),
            generate("z", insert("late")),
        ]
        program = await harness.submit(nodes, outputs=["z"])
        await program.value("a")
        await program.value("b")
        assert harness.executor.services.call_quota.num_calls == 1
        assert "\nconure_calls_open 1.0\n" in (await harness.executor.metrics()).decode()


async def test_map_over_empty_list_is_empty_and_null_fails(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [map_("docs", expr("e", var("x"), "o"), collect={"all": "o"})]
        empty = await harness.submit(nodes, inputs={"docs": []}, outputs=["all"])
        assert await empty.value("all") == []
        assert (await empty.end()).nodes.keys() == {"m"}
        wrong = await harness.submit(nodes, inputs={"docs": {"a": 1}}, outputs=["all"])
        error = (await wrong.end()).error
        assert error
        assert (error.code, "object" in error.message) == ("map.not_a_list", True)


async def test_map_over_client_value_waits_for_it(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            client("ask", "found"),
            map_("found", client("look", "o", args={"of": var("x")}), collect={"all": "o"}),
        ]
        program = await harness.submit(nodes, outputs=["all"])
        requested = await program.event("client.requested", node="ask")
        await program.put("found", ["a", "b"], requested.data["request_id"])
        for index, item in enumerate("ab"):
            requested = await program.event("client.requested", node=f"look.{index}")
            assert (requested.data["args"], requested.data["output"]) == (
                {"of": item},
                f"o.{index}",
            )
            await program.put(f"o.{index}", item * 2, requested.data["request_id"])
        assert await program.value("all") == ["aa", "bb"]


async def test_too_long_list_fails_the_map_before_items_run(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            map_("docs", generate("s", insert("x"), writes="o"), collect={"a": "o"}, max_width=2)
        ]
        program = await harness.submit(nodes, inputs={"docs": [1, 2, 3]}, outputs=["a"])
        status = await program.end()
        assert status.error
        assert status.error.code == "map.too_wide"
        assert status.nodes.keys() == {"m"}
        wide = [map_({"range": [MAX_WIDTH + 1]}, expr("e", var("x"), "o"), collect={"a": "o"})]
        error = (await (await harness.submit(wide, outputs=["a"])).end()).error
        assert error
        assert error.code == "map.too_wide"


async def test_failed_item_is_named_and_ends_the_others(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.05) as harness:
        nodes = [
            map_(
                "docs",
                generate("slow", insert("x"), ignore_eos=True, writes="o"),
                expr("bad", {"parse_json": var("x")}, "b", when={"eq": [var("x"), "no json"]}),
                collect={"a": "o"},
            )
        ]
        program = await harness.submit(nodes, inputs={"docs": ["x", "no json"]}, outputs=["a"])
        status = await program.end()
        assert status.error
        assert status.error.code == "expr.json"
        assert status.error.message.startswith("bad.1: ")
        assert phases(status) == {
            "m": "failed",
            "slow.0": "killed",
            "bad.0": "skipped",
            "slow.1": "killed",
            "bad.1": "failed",
        }
        assert await harness.num_held() == [(0, 0)]


async def test_failed_item_is_null_under_fail_all(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            map_("docs", expr("p", {"parse_json": var("x")}, "o"), collect={"a": "o"}, fail="all")
        ]
        some = await harness.submit(nodes, inputs={"docs": ["1", "{", "[2]"]}, outputs=["a"])
        assert await some.value("a") == [1, None, [2]]
        assert (await some.end()).status == "done"
        none = await harness.submit(nodes, inputs={"docs": ["{", "}"]}, outputs=["a"])
        error = (await none.end()).error
        assert error
        assert (error.code, "p.0" in error.message) == ("expr.json", True)


@pytest.mark.parametrize(
    ("docs", "result"), [(["1", "{"], [1, None]), (["{", "{"], "handled")], ids=["some", "no"]
)
async def test_a_map_under_fail_all_takes_failed_waits(
    docs: list[str], result: Json, tmp_path: Path
) -> None:
    wait = {"id": "w", "op": "wait", "variables": ["o"], "required": True}
    body = [expr("p", {"parse_json": var("x")}, "o", on_error="isolate"), wait]
    nodes = [
        {
            "id": "t",
            "op": "try",
            "body": [
                map_("docs", *body, collect={"a": "o"}, fail="all"),
                expr("next", var("a"), after=["m"]),
            ],
            "handlers": [{"body": [expr("h", "handled")]}],
            "merge": {"r": ["next", "h"]},
        }
    ]
    async with server_harness(tmp_path) as harness:
        program = await harness.submit(nodes, inputs={"docs": docs}, outputs=["r"])
        assert await program.value("r") == result


async def test_skipped_item_is_null(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        body = expr("e", var("x"), "o", when={"gt": [var("x"), 1]})
        program = await harness.submit(
            [map_("docs", body, collect={"a": "o"})], inputs={"docs": [1, 2]}, outputs=["a"]
        )
        assert await program.value("a") == [None, 2]


async def test_an_isolated_map_fails_alone(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        bad = expr("bad", {"parse_json": "{"}, "o")
        nodes = [
            map_([1], bad, collect={"a": "o"}, on_error="isolate"),
            expr("end", {"first": [var("a"), "none"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        assert await program.value("end") == "none"
        assert (await program.end()).status == "done"


async def test_the_items_of_a_map_whose_job_is_over_are_killed_in_turns(tmp_path: Path) -> None:
    num_items = STEPS_PER_TURN // STEPS_PER_END + 50
    step = client("c", "o", job="j")
    node = map_([1] * num_items, step, job="j", on_error="isolate")
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([node], jobs={"j": {"timeout_s": 0.5}})
        status = phases(await program.end())
    assert status.pop("m") == "failed"
    assert set(status.values()) == {"killed"}


async def test_given_seed_differs_per_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    send = EngineConnection.send

    def note(engine: EngineConnection, *commands: protocol.Command) -> None:
        seeds.extend(c.sampling.seed for c in commands if isinstance(c, protocol.GenerateCommand))
        send(engine, *commands)

    monkeypatch.setattr(EngineConnection, "send", note)
    async with server_harness(tmp_path) as harness:
        nodes = [map_([1, 2, 3], generate("s", "S", writes="o", seed=7), collect={"a": "o"})]
        for _ in range(2):
            await (await harness.submit(nodes, outputs=["a"])).end()
    assert len(set(seeds)) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])


async def test_calls_of_a_map_form_one_task_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str | None] = []
    send = EngineConnection.send

    def note(engine: EngineConnection, *commands: protocol.Command) -> None:
        groups.extend(c.group for c in commands if isinstance(c, protocol.GenerateCommand))
        send(engine, *commands)

    monkeypatch.setattr(EngineConnection, "send", note)
    async with server_harness(tmp_path) as harness:
        nodes = [
            map_({"range": [300]}, generate("s", insert("x"), writes="o"), collect={"a": "o"}),
            generate("end", {"input": {"len": var("a")}}),
        ]
        await (await harness.submit(nodes, outputs=["end"])).end()
    assert len(groups) == 301
    assert set(groups[:300]) == {"m"}
    assert groups[300] != "m"
