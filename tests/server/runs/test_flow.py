"""Deciding nodes at work: what runs, what never starts, what dies, and what is said about it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from conure.engine import api
from conure.server.engines.engine import Engine
from conure.server.program import growth
from conure.server.program.ir import MAX_WIDTH
from conure.server.program.status import Event
from conure.server.runs.run import Run

from ..inprocess import Program, answer, call, client, desk_of, expr, read, say, var

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


async def test_a_map_lists_its_results_in_the_order_of_the_items(tmp_path: Path) -> None:
    """The first items have the most to say, so that they end last."""
    async with desk_of(tmp_path, time_per_output_token=0.002) as desk:
        body = say("s", "Sum up ", read("x"), writes="o")
        nodes = [map_("docs", body, collect={"sums": "o"}), say("all", read("sums"))]
        docs = [f"doc {i}" for i in range(8)]
        program = await desk.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        sums = [answer(f"Sum up {doc}") for doc in docs]
        assert await program.value("sums") == sums
        assert await program.value("o.3") == sums[3]
        status = await program.end()
        assert status.variables["m.width"].value == 8
        assert status.nodes["s.7"].status == "done"
        appended = [e.data for e in await program.events() if e.type == "nodes.appended"]
        assert [name for e in appended for name in e["nodes"]] == [f"s.{i}" for i in range(8)]
        assert {e["node"] for e in appended} == {"m"}


async def test_a_map_wider_than_the_queue_comes_in_as_there_is_room(tmp_path: Path) -> None:
    async with desk_of(tmp_path, max_queued_calls=4) as desk:
        nodes = [map_("docs", say("s", "S ", read("x")), collect={"all": "s"})]
        docs = [f"doc {i}" for i in range(30)]
        program = await desk.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        most = 0
        async for event in program.read():
            if event.type == "nodes.appended":
                nodes_now = (await program.status()).nodes
                is_open = [n.status in ("waiting", "queued", "running") for n in nodes_now.values()]
                most = max(most, sum(is_open) - 1)  # without the map itself
        assert 1 < most <= 4
        assert await program.value("all") == [answer(f"S {doc}") for doc in docs]
        assert desk.executor.room.num_calls == 0


async def test_maps_that_wait_for_each_other_end_in_a_queue_of_one(tmp_path: Path) -> None:
    """The items of the first hold all the room, and wait for the second."""
    async with desk_of(tmp_path, max_queued_calls=1) as desk:
        first = map_("docs", say("s", "S ", read("x"), read("late")), collect={"all": "s"})
        second = map_("docs", say("t", "T ", read("x")), collect={"late": "t"})
        nodes = [first, {**second, "id": "n"}]
        docs = [f"doc {i}" for i in range(6)]
        program = await desk.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        late = [answer(f"T {doc}") for doc in docs]
        assert await program.value("late") == late
        assert len(await program.value("all")) == 6
        await program.end()
        killed = await desk.submit(nodes, inputs={"docs": docs * 20}, outputs=["all"])
        await killed.event("nodes.appended", count=3)
        assert (await killed.cancel()).status == "cancelled"
        assert desk.executor.room.num_calls == 0


async def test_a_map_that_waits_goes_on_when_another_program_makes_room(tmp_path: Path) -> None:
    async with desk_of(tmp_path, max_queued_calls=4) as desk:
        held = [client("ask", "late"), *(say(f"h{i}", "H ", read("late")) for i in range(3))]
        holder = await desk.submit(held, outputs=["h0"])
        body = [client("look", "seen", args={"of": var("x")}), say("s", "S ", read("seen"))]
        nodes = [map_("docs", *body, collect={"all": "s"})]
        program = await desk.submit(nodes, inputs={"docs": ["a", "b"]}, outputs=["all"])
        await program.event("client.requested", node="look.0")
        assert "look.1" not in (await program.status()).nodes
        await holder.cancel()
        for index in range(2):
            asked = await program.event("client.requested", node=f"look.{index}")
            await program.put(f"seen.{index}", "x", asked.data["request_id"])
        assert await program.value("all") == [answer("S x")] * 2


async def test_others_come_in_while_a_wide_map_runs(tmp_path: Path) -> None:
    async with desk_of(tmp_path, max_queued_calls=4) as desk:
        nodes = [map_("docs", say("s", "S ", read("x")), collect={"all": "s"})]
        program = await desk.submit(nodes, inputs={"docs": ["d"] * 40}, outputs=["all"])
        for i in range(8):
            other = await desk.submit([say("q", f"Q{i}")], outputs=["q"])
            await other.end()
        await program.end()


@pytest.mark.parametrize("inner", ["map", "loop"])
async def test_calls_deep_in_the_items_of_a_map_are_no_more_than_there_is_room_for(
    tmp_path: Path, inner: str
) -> None:
    body = say("s", "S ", read("x"))
    nested = (
        {"id": "n", "op": "map", "items": var("two"), "as": "y", "body": [body], "collect": {}}
        if inner == "map"
        else loop(body, count=2)
    )
    async with desk_of(tmp_path, max_queued_calls=8) as desk:
        inputs = {"docs": [f"d{i}" for i in range(30)], "two": [1, 2]}
        program = await desk.submit([map_("docs", nested, collect={})], inputs=inputs)
        most = 0
        async for _ in program.read():
            most = max(most, desk.executor.room.num_calls)
        status = await program.end()
        assert sum(node.op == "generate" for node in status.nodes.values()) == 60
        assert 2 < most <= 8


async def test_two_maps_that_wait_share_the_room(tmp_path: Path) -> None:
    async with desk_of(tmp_path, max_queued_calls=8) as desk:
        nodes = [
            map_("docs", say("s", "S ", read("x")), collect={"all": "s"}),
            {**map_("docs", say("t", "T ", read("x")), collect={"others": "t"}), "id": "n"},
        ]
        docs = [f"d{i}" for i in range(40)]
        program = await desk.submit(nodes, inputs={"docs": docs}, outputs=["all", "others"])
        order = [
            name[0]
            for event in await program.events()
            if event.type == "nodes.appended"
            for name in event.data["nodes"]
        ]
        assert 14 <= order[:40].count("t") <= 26


async def test_a_map_that_is_too_large_fails_before_anything_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MAX_GROWN_NODES", 50)
    async with desk_of(tmp_path, max_queued_calls=4) as desk:
        first = map_("few", say("s", "S ", read("x")), collect={"all": "s"})
        second = {**map_("more", say("t", "T ", read("y")), collect={"others": "t"}), "id": "n"}
        nodes = [first, second | {"as": "y", "on_error": "isolate"}]
        inputs = {"few": list(range(30)), "more": list(range(30))}
        program = await desk.submit(nodes, inputs=inputs, outputs=["all"])
        status = await program.end()
        error = status.nodes["n"].error
        assert error
        assert error.code == "program.too_large"
        assert (status.status, len(status.nodes)) == ("done", 32)


async def test_a_map_that_was_coming_in_goes_on_after_a_restart(tmp_path: Path) -> None:
    docs = [f"d{i}" for i in range(60)]
    nodes = [map_("docs", say("s", "S ", read("x")), say("t", "T"), collect={"all": "s"})]
    async with desk_of(tmp_path, max_queued_calls=8, time_per_output_token=0.01) as desk:
        program = await desk.submit(nodes, inputs={"docs": docs}, outputs=["all"])
        await program.event("nodes.appended", count=3)
    async with desk_of(tmp_path, max_queued_calls=8) as desk:
        assert 0 < desk.executor.room.num_calls <= 8
        program = Program(desk, program.id)
        assert await program.value("all") == [answer(f"S {doc}") for doc in docs]
        told = [e.data["nodes"] for e in await program.events() if e.type == "nodes.appended"]
        assert [name for names in told for name in names] == [
            f"{name}.{i}" for i in range(60) for name in "st"
        ]


async def test_a_call_that_has_ended_is_not_open(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [client("ask", "late"), say("a", "A"), say("b", "B"), say("z", read("late"))]
        program = await desk.submit(nodes, outputs=["z"])
        await program.value("a")
        await program.value("b")
        assert desk.executor.room.num_calls == 1
        assert "\nconure_calls_open 1.0\n" in (await desk.executor.metrics()).decode()


async def test_a_map_over_nothing_gives_nothing_and_over_null_says_so(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [map_("docs", expr("e", var("x"), "o"), collect={"all": "o"})]
        empty = await desk.submit(nodes, inputs={"docs": []}, outputs=["all"])
        assert await empty.value("all") == []
        assert (await empty.end()).nodes.keys() == {"m"}
        wrong = await desk.submit(nodes, inputs={"docs": {"a": 1}}, outputs=["all"])
        error = (await wrong.end()).error
        assert error
        assert (error.code, "object" in error.message) == ("map.not_a_list", True)


async def test_a_map_over_what_the_client_says_waits_for_it(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [
            client("ask", "found"),
            map_("found", client("look", "o", args={"of": var("x")}), collect={"all": "o"}),
        ]
        program = await desk.submit(nodes, outputs=["all"])
        asked = await program.event("client.requested", node="ask")
        await program.put("found", ["a", "b"], asked.data["request_id"])
        for index, item in enumerate("ab"):
            asked = await program.event("client.requested", node=f"look.{index}")
            assert (asked.data["args"], asked.data["output"]) == ({"of": item}, f"o.{index}")
            await program.put(f"o.{index}", item * 2, asked.data["request_id"])
        assert await program.value("all") == ["aa", "bb"]


async def test_a_list_that_is_too_long_fails_its_map_before_anything_runs(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [map_("docs", say("s", read("x"), writes="o"), collect={"a": "o"}, max_width=2)]
        program = await desk.submit(nodes, inputs={"docs": [1, 2, 3]}, outputs=["a"])
        status = await program.end()
        assert status.error
        assert status.error.code == "map.too_wide"
        assert status.nodes.keys() == {"m"}
        wide = [map_({"range": [MAX_WIDTH + 1]}, expr("e", var("x"), "o"), collect={"a": "o"})]
        error = (await (await desk.submit(wide, outputs=["a"])).end()).error
        assert error
        assert error.code == "map.too_wide"


async def test_an_item_that_fails_names_itself_and_ends_the_others(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.05) as desk:
        nodes = [
            map_(
                "docs",
                say("slow", read("x"), ignore_eos=True, writes="o"),
                expr("bad", {"parse_json": var("x")}, "b", when={"eq": [var("x"), "no json"]}),
                collect={"a": "o"},
            )
        ]
        program = await desk.submit(nodes, inputs={"docs": ["x", "no json"]}, outputs=["a"])
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
        assert await desk.num_held() == [(0, 0)]


async def test_where_all_must_fail_an_item_that_fails_is_null(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [
            map_("docs", expr("p", {"parse_json": var("x")}, "o"), collect={"a": "o"}, fail="all")
        ]
        some = await desk.submit(nodes, inputs={"docs": ["1", "{", "[2]"]}, outputs=["a"])
        assert await some.value("a") == [1, None, [2]]
        assert (await some.end()).status == "done"
        none = await desk.submit(nodes, inputs={"docs": ["{", "}"]}, outputs=["a"])
        error = (await none.end()).error
        assert error
        assert (error.code, "p.0" in error.message) == ("expr.json", True)


async def test_an_item_that_was_skipped_is_null(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        body = expr("e", var("x"), "o", when={"gt": [var("x"), 1]})
        program = await desk.submit(
            [map_("docs", body, collect={"a": "o"})], inputs={"docs": [1, 2]}, outputs=["a"]
        )
        assert await program.value("a") == [None, 2]


async def test_an_isolated_map_fails_alone(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        bad = expr("bad", {"parse_json": "{"}, "o")
        nodes = [
            map_([1], bad, collect={"a": "o"}, on_error="isolate"),
            expr("end", {"first": [var("a"), "none"]}),
        ]
        program = await desk.submit(nodes, outputs=["end"])
        assert await program.value("end") == "none"
        assert (await program.end()).status == "done"


async def test_a_given_seed_is_another_one_in_every_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    send = Engine.send

    def note(engine: Engine, *commands: api.Command) -> None:
        seeds.extend(c.sampling.seed for c in commands if isinstance(c, api.Generate))
        send(engine, *commands)

    monkeypatch.setattr(Engine, "send", note)
    async with desk_of(tmp_path) as desk:
        nodes = [map_([1, 2, 3], say("s", "S", writes="o", seed=7), collect={"a": "o"})]
        for _ in range(2):
            await (await desk.submit(nodes, outputs=["a"])).end()
    assert len(set(seeds)) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])


async def test_calls_of_one_map_are_one_task_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str | None] = []
    send = Engine.send

    def note(engine: Engine, *commands: api.Command) -> None:
        groups.extend(c.group for c in commands if isinstance(c, api.Generate))
        send(engine, *commands)

    monkeypatch.setattr(Engine, "send", note)
    async with desk_of(tmp_path) as desk:
        nodes = [
            map_({"range": [300]}, say("s", read("x"), writes="o"), collect={"a": "o"}),
            say("end", {"input": {"len": var("a")}}),
        ]
        await (await desk.submit(nodes, outputs=["end"])).end()
    assert len(groups) == 301
    assert set(groups[:300]) == {"m"}
    assert groups[300] != "m"


# --- if -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cond", [True, False])
async def test_the_branch_that_is_not_taken_never_starts(tmp_path: Path, cond: bool) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [
            if_(
                var("flag"),
                [say("yes", "Y", writes="y")],
                [say("no", "N", writes="n")],
                out=["y", "n"],
            ),
            say("end", read("out")),
        ]
        program = await desk.submit(nodes, inputs={"flag": cond}, outputs=["end"])
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


async def test_only_the_branch_that_is_taken_is_waited_for(tmp_path: Path) -> None:
    """What the other one would merge comes from outside, and never comes."""
    async with desk_of(tmp_path) as desk:
        nodes = [
            client("ask", "later"),
            if_(True, [expr("e", 1, "o")], [], out=["o", "later"]),
            client("go", "gone", args={"out": var("out")}),
        ]
        program = await desk.submit(nodes, outputs=["out"])
        assert await program.value("out") == 1
        await program.cancel()


async def test_an_if_in_a_map_decides_for_each_item(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        choice = if_(
            {"gt": [var("x"), 1]},
            [say("big", "B", read("x"), writes="b")],
            [expr("small", {"concat": ["s", {"json": var("x")}]}, "s")],
            o=["b", "s"],
        )
        nodes = [map_([1, 2, 3], choice, collect={"a": "o"})]
        program = await desk.submit(nodes, outputs=["a"])
        assert await program.value("a") == ["s1", answer("B2"), answer("B3")]
        assert phases(await program.end())["big.0"] == "skipped"


# --- loop -----------------------------------------------------------------------------------


async def test_a_loop_carries_its_variables_from_round_to_round(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        node = loop(
            say("s", read("text"), writes="o", max_tokens=3),
            items=["a", "b"],
            index="i",
            **{"as": "x"},
            carry={"text": ["0", {"concat": [var("text"), var("x"), var("o")]}]},
        )
        program = await desk.submit([node], outputs=["text"])
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
    async with desk_of(tmp_path) as desk:
        node = loop(
            expr("e", {"add": [var("n"), 2]}, "o"),
            carry={"n": [0, var("o")]},
            until={"gt": [var("o"), 5]},
            max_iter=10,
        )
        program = await desk.submit([node], outputs=["n"])
        assert await program.value("n") == 6
        assert "l.3" not in (await program.end()).nodes


async def test_a_loop_of_no_rounds_gives_what_it_began_with(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        node = loop(expr("e", var("n"), "o"), count=0, carry={"n": ["start", var("o")]})
        program = await desk.submit([node], outputs=["n"])
        assert await program.value("n") == "start"


@pytest.mark.parametrize("fields", [{"until": False}, {"count": 5, "until": False}, {"count": 5}])
async def test_a_loop_that_would_go_on_after_its_last_round_is_exhausted(
    tmp_path: Path, fields: Json
) -> None:
    async with desk_of(tmp_path) as desk:
        node = loop(expr("e", var("n"), "o"), max_iter=2, carry={"n": [0, var("o")]}, **fields)
        status = await (await desk.submit([node], outputs=["n"])).end()
        assert status.error
        assert status.error.code == "loop.exhausted"
        assert status.nodes["e.1"].status == "done"
        assert "e.2" not in status.nodes


async def test_a_loop_whose_rounds_are_its_bound_is_not_exhausted(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        node = loop(expr("e", var("n"), "o"), count=2, max_iter=2, carry={"n": [0, var("o")]})
        assert (await (await desk.submit([node], outputs=["n"])).end()).status == "done"


async def test_what_cannot_be_carried_on_stays_as_it_was(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        body = expr("e", {"add": [var("n"), 1]}, "o", when={"eq": [var("i"), 0]})
        node = loop(body, count=3, index="i", carry={"n": [5, var("o")]})
        program = await desk.submit([node], outputs=["n"])
        assert await program.value("n") == 6


async def test_a_map_in_a_loop_has_an_index_for_each(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        inner = map_(
            {"range": [2]},
            say("s", read("r"), read("x"), writes="o", max_tokens=2),
            collect={"a": "o"},
        )
        node = loop(inner, count=2, carry={"r": ["", {"join": [var("a"), "-"]}]})
        program = await desk.submit([node], outputs=["r"])
        first = "-".join(answer(f"{i}")[:2] for i in range(2))
        second = "-".join(answer(f"{first}{i}")[:2] for i in range(2))
        assert await program.value("r") == second
        assert await program.value("o.1.0") == second[:2]
        assert "s.0.1" in (await program.end()).nodes


async def test_many_rounds_of_computations_do_not_stop_the_server(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        node = loop(count=2_000, max_iter=2_000, carry={"n": [0, {"add": [var("n"), 1]}]})
        program = await desk.submit([node], outputs=["n"])
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


async def test_the_loser_of_a_race_dies_in_the_turn_of_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort is on its way before the loop turns, and so in the next frame."""
    decided: list[float] = []
    took_s: list[float] = []
    order: list[str] = []
    flush, send, commit = Engine._flush, Engine.send, Run._commit

    def decide(run: Run, variable: str, *args: Any, **named: Any) -> Any:
        if variable == "fast":
            asyncio.get_running_loop().call_soon(order.append, "turn")
        return commit(run, variable, *args, **named)

    def tell(engine: Engine, *commands: api.Command) -> None:
        order.extend("abort" for command in commands if isinstance(command, api.Abort))
        send(engine, *commands)

    def note(engine: Engine) -> None:
        is_abort = any(isinstance(c, api.Abort) for c in engine._outgoing)
        flush(engine)
        if is_abort and decided:
            took_s.append(time.perf_counter() - decided.pop())

    monkeypatch.setattr(Run, "_commit", decide)
    monkeypatch.setattr(Engine, "send", tell)
    monkeypatch.setattr(Engine, "_flush", note)
    async with desk_of(tmp_path, time_per_output_token=0.005) as desk:
        nodes = race(say("slow", "S", ignore_eos=True), client("ask", "fast"))
        for _ in range(50):
            program = await desk.submit(nodes, outputs=["pick"])
            await program.event("node.started", node="slow")
            asked = await program.event("client.requested")
            decided[:] = [time.perf_counter()]
            await program.put("fast", "won", asked.data["request_id"])
            assert await program.value("pick") == "won"
            status = await program.end()
            assert phases(status)["slow"] == "killed"
        assert await desk.num_held() == [(0, 0)]
    assert order == ["abort", "turn"] * 50
    assert len(took_s) == 50
    assert statistics.median(took_s) <= 0.005  # the machine may be busy; it is a turn of the loop


