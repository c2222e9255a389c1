"""Tests of control flow: which nodes run, which never start or are killed, and their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from conure.engine import protocol
from conure.server.engines.connection import EngineConnection
from conure.server.program.graph import extension
from conure.server.program.ir import MAX_WIDTH
from conure.server.program.status import Event
from conure.server.runtime.node_context import NodeContext

from ...inprocess import Program, answer, call, client, expr, generate, insert, server_harness, var

Json = Any


def map_(items: Json, *body: Json, collect: dict[str, str] | None = None, **fields: Json) -> Json:
    node = {"id": "m", "op": "map", "items": items, "as": "x", "body": list(body)}
    return {**node, "collect": collect or {}, **fields}


def loop(*body: Json, **fields: Json) -> Json:
    return {"id": "l", "op": "loop", "body": list(body), **fields}


def if_(cond: Json, then: list[Json], otherwise: list[Json], **merge: list[str]) -> Json:
    return {"id": "c", "op": "if", "cond": cond, "then": then, "else": otherwise, "merge": merge}


def phases(status: Any) -> dict[str, str]:
    return {name: node.status for name, node in status.nodes.items()}


# --- map ------------------------------------------------------------------------------------


async def test_map_results_follow_item_order(tmp_path: Path) -> None:
    """The first items generate most tokens, so they end last."""
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


# --- if -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cond", [True, False])
async def test_untaken_branch_never_starts(tmp_path: Path, cond: bool) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            if_(
                var("flag"),
                [generate("yes", "Y", writes="y")],
                [generate("no", "N", writes="n")],
                out=["y", "n"],
            ),
            generate("end", insert("out")),
        ]
        program = await harness.submit(nodes, inputs={"flag": cond}, outputs=["end"])
        assert await program.value("out") == answer("Y" if cond else "N")
        other = "no" if cond else "yes"
        events = [e.type for e in await program.events() if e.data.get("node") == other]
        assert events == ["node.skipped"]
        status = await program.end()
        assert (status.nodes[other].status, status.nodes[other].attempt) == ("skipped", 0)
        error = status.variables["n" if cond else "y"].error
        assert error
        assert error.code == "if.not_taken"
        assert status.variables["c.taken"].value == ("then" if cond else "else")


async def test_only_the_taken_branch_is_awaited(tmp_path: Path) -> None:
    """The output of the other branch would be a variable from outside without a value."""
    async with server_harness(tmp_path) as harness:
        nodes = [
            client("ask", "later"),
            if_(True, [expr("e", 1, "o")], [], out=["o", "later"]),
            client("go", "gone", args={"out": var("out")}),
        ]
        program = await harness.submit(nodes, outputs=["out"])
        assert await program.value("out") == 1
        await program.cancel()


async def test_if_in_a_map_decides_per_item(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        choice = if_(
            {"gt": [var("x"), 1]},
            [generate("big", "B", insert("x"), writes="b")],
            [expr("small", {"concat": ["s", {"json": var("x")}]}, "s")],
            o=["b", "s"],
        )
        nodes = [map_([1, 2, 3], choice, collect={"a": "o"})]
        program = await harness.submit(nodes, outputs=["a"])
        assert await program.value("a") == ["s1", answer("B2"), answer("B3")]
        assert phases(await program.end())["big.0"] == "skipped"


# --- loop -----------------------------------------------------------------------------------


async def test_loop_carries_variables_between_rounds(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(
            generate("s", insert("text"), writes="o", max_tokens=3),
            items=["a", "b"],
            index="i",
            **{"as": "x"},
            carry={"text": ["0", {"concat": [var("text"), var("x"), var("o")]}]},
        )
        program = await harness.submit([node], outputs=["text"])
        one = "0a" + answer("0")[:3]
        two = one + "b" + answer(one)[:3]
        assert await program.value("text") == two
        status = await program.end()
        values = {name: variable.value for name, variable in status.variables.items()}
        assert (values["text.0"], values["text.1"], values["text.2"]) == ("0", one, two)
        assert phases(status) == {
            "l": "done",
            "s.0": "done",
            "l.0": "done",
            "s.1": "done",
            "l.1": "done",
        }


async def test_a_loop_ends_when_until_holds(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(
            expr("e", {"add": [var("n"), 2]}, "o"),
            carry={"n": [0, var("o")]},
            until={"gt": [var("o"), 5]},
            max_iter=10,
        )
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == 6
        assert "l.3" not in (await program.end()).nodes


async def test_loop_without_rounds_returns_initial_values(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", var("n"), "o"), count=0, carry={"n": ["start", var("o")]})
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == "start"


@pytest.mark.parametrize("fields", [{"until": False}, {"count": 5, "until": False}, {"count": 5}])
async def test_loop_beyond_max_iter_is_exhausted(tmp_path: Path, fields: Json) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", var("n"), "o"), max_iter=2, carry={"n": [0, var("o")]}, **fields)
        status = await (await harness.submit([node], outputs=["n"])).end()
        assert status.error
        assert status.error.code == "loop.exhausted"
        assert status.nodes["e.1"].status == "done"
        assert "e.2" not in status.nodes


async def test_loop_with_exactly_max_iter_rounds_succeeds(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(expr("e", var("n"), "o"), count=2, max_iter=2, carry={"n": [0, var("o")]})
        assert (await (await harness.submit([node], outputs=["n"])).end()).status == "done"


async def test_skipped_carry_keeps_the_previous_value(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        body = expr("e", {"add": [var("n"), 1]}, "o", when={"eq": [var("i"), 0]})
        node = loop(body, count=3, index="i", carry={"n": [5, var("o")]})
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == 6


async def test_nested_map_and_loop_have_separate_indices(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        inner = map_(
            {"range": [2]},
            generate("s", insert("r"), insert("x"), writes="o", max_tokens=2),
            collect={"a": "o"},
        )
        node = loop(inner, count=2, carry={"r": ["", {"join": [var("a"), "-"]}]})
        program = await harness.submit([node], outputs=["r"])
        first = "-".join(answer(f"{i}")[:2] for i in range(2))
        second = "-".join(answer(f"{first}{i}")[:2] for i in range(2))
        assert await program.value("r") == second
        assert await program.value("o.1.0") == second[:2]
        assert "s.0.1" in (await program.end()).nodes


async def test_many_rounds_do_not_block_the_loop(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = loop(count=2_000, max_iter=2_000, carry={"n": [0, {"add": [var("n"), 1]}]})
        program = await harness.submit([node], outputs=["n"])
        assert await program.value("n") == 2_000


# --- wait, kill, race -----------------------------------------------------------------------


def race(slow: Json, fast: Json, mode: Json = "any") -> list[Json]:
    return [
        slow,
        fast,
        {"id": "w", "op": "wait", "variables": ["slow", "fast"], "mode": mode},
        {"id": "k", "op": "kill", "targets": ["slow", "fast"], "after": ["w"]},
        expr("pick", {"first": [var("slow"), var("fast")]}, after=["k"]),
    ]


async def test_race_loser_is_aborted_in_the_same_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort is sent in the same turn of the event loop, and so in the next frame."""
    order: list[str] = []
    send, commit = EngineConnection.send, NodeContext.publish

    def decide(context: NodeContext, variable: str, *args: Any, **named: Any) -> Any:
        if variable == "fast":
            asyncio.get_running_loop().call_soon(order.append, "turn")
        return commit(context, variable, *args, **named)

    def record_aborts(engine: EngineConnection, *commands: protocol.Command) -> None:
        order.extend("abort" for command in commands if isinstance(command, protocol.Abort))
        send(engine, *commands)

    monkeypatch.setattr(NodeContext, "publish", decide)
    monkeypatch.setattr(EngineConnection, "send", record_aborts)
    async with server_harness(tmp_path, time_per_output_token=0.005) as harness:
        nodes = race(generate("slow", "S", ignore_eos=True), client("ask", "fast"))
        for _ in range(50):
            program = await harness.submit(nodes, outputs=["pick"])
            await program.event("node.started", node="slow")
            requested = await program.event("client.requested")
            await program.put("fast", "won", requested.data["request_id"])
            assert await program.value("pick") == "won"
            status = await program.end()
            assert phases(status)["slow"] == "killed"
        assert await harness.num_held() == [(0, 0)]
    assert order == ["abort", "turn"] * 50


