"""Sends mutated bodies to all routes that read one, and reads the resulting programs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from .mutations import mutated, seeds

WAITING = "/v1/get"
"""The route that waits without a limit, also for a value that never exists."""
WAIT_S = 0.5
MAX_LIVE = 16
"""Programs that run at once; the oldest one is ended first."""

TEXT: Any = {"type": "text", "text": "u"}
FUNCTION: Any = {"name": "f", "parameters": {"type": "object"}}
CHAT: Any = {
    "model": "default",
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [TEXT]}],
    "max_tokens": 4,
    "temperature": 0.5,
    "stop": ["a"],
    "logit_bias": {"1": 2},
    "n": 1,
    "stream": False,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": FUNCTION}],
}
COMPLETION: Any = {"model": "default", "prompt": "p", "max_tokens": 4, "stop": "x", "logprobs": 1}
RESPONSE: Any = {
    "model": "default",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}],
    "instructions": "i",
    "max_output_tokens": 4,
    "background": False,
    "stream": False,
    "tools": [{"type": "function", **FUNCTION}],
    "text": {"format": {"type": "text"}},
}
JOINED: Any = {"concat": [{"var": "o"}, "x"]}
APPEND: Any = {
    "variables": {"q": {"type": "string"}},
    "nodes": [
        {"id": "n", "op": "generate", "prompt": [{"text": "t"}, {"output": "o", "max_tokens": 2}]},
        {"id": "e", "op": "expr", "expr": JOINED, "output": "p", "after": ["n"]},
    ],
    "inputs": {"q": "v"},
    "outputs": ["p"],
    "objectives": {"p": "latency"},
}
VALUE: Any = {"value": {"a": [1]}}
GRAMMAR: Any = {"constraint": {"json_schema": {"type": "array"}}, "text": "[]"}
TOKENIZE: Any = {"messages": [{"role": "user", "content": [TEXT]}], "tools": [], "model": "default"}
PROCEDURE: Any = {
    "program": {
        "variables": {"x": {"type": "string"}},
        "nodes": [
            {"id": "e", "op": "expr", "expr": {"concat": [{"var": "x"}, "!"]}, "output": "y"}
        ],
        "outputs": ["y"],
    },
    "alias": "prod",
}
RUN: Any = {"inputs": {"x": "v"}, "objectives": {"y": "latency"}, "options": {"trace": True}}
SOURCE: Any = {
    "source": "program(x):\n    a = gen(x, max_tokens=2)\n    return a\n",
    "language": "decoder",
    "inputs": {"x": "v"},
}
SEMANTIC_CALL: Any = {
    "session_id": 0,
    "template": "Tell {{a}} a joke: {{b}}",
    "parameters": [
        {"name": "a", "is_output": False, "value": "me"},
        {"name": "b", "is_output": True, "sampling_config": {"max_gen_length": 2}},
    ],
    "output_criteria": "latency",
}
PLACEHOLDERS: Any = [
    {"name": "a", "in_out": True, "semantic_var_id": "s.a"},
    {"name": "b", "in_out": False, "semantic_var_id": "s.b", "sampling_params": {"max_tokens": 2}},
]
SUBMIT: Any = {"prompt": "Tell {{a}}: {{b}}", "placeholders": PLACEHOLDERS, "session_id": "s"}
SET: Any = {"semantic_var_id": "s.a", "content": "me", "session_id": "s"}
GET: Any = {"semantic_var_id": "s.b", "criteria": "latency", "session_id": "s"}
OTHERS: Any = [CHAT, RESPONSE, APPEND, VALUE, PROCEDURE, RUN, SEMANTIC_CALL, SUBMIT]


class Fuzzer:
    """Sends mutated bodies, and checks every response and the end of every program."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.num_bodies = 0
        self.statuses: Counter[str] = Counter()
        """Responses by route and status."""
        self._client = client
        self._rng = random.Random(seed)
        self._seeds = seeds()
        self._live: list[str] = []
        self._routes: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.44, self._program),
            (0.06, self._source),
            (0.10, self._append),
            (0.10, self._chat),
            (0.06, self._completion),
            (0.08, self._response),
            (0.06, self._procedure),
            (0.05, self._parrot),
            (0.05, self._other),
        ]

    async def run(self, num_bodies: int) -> None:
        """Send bodies, and let all programs end."""
        weights = [weight for weight, _ in self._routes]
        while self.num_bodies < num_bodies:
            [(_, send)] = self._rng.choices(self._routes, weights)
            await send()
            if len(self._live) > MAX_LIVE:
                await self._end(self._live.pop(0))
        for url in self._live:
            await self._end(url)
        await self._read("/v1/activity", "/readyz")

    # --- requests -------------------------------------------------------------------------

    async def _send(self, method: str, url: str, kind: Any, **fixed: Any) -> httpx.Response | None:
        """Send a mutated body with `fixed` fields; return None if `WAITING` has not answered."""
        body = mutated(kind, self._rng, others=[*OTHERS, *self._seeds])
        if isinstance(body, dict):
            body |= fixed
        self.num_bodies += 1
        try:
            async with asyncio.timeout(WAIT_S if url == WAITING else None):
                answer = await self._client.request(method, url, json=body)
        except TimeoutError:
            self.statuses[f"{method} {url} waits"] += 1
            return None
        self._check(answer)
        return answer

    def _check(self, answer: httpx.Response) -> None:
        request = answer.request
        [route] = request.url.path.split("/")[2:3] or [""]
        self.statuses[f"{request.method} {route} {answer.status_code}"] += 1
        is_allowed = answer.status_code < 500 or answer.status_code == 503
        assert is_allowed, (answer.text, str(request.url), request.content)

    async def _read(self, *urls: str) -> None:
        for url in urls:
            self._check(await self._client.get(url))

    def _started(self, answer: httpx.Response | None) -> None:
        if answer is not None and answer.status_code == 202:
            self._live.append(answer.json()["url"])

    async def _end(self, url: str) -> None:
        """Cancel a program if it still runs, and check that it ends without an internal error."""
        self._check(await self._client.delete(url))
        events = await self._client.get(f"{url}/events")
        assert "program.finished" in events.text, events.text
        assert "server.internal" not in events.text, events.text
        if self._rng.random() < 0.1:
            await self._read(f"{url}/explain", f"{url}/trace")
            self._check(await self._client.delete(f"{url}/content"))

    # --- routes ---------------------------------------------------------------------------

    async def _program(self) -> None:
        url = "/v1/programs/explain" if self._rng.random() < 0.05 else "/v1/programs"
        self._started(await self._send("POST", url, self._rng.choice(self._seeds)))

    async def _source(self) -> None:
        self._started(await self._send("POST", "/v1/programs", SOURCE))

    async def _append(self) -> None:
        opened = await self._client.post("/v1/programs", json={"program": {}, "open": True})
        self._check(opened)
        if opened.status_code == 503:
            return
        url = opened.json()["url"]
        self._live.append(url)
        await self._send("POST", f"{url}/nodes", APPEND)
        await self._send("PUT", f"{url}/variables/q", VALUE)

    async def _chat(self) -> None:
        await self._send("POST", "/v1/chat/completions", CHAT)

    async def _completion(self) -> None:
        await self._send("POST", "/v1/completions", COMPLETION)

    async def _response(self) -> None:
        answer = await self._send("POST", "/v1/responses", RESPONSE)
        if answer is None or answer.status_code != 200 or not answer.text.startswith("{"):
            return  # refused, or a stream
        url = f"/v1/responses/{answer.json()['id']}"
        await self._read(url, f"{url}/input_items")
        self._check(await self._client.delete(url))

    async def _procedure(self) -> None:
        name = self._rng.choice(("p", "q"))
        answer = await self._send("PUT", f"/v1/procedures/{name}", PROCEDURE)
        if answer is not None and answer.status_code == 200:
            alias = {"version": answer.json().get("version", "")}
            await self._send("PUT", f"/v1/procedures/{name}/aliases/x", alias)
        self._started(await self._send("POST", f"/v1/procedures/{name}/run", RUN))

    async def _parrot(self) -> None:
        opened = await self._client.post("/v1/session", json={})
        self._check(opened)
        if opened.status_code == 503:
            return
        number = opened.json()["session_id"]
        await self._send("POST", "/v1/semantic_call", SEMANTIC_CALL, session_id=number)
        self._check(await self._client.delete(f"/v1/session/{number}"))

    async def _other(self) -> None:
        url, kind = self._rng.choice(
            (
                ("/v1/grammar/check", GRAMMAR),
                ("/v1/tokenize", TOKENIZE),
                ("/v1/submit", SUBMIT),
                ("/v1/set", SET),
                (WAITING, GET),
            )
        )
        await self._send("POST", url, kind)
