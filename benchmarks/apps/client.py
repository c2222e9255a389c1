"""A client that runs applications in one of two ways: as whole programs, or request by request.

Both ways use HTTP to one Conure server, with an added round trip: half before each request and
half before each answer. Request by request, the client has the graph and sends each call as a
completion request when the answers that the call needs have arrived. Both ways send the model
the same text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import httpx

from apps.scaled_workloads import ScheduledProgram
from conure.adapters.client import AsyncClient

WAIT_S = 120.0
"""A whole program that takes longer ends the benchmark."""


class AppAnswer(NamedTuple):
    """The result of one application."""

    kind: str
    took_s: float
    texts: dict[str, str]
    """The texts of its calls; whole programs have those of outputs only."""
    program: str = ""
    """The id of a whole program."""


class AppClient:
    """A client of one server; `http` must stay open while it runs."""

    def __init__(self, http: httpx.AsyncClient, *, whole: bool, round_trip_s: float) -> None:
        self._http = http
        self._whole = whole
        self._half_s = round_trip_s / 2
        self._programs = AsyncClient(str(http.base_url))

    async def __aenter__(self) -> Self:
        """Open the connections, so that no program's time contains the start of a client."""
        for connected in (self._programs.programs(limit=1), self._http.get("/healthz")):
            await connected
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._programs.close()

    async def run(self, sent: Sequence[ScheduledProgram], seed: str) -> list[AppAnswer]:
        """Send programs at their times; their texts are generated from the seed."""
        return await asyncio.gather(
            *(self._run_at(each, f"{seed} {number}") for number, each in enumerate(sent))
        )

    async def _run_at(self, sent: ScheduledProgram, seed: str) -> AppAnswer:
        # All users of a system prompt share its text, so the text depends only on its name.
        program = sent.plan.written(seed.partition(" ")[0])
        await asyncio.sleep(sent.at_s)
        began = time.perf_counter()
        if self._whole:
            program_id, texts = await self._send_whole(program)
            return AppAnswer(sent.kind, time.perf_counter() - began, texts, program_id)
        texts = await self._send_calls(program)
        return AppAnswer(sent.kind, time.perf_counter() - began, texts)

    async def _ask(self, method: str, path: str, **content: Any) -> Any:
        await asyncio.sleep(self._half_s)
        response = await self._http.request(method, path, **content)
        if response.is_error:
            raise RuntimeError(response.text)
        await asyncio.sleep(self._half_s)
        return response.json()

    # --- whole programs -------------------------------------------------------------------

    async def _send_whole(self, program: dict[str, Any]) -> tuple[str, dict[str, str]]:
        """Submit a program; return its id and outputs.

        The reply is the stream of the outputs, so this is one round trip.
        """
        await asyncio.sleep(self._half_s)
        async with asyncio.timeout(WAIT_S):
            run = await self._programs.submit(program, follow=True, types=["variable.committed"])
            values = await run.result()
        await asyncio.sleep(self._half_s)
        return run.id, {name: str(value) for name, value in values.items()}

    # --- request by request ---------------------------------------------------------------

    async def _send_calls(self, program: dict[str, Any]) -> dict[str, str]:
        tasks: dict[str, asyncio.Task[str]] = {}
        for node in program["nodes"]:
            tasks[node["id"]] = asyncio.create_task(self._call(node, tasks))
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))

    async def _call(self, node: dict[str, Any], tasks: dict[str, asyncio.Task[str]]) -> str:
        """Send a call after the calls that it reads; a node and its variable have one name."""
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