async def test_a_quorum_is_a_number_of_values(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        steps = [client(name, name) for name in "abc"]
        nodes = [
            *steps,
            {"id": "w", "op": "wait", "variables": ["a", "b", "c"], "mode": 2},
            expr("two", {"object": {"done": True}}, after=["w"]),
        ]
        program = await desk.submit(nodes, outputs=["two"])
        requests = {
            name: (await program.event("client.requested", node=name)).data["request_id"]
            for name in "abc"
        }
        await program.put("a", 1, requests["a"])
        assert (await program.get("two", wait_s=0)).status == "waiting"
        await program.put("c", 1, requests["c"])
        assert await program.value("two") == {"done": True}


async def test_a_wait_that_can_never_be_over_is_over(tmp_path: Path) -> None:
    """Two of three are wanted and two are skipped; who comes after goes on."""
    async with desk_of(tmp_path) as desk:
        skipped = [expr(name, 1, when=False) for name in "ab"]
        nodes = [
            *skipped,
            client("c", "c"),
            {"id": "w", "op": "wait", "variables": ["a", "b", "c"], "mode": 2},
            expr("after", 1, after=["w"]),
        ]
        program = await desk.submit(nodes, outputs=["after"])
        assert await program.value("after") == 1
        assert phases(await program.status())["w"] == "skipped"
        await program.cancel()


async def test_a_wait_has_its_own_time(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        wait = {"id": "w", "op": "wait", "variables": ["a"], "timeout_s": 0.02}
        nodes = [
            client("a", "a"),
            {**wait, "on_error": "isolate"},
            {"id": "k", "op": "kill", "targets": ["a"], "after": ["w"]},
            expr("end", {"first": [var("a"), "late"]}),
        ]
        program = await desk.submit(nodes, outputs=["end"])
        assert await program.value("end") == "late"
        status = await program.end()
        error = status.nodes["w"].error
        assert error
        assert error.code == "node.timeout"


async def test_a_kill_goes_back_through_computations_to_the_call(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.01) as desk:
        nodes = [
            say("llm", "L", ignore_eos=True),
            expr("part", {"slice": [var("llm"), 0, 1]}),
            client("go", "go"),
            {"id": "k", "op": "kill", "targets": ["part"], "when": var("go")},
            expr("end", {"first": [var("part"), "gone"]}),
        ]
        program = await desk.submit(nodes, outputs=["end"])
        asked = await program.event("client.requested")
        await program.put("go", True, asked.data["request_id"])
        assert await program.value("end") == "gone"
        assert phases(await program.end())["llm"] == "killed"


async def test_a_call_that_others_need_survives_a_kill_behind_it(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.001) as desk:
        nodes = [
            say("llm", "L"),
            expr("part", {"slice": [var("llm"), 0, 1]}),
            {"id": "k", "op": "kill", "targets": ["part"], "when": True},
            expr("end", {"concat": [var("llm"), "!"]}),
        ]
        program = await desk.submit(nodes, outputs=["end"])
        assert await program.value("end") == answer("L") + "!"
        assert phases(await program.end())["part"] == "killed"


async def test_a_later_output_can_be_killed_without_the_earlier_one(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.002) as desk:
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
        program = await desk.submit(nodes, outputs=["end"])
        assert await program.value("end") == [answer("A")[:30], "gone"]
        assert phases(await program.end())["p"] == "killed"


async def test_a_kill_ends_a_job_with_all_that_is_in_its_bodies(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.01) as desk:
        nodes = [
            map_(
                [1, 2],
                say("s", read("x"), writes="o", ignore_eos=True),
                collect={"a": "o"},
                job="side",
            ),
            client("go", "go"),
            {"id": "k", "op": "kill", "targets": ["side"], "when": var("go")},
            expr("end", {"first": [var("a"), "gone"]}),
        ]
        program = await desk.submit(nodes, outputs=["end"])
        await program.event("node.started", node="s.1")
        asked = await program.event("client.requested")
        await program.put("go", True, asked.data["request_id"])
        assert await program.value("end") == "gone"
        status = phases(await program.end())
        assert [status[name] for name in ("m", "s.0", "s.1")] == ["killed"] * 3
        assert await desk.num_held() == [(0, 0)]


# --- try and yield --------------------------------------------------------------------------


def try_(*body: Json, handlers: list[Json], **fields: Json) -> Json:
    return {"id": "t", "op": "try", "body": list(body), "handlers": handlers, **fields}


async def test_a_failure_chooses_the_handler_of_its_code(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        node = try_(
            expr("bad", {"parse_json": "{"}, "o"),
            handlers=[
                {"codes": ["expr.type"], "body": [say("wrong", "W", writes="w")]},
                {"codes": ["expr.json"], "body": [say("right", "R", writes="r")]},
            ],
            merge={"out": ["o", "w", "r"]},
        )
        program = await desk.submit([node], outputs=["out"])
        assert await program.value("out") == answer("R")
        status = await program.end()
        assert phases(status) == {"t": "done", "bad": "failed", "wrong": "skipped", "right": "done"}
        assert status.variables["t.handler"].value == 1


async def test_a_body_runs_again_before_a_handler_does(tmp_path: Path) -> None:
    tried: list[int] = []

    def flaky() -> int:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError
        return len(tried)

    async with desk_of(tmp_path, {"flaky": flaky}) as desk:
        node = try_(
            call("f", "flaky", "o"),
            handlers=[{"body": [expr("h", "handled", "h")]}],
            merge={"out": ["o", "h"]},
            retries=2,
        )
        program = await desk.submit([node], outputs=["out"])
        assert await program.value("out") == 3
        status = phases(await program.end())
        assert status == {
            "t": "done",
            "f": "failed",
            "f.r1": "failed",
            "f.r2": "done",
            "h": "skipped",
        }


async def test_a_failure_that_no_handler_takes_fails_what_is_around(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        node = try_(
            expr("bad", {"parse_json": "{"}, "o"),
            handlers=[{"codes": ["expr.type"], "body": [expr("h", 1, "h")]}],
            merge={"out": ["o", "h"]},
        )
        status = await (await desk.submit([node], outputs=["out"])).end()
        assert status.error
        assert (status.status, status.error.code) == ("failed", "expr.json")


async def test_a_yield_is_told_in_an_event(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [
            say("s", "S"),
            {"id": "y", "op": "yield", "value": {"object": {"said": var("s")}}},
        ]
        program = await desk.submit(nodes, outputs=["s"])
        await program.end()
        (told,) = [e.data for e in await program.events() if e.type == "yield"]
        assert (told["value"], told["mode"], told["final"]) == (
            {"said": answer("S")},
            "value",
            True,
        )
        assert told["node"] == "y"


async def test_a_yield_tells_of_a_text_while_it_grows(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.01) as desk:
        value = {"object": {"so_far": {"partial": "s"}, "is_end": {"final": "s"}}}
        nodes = [
            say("s", "S"),
            {"id": "y", "op": "yield", "value": value, "mode": "partial"},
            {"id": "d", "op": "yield", "value": var("s"), "mode": "delta"},
        ]
        program = await desk.submit(nodes, outputs=["s"])
        told = [e async for e in program.read() if e.type == "yield"]
        partial = [e for e in told if e.data["node"] == "y"]
        *growing, last = [e.data["value"] for e in partial]
        assert len(growing) > 2
        assert not any(each["is_end"] for each in growing)
        texts = [each["so_far"] for each in growing]
        assert texts == sorted(texts, key=len)
        assert all(answer("S").startswith(text) for text in texts)
        assert last == {"so_far": answer("S"), "is_end": True}
        *pieces, whole = [e for e in told if e.data["node"] == "d"]
        assert answer("S").startswith("".join(e.data["value"] for e in pieces))
        assert len(pieces) > 2
        assert whole.data["value"] == answer("S")
        assert {e.seq is None for e in (*pieces, *partial[:-1])} == {True}, "only the last is kept"
        assert [e.data["final"] for e in await program.events() if e.type == "yield"] == [True] * 2


async def test_a_yield_may_say_which_item_it_speaks_of(tmp_path: Path) -> None:
    """Items, indices and what a loop carries are whole, so `partial` of them is their value."""
    async with desk_of(tmp_path, time_per_output_token=0.005) as desk:
        value = [{"partial": "x"}, {"final": "x"}, {"partial": "i"}, {"partial": "s"}]
        in_map = {"id": "y", "op": "yield", "value": value, "mode": "partial"}
        carried = [{"partial": "r"}, {"final": "r"}, {"partial": "t"}]
        in_loop = {"id": "z", "op": "yield", "value": carried, "mode": "partial"}
        nodes = [
            map_("docs", say("s", "S ", read("x")), in_map, index="i"),
            loop(say("t", "T ", read("r")), in_loop, count=2, carry={"r": ["a", var("t")]}),
        ]
        program = await desk.submit(nodes, inputs={"docs": ["one", "two"]}, outputs=["r"])
        told = [e async for e in program.read() if e.type == "yield"]
        assert (await program.status()).status == "done"
        last = {e.data["node"]: e.data["value"] for e in told if e.seq is not None}
        first = answer("T a")
        assert last == {
            "y.0": ["one", True, 0, answer("S one")],
            "y.1": ["two", True, 1, answer("S two")],
            "z.0": ["a", True, first],
            "z.1": [first, True, answer(f"T {first}")],
        }
        growing = [e.data["value"] for e in told if e.seq is None and e.data["node"] == "y.1"]
        assert len(growing) > 2
        assert all(each[:3] == ["two", True, 1] for each in growing)


async def test_a_yield_says_nothing_before_its_turn(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.005) as desk:
        nodes = [
            say("s", "S"),
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
        program = await desk.submit(nodes, outputs=["s"])
        await program.value("s")
        asked = await program.event("client.requested")
        reading = program.read()
        seen = [event async for event in _until(reading, "client.requested")]
        assert not [event for event in seen if event.type == "yield"]
        await program.put("late", 1, asked.data["request_id"])
        await program.end()
        told = [e.data for e in await program.events() if e.type == "yield"]
        assert [(each["node"], each["value"]) for each in told] == [("y", answer("S"))]


async def _until(
    reading: AsyncGenerator[Event, None], event_type: str
) -> AsyncGenerator[Event, None]:
    async for event in reading:
        yield event
        if event.type == event_type:
            await reading.aclose()
            return


async def test_what_was_asked_for_brings_its_bodies_along(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        nodes = [
            map_([1, 2], expr("e", var("x"), "o"), collect={"a": "o"}),
            if_(True, [expr("t", var("a"), "y")], [], out=["y", "a"]),
            expr("other", 1),
        ]
        program = await desk.submit(nodes, outputs=["out"], start="demand")
        assert (await program.status()).nodes["m"].status == "waiting"
        assert await program.value("out") == [1, 2]
        assert (await program.end()).nodes["other"].status != "done"


async def test_a_session_grows_by_nodes_with_bodies(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        program = await desk.submit([], open=True)
        await program.append(nodes=[map_([1, 2], expr("e", var("x"), "o"), collect={"a": "o"})])
        assert await program.value("a") == [1, 2]
        again = await program.append(
            nodes=[expr("sum", {"len": var("a")})], outputs=["sum"], close=True
        )
        assert again.nodes.keys() == {"sum"}
        assert await program.value("sum") == 2
        await program.end()


async def test_a_failed_item_of_a_session_fails_its_map_and_nothing_else(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        bad = map_(["{"], expr("p", {"parse_json": var("x")}, "o"), collect={"a": "o"})
        program = await desk.submit([bad], open=True)
        found = await program.get("a")
        assert found.error
        assert (found.status, found.error.code) == ("failed", "expr.json")
        await program.append(nodes=[expr("b", 1)], outputs=["b"], close=True)
        assert await program.value("b") == 1
        assert (await program.end()).status == "done"


async def test_the_critical_path_goes_through_bodies(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.002) as desk:
        nodes = [
            say("pre", "P"),
            map_(
                {"split": [var("pre"), " "]},
                say("s", read("x"), writes="o"),
                say("t", read("o"), writes="p", max_tokens=3),
                collect={"all": "p"},
            ),
            loop(
                say("q", read("r"), writes="u", max_tokens=5),
                count=2,
                carry={"r": [{"join": [var("all"), ""]}, var("u")]},
            ),
            say("end", read("r")),
        ]
        program = await desk.submit(nodes, outputs=["end"])
        receipt = (await program.end()).receipt
        assert receipt
        path = [name for name in receipt.critical_path if not name.startswith(("s.", "t."))]
        assert path == ["pre", "m", "q.0", "l.0", "q.1", "l.1", "l", "end"]
        slowest = [name for name in receipt.critical_path if name not in path]
        assert [name[0] for name in slowest] == ["s", "t"]
        assert slowest[0][1:] == slowest[1][1:], "of one item"
        assert 0 < receipt.critical_path_s <= receipt.wall_s


async def test_instances_of_a_program_are_given_up_with_it(tmp_path: Path) -> None:
    async with desk_of(tmp_path, time_per_output_token=0.01) as desk:
        body = say(
            "s", "the same beginning for all of them ", read("x"), writes="o", ignore_eos=True
        )
        nodes = [map_({"range": [40]}, body, collect={"a": "o"})]
        program: Program = await desk.submit(nodes, outputs=["a"])
        await program.event("node.started")
        status = await program.cancel()
        assert status.status == "cancelled"
        assert {node.status for node in status.nodes.values()} == {"cancelled"}
        assert await desk.num_held() == [(0, 0)]
        assert desk.executor.room.num_calls == 0


# --- what ends in the middle of itself --------------------------------------------------------


async def test_a_body_may_kill_the_node_around_it(tmp_path: Path) -> None:
    """The first hit ends the map."""
    async with desk_of(tmp_path) as desk:
        kill = {"id": "k", "op": "kill", "targets": ["ys"], "after": ["e"]}
        inner = map_([1, 2], expr("e", var("x"), "y"), kill, collect={"ys": "y"})
        alone = await desk.submit([inner], outputs=["ys"])
        assert phases(await alone.end())["m"] == "killed"
        branch = if_(1, [inner], [expr("o", 1, "one")], z=["ys", "one"])
        nested = await desk.submit([branch], outputs=["z"])
        assert phases(await nested.end())["m"] == "killed"


@pytest.mark.parametrize("carry", [{"var": "b"}, {"add": [{"var": "b"}, {"var": "n"}]}])
async def test_a_loop_that_carries_what_failed_fails_with_it(tmp_path: Path, carry: Json) -> None:
    async with desk_of(tmp_path) as desk:
        bad = {**expr("bad", {"div": [1, 0]}, "b"), "on_error": "isolate"}
        nodes = [bad, loop(count=3, carry={"n": [0, carry]})]
        status = await (await desk.submit(nodes, outputs=["n"])).end()
        assert status.status == "failed"
        assert phases(status) == {"bad": "failed", "l": "failed", "l.0": "failed"}


async def test_a_round_that_fails_in_an_isolating_job_ends_its_loop(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        step = expr("e", {"add": [var("n"), 1]}, "n2")
        endless = loop(step, max_iter=2, carry={"n": [0, var("n2")]}, until=False, job="j")
        after = expr("z", {"first": [var("n"), "none"]}, "y")
        program = await desk.submit(
            [endless, after], outputs=["y"], jobs={"j": {"on_error": "isolate"}}
        )
        status = await program.end()
        assert phases(status)["l"] == "failed"
        assert status.variables["y"].value == "none"
