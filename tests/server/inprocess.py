"""A server without HTTP: an executor on the fake engine, and builders of nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from conure.engine.testing.scripted_runner import default_text
from conure.server.config import Config
from conure.server.executor import Executor
from conure.server.program.ir import Append, Options, SourceSubmission, Submission
from conure.server.program.status import Event, ProgramStatus, PutValue, VariableStatus
from conure.server.runtime.reporting.trace_records import TracedCall, TraceRecord
from conure.server.store.writer import WriteBatch

TENANT = "t"
WAIT_S = 60.0
"""Longer than any step of a test takes."""

Json = Any


class ServerHarness:
    """An executor as one tenant uses it."""

    def __init__(self, executor: Executor, tenant: str = TENANT) -> None:
        self.executor = executor
        self.tenant = tenant

    async def submit(
        self,
        nodes: list[Json],
        *,
        outputs: list[str] | None = None,
        variables: Mapping[str, Json] | None = None,
        inputs: Mapping[str, Json] | None = None,
        jobs: Mapping[str, Json] | None = None,
        objectives: Mapping[str, Json] | None = None,
        key: str | None = None,
        id: str | None = None,  # noqa: A002 - the wire's words
        open: bool = False,  # noqa: A002
        **options: Json,
    ) -> Program:
        """Submit a program; inputs are declared automatically."""
        declared: dict[str, Json] = {name: {} for name in inputs or {}}
        body = {
            "id": id,
            "program": {
                "variables": declared | dict(variables or {}),
                "nodes": nodes,
                "outputs": outputs or [],
                "jobs": dict(jobs or {}),
            },
            "inputs": dict(inputs or {}),
            "objectives": dict(objectives or {}),
            "options": options,
            "open": open,
        }
        raw = msgspec.json.encode(body)
        accepted, _ = await self.executor.submit(
            msgspec.json.decode(raw, type=Submission),
            body=raw,
            tenant=self.tenant,
            idempotency_key=key,
        )
        return Program(self, accepted.id)

    async def submit_source(
        self,
        source: str,
        inputs: Mapping[str, Json] | None = None,
        *,
        language: Literal["decoder", "template"] = "decoder",
        key: str | None = None,
        **options: Json,
    ) -> Program:
        """Submit a program as text."""
        submission, body = await self.executor.compile(
            SourceSubmission(
                source=source,
                language=language,
                inputs=dict(inputs or {}),
                options=msgspec.convert(options, Options),
            )
        )
        accepted, _ = await self.executor.submit(
            submission, body=body, tenant=self.tenant, idempotency_key=key
        )
        return Program(self, accepted.id)

    async def num_held(self) -> list[tuple[int, int]]:
        """Return the blocks in use and the contexts, by each engine's own count."""
        infos = await self.executor.engines()
        return [(info.report.num_held, info.report.num_contexts) for info in infos]


class Program:
    """A submitted program."""

    def __init__(self, harness: ServerHarness, program: str) -> None:
        self.id = program
        self.harness = harness
        self._executor = harness.executor
        self._tenant = harness.tenant

    async def get(self, variable: str, wait_s: float = WAIT_S) -> VariableStatus:
        return await self._executor.get(self.id, variable, tenant=self._tenant, wait_s=wait_s)

    async def value(self, variable: str) -> Json:
        """Return the value of a variable that must have one."""
        status = await self.get(variable)
        assert status.status == "done", status
        return status.value

    async def put(self, variable: str, value: Json, request: str | None = None) -> VariableStatus:
        body = PutValue(value=value, request_id=request)
        return await self._executor.put(self.id, variable, body, tenant=self._tenant)

    async def put_error(self, variable: str, code: str, request: str | None = None) -> None:
        error = {"code": code, "message": "no"}
        body = msgspec.convert({"error": error, "request_id": request}, PutValue)
        await self._executor.put(self.id, variable, body, tenant=self._tenant)

    async def append(self, *, wait_s: float = 0.0, **append: Json) -> ProgramStatus:
        raw = msgspec.json.encode(append)
        more = msgspec.json.decode(raw, type=Append)
        return await self._executor.append(
            self.id, more, body=raw, tenant=self._tenant, wait_s=wait_s
        )

    async def cancel(self) -> ProgramStatus:
        await self._executor.cancel(self.id, tenant=self._tenant)
        return await self.status()

    async def status(self) -> ProgramStatus:
        return await self._executor.status(self.id, tenant=self._tenant)

    def read(self, after: int = 0) -> AsyncGenerator[Event, None]:
        return self._executor.events(self.id, tenant=self._tenant, after=after)

    async def events(self, after: int = 0) -> list[Event]:
        """Return all journaled events up to the end of the program."""
        async with asyncio.timeout(WAIT_S):
            return [event async for event in self.read(after) if event.seq is not None]

    async def event(self, *types: str, node: str | None = None, count: int = 1) -> Event:
        """Wait for the n-th event of these types."""
        async with asyncio.timeout(WAIT_S), contextlib.aclosing(self.read()) as events:
            async for event in events:
                if event.type in types and node in (None, event.data.get("node")):
                    count -= 1
                    if count == 0:
                        return event
        raise AssertionError(f"the program ended without {types}")

    async def traced_calls(self) -> list[TracedCall]:
        """Return the outputs of calls in the trace of a program that has ended."""
        journal = self._executor.services.journal
        records = [
            msgspec.json.decode(record.data, type=TraceRecord)
            for record in await journal.events(self._tenant, self.id, limit=10_000, is_trace=True)
        ]
        return [record for record in records if isinstance(record, TracedCall)]

    async def end(self) -> ProgramStatus:
        """Wait for the end, and check that nothing of the program leaks."""
        await self.events()
        status = await self.status()
        receipt = status.receipt
        assert receipt
        assert receipt.blocks_held == 0
        tokens = receipt.prompt_tokens
        shared = tokens.shared
        assert tokens.logical == tokens.computed + (
            shared.static + shared.dynamic + shared.generated + shared.cache
        )
        assert receipt.output_tokens.decoded >= receipt.output_tokens.discarded
        return status


