"""`try` and `yield`: handlers, retries, final and partial values."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from conure.server.program.status import Event
from conure.server.runtime.quota import QuotaLimits

from ...inprocess import Program, answer, call, client, expr, generate, insert, server_harness, var
from .control_nodes import if_, loop, map_, phases

Json = Any


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


async def test_a_handler_that_exceeds_a_quota_ends_the_program(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        value = "a" * 98
        harness.executor.services.quota_limits = QuotaLimits(live_bytes=len(value) + 2)
        node = try_(
            expr("full", value, "x"),
            expr("bad", {"parse_json": "{"}, "o", after=["full"]),
            handlers=[{"body": [expr("h", 1, "h")]}],
        )
        program = await harness.submit([node])
        status = await program.end()
    assert status.error
    assert (status.status, status.error.code) == ("failed", "quota.live_bytes")


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
    async with server_harness(tmp_path, time_per_output_token=0.05) as harness:
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
        assert growing
        assert not any(each["is_end"] for each in growing)
        texts = [each["so_far"] for each in growing]
        assert texts == sorted(texts, key=len)
        assert all(answer("S").startswith(text) for text in texts)
        assert last == {"so_far": answer("S"), "is_end": True}
        *pieces, whole = [e for e in reported if e.data["node"] == "d"]
        assert answer("S").startswith("".join(e.data["value"] for e in pieces))
        assert pieces
        assert whole.data["value"] == answer("S")
        assert all(e.seq is None for e in (*pieces, *partial[:-1])), "only the last is kept"
        assert [e.data["final"] for e in await program.events() if e.type == "yield"] == [True] * 2


async def test_yield_can_include_the_item_index(tmp_path: Path) -> None:
    """Items, indices and carried variables are complete, so `partial` gives their value."""
    async with server_harness(tmp_path, time_per_output_token=0.03) as harness:
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
        assert growing
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