async def test_quorum_counts_values(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        steps = [client(name, name) for name in "abc"]
        nodes = [
            *steps,
            {"id": "w", "op": "wait", "variables": ["a", "b", "c"], "mode": 2},
            expr("two", {"object": {"done": True}}, after=["w"]),
        ]
        program = await harness.submit(nodes, outputs=["two"])
        requests = {
            name: (await program.event("client.requested", node=name)).data["request_id"]
            for name in "abc"
        }
        await program.put("a", 1, requests["a"])
        assert (await program.get("two", wait_s=0)).status == "waiting"
        await program.put("c", 1, requests["c"])
        assert await program.value("two") == {"done": True}


async def test_impossible_wait_ends(tmp_path: Path) -> None:
    """Two of three values are required and two are skipped; nodes listed `after` it run."""
    async with server_harness(tmp_path) as harness:
        skipped = [expr(name, 1, when=False) for name in "ab"]
        nodes = [
            *skipped,
            client("c", "c"),
            {"id": "w", "op": "wait", "variables": ["a", "b", "c"], "mode": 2},
            expr("after", 1, after=["w"]),
        ]
        program = await harness.submit(nodes, outputs=["after"])
        assert await program.value("after") == 1
        assert phases(await program.status())["w"] == "skipped"
        await program.cancel()


async def test_a_wait_has_its_own_time(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        wait = {"id": "w", "op": "wait", "variables": ["a"], "timeout_s": 0.02}
        nodes = [
            client("a", "a"),
            {**wait, "on_error": "isolate"},
            {"id": "k", "op": "kill", "targets": ["a"], "after": ["w"]},
            expr("end", {"first": [var("a"), "late"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        assert await program.value("end") == "late"
        status = await program.end()
        error = status.nodes["w"].error
        assert error
        assert error.code == "node.timeout"


async def test_kill_follows_expressions_back_to_the_call(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        nodes = [
            generate("llm", "L", ignore_eos=True),
            expr("part", {"slice": [var("llm"), 0, 1]}),
            client("go", "go"),
            {"id": "k", "op": "kill", "targets": ["part"], "when": var("go")},
            expr("end", {"first": [var("part"), "gone"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        requested = await program.event("client.requested")
        await program.put("go", True, requested.data["request_id"])
        assert await program.value("end") == "gone"
        assert phases(await program.end())["llm"] == "killed"


async def test_call_with_other_readers_survives_a_kill(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.001) as harness:
        nodes = [
            generate("llm", "L"),
            expr("part", {"slice": [var("llm"), 0, 1]}),
            {"id": "k", "op": "kill", "targets": ["part"], "when": True},
            expr("end", {"concat": [var("llm"), "!"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        assert await program.value("end") == answer("L") + "!"
        assert phases(await program.end())["part"] == "killed"


async def test_later_output_can_be_killed_alone(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.002) as harness:
        prompt = [
            {"text": "A"},
            {"output": "one", "max_tokens": 30},
            {"text": "B"},
            {"output": "two"},
        ]
        nodes = [
            {"id": "p", "op": "generate", "prompt": prompt},
            {"id": "k", "op": "kill", "targets": ["two"], "when": True},
            expr("end", [var("one"), {"first": [var("two"), "gone"]}]),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        assert await program.value("end") == [answer("A")[:30], "gone"]
        assert phases(await program.end())["p"] == "killed"


async def test_kill_ends_a_job_and_its_bodies(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        nodes = [
            map_(
                [1, 2],
                generate("s", insert("x"), writes="o", ignore_eos=True),
                collect={"a": "o"},
                job="side",
            ),
            client("go", "go"),
            {"id": "k", "op": "kill", "targets": ["side"], "when": var("go")},
            expr("end", {"first": [var("a"), "gone"]}),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        await program.event("node.started", node="s.1")
        requested = await program.event("client.requested")
        await program.put("go", True, requested.data["request_id"])
        assert await program.value("end") == "gone"
        status = phases(await program.end())
        assert [status[name] for name in ("m", "s.0", "s.1")] == ["killed"] * 3
        assert await harness.num_held() == [(0, 0)]


# --- try and yield --------------------------------------------------------------------------


def try_(*body: Json, handlers: list[Json], **fields: Json) -> Json:
    return {"id": "t", "op": "try", "body": list(body), "handlers": handlers, **fields}


async def test_handler_is_chosen_by_error_code(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = try_(
            expr("bad", {"parse_json": "{"}, "o"),
            handlers=[
                {"codes": ["expr.type"], "body": [generate("wrong", "W", writes="w")]},
                {"codes": ["expr.json"], "body": [generate("right", "R", writes="r")]},
            ],
            merge={"out": ["o", "w", "r"]},
        )
        program = await harness.submit([node], outputs=["out"])
        assert await program.value("out") == answer("R")
        status = await program.end()
        assert phases(status) == {"t": "done", "bad": "failed", "wrong": "skipped", "right": "done"}
        assert status.variables["t.handler"].value == 1


async def test_body_is_retried_before_a_handler_runs(tmp_path: Path) -> None:
    tried: list[int] = []

    def flaky() -> int:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError
        return len(tried)

    async with server_harness(tmp_path, {"flaky": flaky}) as harness:
        node = try_(
            call("f", "flaky", "o"),
            handlers=[{"body": [expr("h", "handled", "h")]}],
            merge={"out": ["o", "h"]},
            retries=2,
        )
        program = await harness.submit([node], outputs=["out"])
        assert await program.value("out") == 3
        status = phases(await program.end())
        assert status == {
            "t": "done",
            "f": "failed",
            "f.r1": "failed",
            "f.r2": "done",
            "h": "skipped",
        }


async def test_unhandled_failure_fails_the_surrounding_node(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        node = try_(
            expr("bad", {"parse_json": "{"}, "o"),
            handlers=[{"codes": ["expr.type"], "body": [expr("h", 1, "h")]}],
            merge={"out": ["o", "h"]},
        )
        program = await harness.submit([node], outputs=["out"])
        status = await program.end()
        assert status.error
        assert (status.status, status.error.code) == ("failed", "expr.json")
        failed = [e.data for e in await program.events() if e.type == "node.failed"]
        assert [(data["node"], data.get("cause")) for data in failed] == [
            ("bad", None),
            ("t", "bad"),
        ]


async def test_yield_emits_an_event(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            generate("s", "S"),
            {"id": "y", "op": "yield", "value": {"object": {"said": var("s")}}},
        ]
        program = await harness.submit(nodes, outputs=["s"])
        await program.end()
        (reported,) = [e.data for e in await program.events() if e.type == "yield"]
        assert (reported["value"], reported["mode"], reported["final"]) == (
            {"said": answer("S")},
            "value",
            True,
        )
        assert reported["node"] == "y"


async def test_yield_streams_partial_text(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        value = {"object": {"so_far": {"partial": "s"}, "is_end": {"final": "s"}}}
        nodes = [
            generate("s", "S"),
            {"id": "y", "op": "yield", "value": value, "mode": "partial"},
            {"id": "d", "op": "yield", "value": var("s"), "mode": "delta"},
        ]
        program = await harness.submit(nodes, outputs=["s"])
        reported = [e async for e in program.read() if e.type == "yield"]
        partial = [e for e in reported if e.data["node"] == "y"]
        *growing, last = [e.data["value"] for e in partial]
        assert len(growing) > 2
        assert not any(each["is_end"] for each in growing)
        texts = [each["so_far"] for each in growing]
        assert texts == sorted(texts, key=len)
        assert all(answer("S").startswith(text) for text in texts)
        assert last == {"so_far": answer("S"), "is_end": True}
        *pieces, whole = [e for e in reported if e.data["node"] == "d"]
        assert answer("S").startswith("".join(e.data["value"] for e in pieces))
        assert len(pieces) > 2
        assert whole.data["value"] == answer("S")
        assert {e.seq is None for e in (*pieces, *partial[:-1])} == {True}, "only the last is kept"
        assert [e.data["final"] for e in await program.events() if e.type == "yield"] == [True] * 2


async def test_yield_can_include_the_item_index(tmp_path: Path) -> None:
    """Items, indices and carried variables are complete, so `partial` gives their value."""
    async with server_harness(tmp_path, time_per_output_token=0.005) as harness:
        value = [{"partial": "x"}, {"final": "x"}, {"partial": "i"}, {"partial": "s"}]
        in_map = {"id": "y", "op": "yield", "value": value, "mode": "partial"}
        carried = [{"partial": "r"}, {"final": "r"}, {"partial": "t"}]
        in_loop = {"id": "z", "op": "yield", "value": carried, "mode": "partial"}
        nodes = [
            map_("docs", generate("s", "S ", insert("x")), in_map, index="i"),
            loop(generate("t", "T ", insert("r")), in_loop, count=2, carry={"r": ["a", var("t")]}),
        ]
        program = await harness.submit(nodes, inputs={"docs": ["one", "two"]}, outputs=["r"])
        reported = [e async for e in program.read() if e.type == "yield"]
        assert (await program.status()).status == "done"
        last = {e.data["node"]: e.data["value"] for e in reported if e.seq is not None}
        first = answer("T a")
        assert last == {
            "y.0": ["one", True, 0, answer("S one")],
            "y.1": ["two", True, 1, answer("S two")],
            "z.0": ["a", True, first],
            "z.1": [first, True, answer(f"T {first}")],
        }
        growing = [e.data["value"] for e in reported if e.seq is None and e.data["node"] == "y.1"]
        assert len(growing) > 2
        assert all(each[:3] == ["two", True, 1] for each in growing)


async def test_yield_is_silent_until_inputs_are_resolved(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.005) as harness:
        nodes = [
            generate("s", "S"),
            client("ask", "late"),
            {
                "id": "y",
                "op": "yield",
                "value": {"partial": "s"},
                "mode": "partial",
                "after": ["ask"],
            },
            {"id": "n", "op": "yield", "value": {"partial": "s"}, "mode": "partial", "when": False},
        ]
        program = await harness.submit(nodes, outputs=["s"])
        await program.value("s")
        requested = await program.event("client.requested")
        reading = program.read()
        seen = [event async for event in _until(reading, "client.requested")]
        assert not [event for event in seen if event.type == "yield"]
        await program.put("late", 1, requested.data["request_id"])
        await program.end()
        reported = [e.data for e in await program.events() if e.type == "yield"]
        assert [(each["node"], each["value"]) for each in reported] == [("y", answer("S"))]


async def _until(
    reading: AsyncGenerator[Event, None], event_type: str
) -> AsyncGenerator[Event, None]:
    async for event in reading:
        yield event
        if event.type == event_type:
            await reading.aclose()
            return


async def test_demand_includes_bodies(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        nodes = [
            map_([1, 2], expr("e", var("x"), "o"), collect={"a": "o"}),
            if_(True, [expr("t", var("a"), "y")], [], out=["y", "a"]),
            expr("other", 1),
        ]
        program = await harness.submit(nodes, outputs=["out"], start="demand")
        assert (await program.status()).nodes["m"].status == "waiting"
        assert await program.value("out") == [1, 2]
        assert (await program.end()).nodes["other"].status != "done"


async def test_session_accepts_nodes_with_bodies(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit([], open=True)
        await program.append(nodes=[map_([1, 2], expr("e", var("x"), "o"), collect={"a": "o"})])
        assert await program.value("a") == [1, 2]
        again = await program.append(
            nodes=[expr("sum", {"len": var("a")})], outputs=["sum"], close=True
        )
        assert again.nodes.keys() == {"sum"}
        assert await program.value("sum") == 2
        await program.end()


async def test_failed_item_in_a_session_fails_only_its_map(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        bad = map_(["{"], expr("p", {"parse_json": var("x")}, "o"), collect={"a": "o"})
        program = await harness.submit([bad], open=True)
        found = await program.get("a")
        assert found.error
        assert (found.status, found.error.code) == ("failed", "expr.json")
        await program.append(nodes=[expr("b", 1)], outputs=["b"], close=True)
        assert await program.value("b") == 1
        assert (await program.end()).status == "done"


async def test_the_critical_path_goes_through_bodies(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.002) as harness:
        nodes = [
            generate("pre", "P"),
            map_(
                {"split": [var("pre"), " "]},
                generate("s", insert("x"), writes="o"),
                generate("t", insert("o"), writes="p", max_tokens=3),
                collect={"all": "p"},
            ),
            loop(
                generate("q", insert("r"), writes="u", max_tokens=5),
                count=2,
                carry={"r": [{"join": [var("all"), ""]}, var("u")]},
            ),
            generate("end", insert("r")),
        ]
        program = await harness.submit(nodes, outputs=["end"])
        receipt = (await program.end()).receipt
        assert receipt
        path = [name for name in receipt.critical_path if not name.startswith(("s.", "t."))]
        assert path == ["pre", "m", "q.0", "l.0", "q.1", "l.1", "l", "end"]
        slowest = [name for name in receipt.critical_path if name not in path]
        assert [name[0] for name in slowest] == ["s", "t"]
        assert slowest[0][1:] == slowest[1][1:], "of one item"
        assert 0 < receipt.critical_path_s <= receipt.wall_s


async def test_instances_end_with_their_program(tmp_path: Path) -> None:
    async with server_harness(tmp_path, time_per_output_token=0.01) as harness:
        body = generate(
            "s", "the same beginning for all of them ", insert("x"), writes="o", ignore_eos=True
        )
        nodes = [map_({"range": [40]}, body, collect={"a": "o"})]
        program: Program = await harness.submit(nodes, outputs=["a"])
        await program.event("node.started")
        status = await program.cancel()
        assert status.status == "cancelled"
        assert {node.status for node in status.nodes.values()} == {"cancelled"}
        assert await harness.num_held() == [(0, 0)]
        assert harness.executor.services.call_quota.num_calls == 0


# --- what ends in the middle of itself --------------------------------------------------------


async def test_body_can_kill_the_node_around_it(tmp_path: Path) -> None:
    """The first match ends the map."""
    async with server_harness(tmp_path) as harness:
        kill = {"id": "k", "op": "kill", "targets": ["ys"], "after": ["e"]}
        inner = map_([1, 2], expr("e", var("x"), "y"), kill, collect={"ys": "y"})
        alone = await harness.submit([inner], outputs=["ys"])
        assert phases(await alone.end())["m"] == "killed"
        branch = if_(1, [inner], [expr("o", 1, "one")], z=["ys", "one"])
        nested = await harness.submit([branch], outputs=["z"])
        assert phases(await nested.end())["m"] == "killed"


@pytest.mark.parametrize("carry", [{"var": "b"}, {"add": [{"var": "b"}, {"var": "n"}]}])
async def test_loop_fails_with_a_failed_carried_variable(tmp_path: Path, carry: Json) -> None:
    async with server_harness(tmp_path) as harness:
        bad = {**expr("bad", {"div": [1, 0]}, "b"), "on_error": "isolate"}
        nodes = [bad, loop(count=3, carry={"n": [0, carry]})]
        status = await (await harness.submit(nodes, outputs=["n"])).end()
        assert status.status == "failed"
        assert phases(status) == {"bad": "failed", "l": "failed", "l.0": "failed"}


async def test_failed_round_in_an_isolating_job_ends_its_loop(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        step = expr("e", {"add": [var("n"), 1]}, "n2")
        endless = loop(step, max_iter=2, carry={"n": [0, var("n2")]}, until=False, job="j")
        after = expr("z", {"first": [var("n"), "none"]}, "y")
        program = await harness.submit(
            [endless, after], outputs=["y"], jobs={"j": {"on_error": "isolate"}}
        )
        status = await program.end()
        assert phases(status)["l"] == "failed"
        assert status.variables["y"].value == "none"