class DelayedJournalWriter:
    """Delays the writes of an executor's journal until `release`."""

    def __init__(self, harness: ServerHarness) -> None:
        self.batches: list[WriteBatch] = []
        self.came = asyncio.Event()
        self._writer = harness.executor.services.journal._writer
        self._put = self._writer.put
        setattr(self._writer, "put", self._hold)  # noqa: B010 - mypy forbids the plain one

    def _hold(self, batch: WriteBatch) -> None:
        self.batches.append(batch)
        self.came.set()

    def release_first(self) -> None:
        """Write the first batch only."""
        self._put(self.batches.pop(0))

    def release(self) -> None:
        setattr(self._writer, "put", self._put)  # noqa: B010
        for batch in self.batches:
            self._put(batch)


@contextlib.asynccontextmanager
async def server_harness(
    data: Path, functions: Mapping[str, Callable[..., Any]] | None = None, **settings: Any
) -> AsyncIterator[ServerHarness]:
    """Start an executor on the fake engine, and stop it at the end.

    The estimated wait of a program has no limit: on a busy machine it would refuse some programs.
    """
    config = Config(**{"data": data, "engine": "fake", "max_wait_s": 0.0, **settings})
    executor = Executor(config, functions=functions)
    await executor.start()
    try:
        yield ServerHarness(executor)
    finally:
        await executor.stop()


def generate(node: str, *parts: Json, writes: str | None = None, **fields: Json) -> Json:
    """Return a generate node: strings become text segments, and an output is added at the end.

    Sampling fields go to the output, everything else to the node.
    """
    known = {"after", "when", "timeout_s", "retries", "priority", "on_error", "job", "meta"}
    common = {name: value for name, value in fields.items() if name in known}
    sampling = {name: value for name, value in fields.items() if name not in known}
    segments: list[Json] = [{"text": part} if isinstance(part, str) else part for part in parts]
    segments.append({"output": writes or node, "max_tokens": 64, **sampling})
    return {"id": node, "op": "generate", "prompt": segments, **common}


def insert(variable: str) -> Json:
    """Return a segment that inserts a variable."""
    return {"input": variable}


def var(variable: str) -> Json:
    """Return an expression that reads a variable."""
    return {"var": variable}


def client(node: str, writes: str, /, name: str = "step", **fields: Json) -> Json:
    return {"id": node, "op": "client", "name": name, "output": writes, **fields}


def expr(node: str, expression: Json, writes: str | None = None, **fields: Json) -> Json:
    return {"id": node, "op": "expr", "expr": expression, "output": writes or node, **fields}


def call(node: str, function: str, writes: str | None = None, **fields: Json) -> Json:
    return {"id": node, "op": "call", "function": function, "output": writes or node, **fields}


def answer(prompt: str) -> str:
    """Return the fake engine's text for a prompt."""
    return default_text(list(prompt.encode()))
