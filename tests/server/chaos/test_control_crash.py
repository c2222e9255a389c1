"""kill -9 during a map, a loop and a race: decisions are never changed.

Every server process has a model with other outputs, so a repeated call with a durable value, or a
repeated decision, is detected. Every round of a loop waits for an answer of the client, so the
program cannot end before the last process runs, however slow the test is.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..inprocess import client, expr, generate, insert, var
from .driver import Server, read_events
from .ledger import Heard

Json = Any

NUM_ITEMS = 16
NUM_ROUNDS = 12
NUM_LIVES = 6


def program() -> list[Json]:
    """Return all three, and all of them again inside a map."""
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
    """Return a map of calls, a loop of calls that await the client, and a race of calls."""
    a, b = f"a{tag}", f"b{tag}"
    return [
        {
            "id": f"m{tag}",
            "op": "map",
            "items": {"range": [NUM_ITEMS]},
            "as": f"x{tag}",
            "body": [generate(f"sum{tag}", "Sum up ", insert(f"x{tag}"), max_tokens=12)],
            "collect": {f"sums{tag}": f"sum{tag}"},
        },
        {
            "id": f"l{tag}",
            "op": "loop",
            "count": NUM_ROUNDS,
            "carry": {f"text{tag}": ["", {"concat": [var(f"text{tag}"), "/", var(f"step{tag}")]}]},
            "body": [
                client(f"ask{tag}", f"go{tag}", args={"text": var(f"text{tag}")}),
                generate(f"step{tag}", "Go on: ", insert(f"go{tag}"), max_tokens=6),
            ],
        },
        generate(a, "Race one", max_tokens=60, ignore_eos=True),
        generate(b, "Race two", max_tokens=60, ignore_eos=True),
        {"id": f"w{tag}", "op": "wait", "variables": [a, b], "mode": "any"},
        {"id": f"k{tag}", "op": "kill", "targets": [a, b], "after": [f"w{tag}"]},
        expr(f"winner{tag}", {"first": [var(a), var(b)]}, after=[f"k{tag}"]),
    ]


def script_of(folder: Path, life: int) -> Path:
    """Return the model's outputs for one server process."""
    script = folder / f"script-{life}.json"
    script.write_text(json.dumps([{"match": "", "text": f"{life} " * 40}]))
    return script


async def history_of(http: httpx.AsyncClient, id_: str) -> AsyncGenerator[Heard, None]:
    """Return the events of the program so far."""
    try:
        async with http.stream("GET", f"/v1/programs/{id_}/events") as response:
            async for event in read_events(response.aiter_lines()):
                yield event
    except httpx.TransportError:
        return


async def play(http: httpx.AsyncClient, id_: str, *, life: int, num_rounds: float) -> list[Heard]:
    """Answer the client steps until so many rounds have a value of this life, or to the end."""
    history: list[Heard] = []
    async with contextlib.aclosing(history_of(http, id_)) as events:
        async for event in events:
            history.append(event)
            if event.type == "client.requested":
                path = f"/v1/programs/{id_}/variables/{event.data['output']}"
                answer = {"value": "go", "request_id": event.data["request_id"]}
                assert (await http.put(path, json=answer)).status_code == 200
            elif event.type == "variable.committed" and event.data["node"].startswith("step"):
                num_rounds -= str(event.data["value"]).startswith(str(life))
                if num_rounds <= 0:
                    break
    return history


@pytest.mark.timeout(600)
async def test_decisions_survive_kills_in_their_middle(tmp_path: Path) -> None:
    def arguments(life: int) -> list[str]:
        script = str(script_of(tmp_path, life))
        fake = ["--engine", "fake", "--script", script, "--time-per-output-token", "0.003"]
        return [*fake, "--max-sequences", "8"]

    rng = random.Random(5)
    async with (
        Server(tmp_path, arguments=arguments) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        await server.spawn()
        await server.wait_ready()
        body = {"program": {"nodes": program(), "outputs": ["end"]}}
        id_ = (await http.post("/v1/programs", json=body)).json()["id"]
        for life in range(NUM_LIVES - 1):
            # Three loops have one round each in flight: fewer than NUM_ROUNDS have a value.
            await play(http, id_, life=life, num_rounds=rng.randint(1, 2))
            await server.kill()
            await server.spawn()
            await server.wait_ready()
        history = await play(http, id_, life=NUM_LIVES, num_rounds=math.inf)
        status = (await http.get(f"/v1/programs/{id_}")).json()
    assert status["status"] == "done", status.get("error")
    assert status["receipt"]["blocks_held"] == 0
    check(history, status)


def check(history: list[Heard], status: Json) -> None:
    """Check one value per variable, one decision per node, and no unnecessary runs."""
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
    assert lives >= {str(life) for life in range(NUM_LIVES - 1)}
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
