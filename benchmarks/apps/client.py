"""The client of an application, in two ways: it sends the whole program, or request by request.

Both speak HTTP to one Conure server over a network of a given round trip, half of it before
every request arrives and half before its answer does. Request by request, a client knows its
own graph and sends each call when the answers that it needs are there, as a completion of the
same text; so both ways ask the model the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx

from .scaled import Sent

WAIT_S = 60


class Answer(NamedTuple):
    """What a client got."""

    kind: str
    took_s: float
    texts: dict[str, str]
    """What every call wrote."""


class Client:
    """A client of one server."""

    def __init__(self, http: httpx.AsyncClient, *, whole: bool, round_trip_s: float) -> None:
        self._http = http
        self._whole = whole
        self._half_s = round_trip_s / 2

    async def run(self, sent: Sequence[Sent], seed: str) -> list[Answer]:
        """Send programs at their times; their texts are drawn from the seed."""
        return await asyncio.gather(
            *(self._run_at(each, f"{seed} {number}") for number, each in enumerate(sent))
        )

    async def _run_at(self, sent: Sent, seed: str) -> Answer:
        # A system prompt is the same for all its users: what they say follows from its name.
        program = sent.plan.written(seed.partition(" ")[0])
        await asyncio.sleep(sent.at_s)
        began = time.perf_counter()
        texts = await (self._send_whole(program) if self._whole else self._send_calls(program))
        return Answer(sent.kind, time.perf_counter() - began, texts)

    async def _ask(self, method: str, path: str, **content: Any) -> Any:
        await asyncio.sleep(self._half_s)
        response = await self._http.request(method, path, **content)
        if response.is_error:
            raise RuntimeError(response.text)
        await asyncio.sleep(self._half_s)
        return response.json()

    # --- whole ----------------------------------------------------------------------------

    async def _send_whole(self, program: dict[str, Any]) -> dict[str, str]:
        accepted = await self._ask("POST", "/v1/programs", json={"program": program})
        url = accepted["url"]
        await asyncio.gather(*(self._get(url, name) for name in program["outputs"]))
        return {}

    async def _get(self, url: str, name: str) -> str:
        found = await self._ask("GET", f"{url}/variables/{name}", params={"wait_s": WAIT_S})
        if found["status"] != "done":
            raise RuntimeError(f"{name}: {found}")
        text: str = found["value"]
        return text

    # --- request by request ---------------------------------------------------------------

    async def _send_calls(self, program: dict[str, Any]) -> dict[str, str]:
        tasks: dict[str, asyncio.Task[str]] = {}
        for node in program["nodes"]:
            tasks[node["id"]] = asyncio.create_task(self._call(node, tasks))
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))

    async def _call(self, node: dict[str, Any], tasks: dict[str, asyncio.Task[str]]) -> str:
        """A call is written behind those it reads: its node's id is its variable's name."""
        for other in node.get("after", ()):
            await tasks[other]
        *segments, output = node["prompt"]
        texts = [
            segment["text"] if "text" in segment else await tasks[segment["input"]]
            for segment in segments
        ]
        body = {
            "model": "default",
            "prompt": "".join(texts),
            "max_tokens": output["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await self._ask("POST", "/v1/completions", json=body)
        text: str = answer["choices"][0]["text"]
        return text
