"""The systems that serve the cases: processes that answer lines, and HTTP servers.

An answer with a missing token is an error, never a figure.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx

from .cases import RequestBatch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class CaseRun(NamedTuple):
    """One case, served once."""

    seconds: float
    """From the first request to the last token."""
    first_s: list[float]
    """Time to the first token of each request; empty if it cannot be observed."""
    ids: list[list[int]]
    """Tokens of each request; empty if only text is known."""


class SystemFailedError(RuntimeError):
    """A system did not start, or its answer is incomplete."""


class System(Protocol):
    """A system that serves cases."""

    name: str

    def ask(self, case: RequestBatch) -> CaseRun:
        """Serve a case; all requests arrive at once."""
        ...

    def close(self) -> None:
        """Stop the system if this object started it."""
        ...


class Process:
    """A script that answers lines, see `ours.py`."""

    def __init__(self, name: str, python: str, script: str, model: Path, threads: int) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if script == "ours.py":
            environment["PYTHONPATH"] = str(ROOT)
        self._process = subprocess.Popen(
            [python, str(HERE / script), str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._wait("READY")

    def ask(self, case: RequestBatch) -> CaseRun:
        """Serve a case in process, where the time of the first token cannot be observed."""
        question = {"prompts": case.prompts, "max_tokens": case.max_tokens}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._wait("RESULT"))
        if any(len(ids) != case.max_tokens for ids in found["ids"]):
            raise SystemFailedError(f"{self.name}: an answer lacks tokens")
        return CaseRun(found["seconds"], [], found["ids"])

    def close(self) -> None:
        """Close the input of the process, which ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _wait(self, tag: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(tag):
                return line[len(tag) :]
        raise SystemFailedError(f"{self.name} ended with code {self._process.wait()}")


class Server:
    """An OpenAI-compatible server that streams text completions."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url.rstrip("/")
        found = httpx.get(f"{self._url}/v1/models", timeout=30).raise_for_status().json()
        self._model = found["data"][0]["id"]

    def ask(self, case: RequestBatch) -> CaseRun:
        """Serve a case over HTTP, with one connection per request."""
        return asyncio.run(self._ask(case))

    def close(self) -> None:
        """Do nothing; the server was started elsewhere."""

    async def _ask(self, case: RequestBatch) -> CaseRun:
        begin = time.perf_counter()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            firsts = await asyncio.gather(
                *(self._stream(client, prompt, case.max_tokens) for prompt in case.prompts)
            )
        seconds = time.perf_counter() - begin
        return CaseRun(seconds, [first - begin for first in firsts], [])

    async def _stream(self, client: httpx.AsyncClient, prompt: list[int], num: int) -> float:
        """Return the time of the first text."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": bytes(prompt).decode("ascii"),
            "max_tokens": num,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first, usage = 0.0, 0
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            if answer.is_error:
                raise SystemFailedError(f"{self.name}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if not first and chunk["choices"] and chunk["choices"][0]["text"]:
                    first = time.perf_counter()
                usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
        if usage != num:
            raise SystemFailedError(f"{self.name}: {usage} tokens came, {num} were asked for")
        return first or time.perf_counter()
