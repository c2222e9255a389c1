"""kill -9 in the middle of a map, a loop and a race: what was decided stays decided.

In every life of the server the model says something else, so a call that ran although its value
was on disk, or a decision that was taken twice, would show.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..inprocess import expr, read, say, var
from .driver import Server, _read_events
from .ledger import Heard

Json = Any

NUM_ITEMS = 16
NUM_ROUNDS = 8


def program() -> list[Json]:
    """All three at once, and all of them again inside of a map."""
    return [
        *parts(""),
        {
            "id": "outer",
            "op": "map",
            "items": [1, 2],
            "as": "number",
            "body": parts("_in"),
            "collect": {"winners": "winner_in"},
        },
        expr("end", [var("sums"), var("text"), var("winner"), var("winners")]),
    ]


def parts(tag: str) -> list[Json]:
    """A map of calls, a loop of calls, and a race of two calls behind the loop's first round."""
    a, b = f"a{tag}", f"b{tag}"
    return [
        {
            "id": f"m{tag}",
            "op": "map",
            "items": {"range": [NUM_ITEMS]},
            "as": f"x{tag}",
            "body": [say(f"sum{tag}", "Sum up ", read(f"x{tag}"), max_tokens=12)],
            "collect": {f"sums{tag}": f"sum{tag}"},
        },
        {
            "id": f"l{tag}",
            "op": "loop",
            "count": NUM_ROUNDS,
            "carry": {f"text{tag}": ["", {"concat": [var(f"text{tag}"), "/", var(f"step{tag}")]}]},
            "body": [say(f"step{tag}", "Go on: ", read(f"text{tag}"), max_tokens=6)],
        },
        say(a, "Race one", max_tokens=60, ignore_eos=True),
        say(b, "Race two", max_tokens=60, ignore_eos=True),
        {"id": f"w{tag}", "op": "wait", "variables": [a, b], "mode": "any"},
        {"id": f"k{tag}", "op": "kill", "targets": [a, b], "after": [f"w{tag}"]},
        expr(f"winner{tag}", {"first": [var(a), var(b)]}, after=[f"k{tag}"]),
    ]


def script_of(folder: Path, life: int) -> Path:
    """What the model says in one life of the server."""
    script = folder / f"script-{life}.json"
    script.write_text(json.dumps([{"match": "", "text": f"{life} " * 40}]))
    return script


async def history_of(http: httpx.AsyncClient, id_: str) -> AsyncIterator[Heard]:
    """The events of the program up to now or its end, whichever comes first."""
    try:
        async with http.stream("GET", f"/v1/programs/{id_}/events") as response:
            async for event in _read_events(response.aiter_lines()):
                yield event
    except httpx.TransportError:
        return


@pytest.mark.timeout(120)
async def test_decisions_survive_kills_in_their_middle(tmp_path: Path) -> None:
    def arguments(life: int) -> list[str]:
        script = str(script_of(tmp_path, life))
        fake = ["--engine", "fake", "--script", script, "--time-per-output-token", "0.003"]
        return [*fake, "--max-sequences", "8"]

    rng = random.Random(5)
    async with (
        Server(tmp_path, arguments=arguments) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        await server.spawn()
        await server.wait_ready()
        body = {"program": {"nodes": program(), "outputs": ["end"]}}
        id_ = (await http.post("/v1/programs", json=body)).json()["id"]
        num_committed: list[int] = []
        for _ in range(5):
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            told = (await http.get(f"/v1/programs/{id_}")).json()
            num_committed.append(
                sum(each["status"] == "done" for each in told["variables"].values())
            )
            await server.kill()
            await server.spawn()
            await server.wait_ready()
        history = [event async for event in history_of(http, id_)]
        status = (await http.get(f"/v1/programs/{id_}")).json()
    assert status["status"] == "done", status.get("error")
    assert status["receipt"]["blocks_held"] == 0
    assert len(set(num_committed)) >= 3, "it was killed in its middle"
    check(history, status)


def check(history: list[Heard], status: Json) -> None:
    """One value for each variable, one decision for each question, nothing run for nothing."""
    assert history[-1].type == "program.finished"
    committed: dict[str, Json] = {}
    makers: set[str] = set()
    for event in history:
        if event.type == "variable.committed":
            assert event.data["variable"] not in committed
            committed[event.data["variable"]] = event.data["value"]
            makers.add(event.data["node"])
        elif event.type in ("node.queued", "node.started", "node.restarted"):
            assert event.data["node"] not in makers, event
    appended = Counter(
        name for event in history if event.type == "nodes.appended" for name in event.data["nodes"]
    )
    assert set(appended.values()) == {1}, "what had come did not come again"
    lives = {
        str(value)[:1] for name, value in committed.items() if name.startswith(("sum", "step"))
    }
    assert len(lives) >= 3, "several lives had their say"
    for tag in ("", "_in.0", "_in.1"):
        base, _, index = tag.partition(".")
        suffix = f".{index}" if index else ""
        racers = [f"a{base}{suffix}", f"b{base}{suffix}"]
        won = [name for name in racers if name in committed]
        assert committed[f"winner{base}{suffix}"] == committed[won[0]]
        ends = [
            event.type
            for event in history
            for name in racers
            if event.data.get("node") == name and event.type in ("node.killed", "node.finished")
        ]
        assert sorted(ends) == (
            ["node.finished", "node.killed"] if len(won) == 1 else ["node.finished"] * 2
        )
        text = ""
        for number in range(NUM_ROUNDS):
            assert committed[f"text{base}{suffix}.{number}"] == text
            text += "/" + committed[f"step{base}{suffix}.{number}"]
        assert committed[f"text{base}{suffix}"] == text
        sums = [committed[f"sum{base}{suffix}.{number}"] for number in range(NUM_ITEMS)]
        assert committed[f"sums{base}{suffix}"] == sums
