"""A server without HTTP: an executor on the fake engine, and short words for using it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from conure.engine.fake import default_text
from conure.server.config import Config
from conure.server.executor import Executor
from conure.server.program.ir import Append, Submission
from conure.server.program.status import Event, ProgramStatus, PutValue, VariableStatus
from conure.server.store.writer import Batch

TENANT = "t"
WAIT_S = 20.0
"""Longer than anything here takes; whoever waits that long has failed."""

Json = Any


class Desk:
    """One tenant's way to an executor."""

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
        key: str | None = None,
        open: bool = False,  # noqa: A002 - the wire's word
        **options: Json,
    ) -> Program:
        """Submit a program; inputs are declared by themselves."""
        declared: dict[str, Json] = {name: {} for name in inputs or {}}
        body = {
            "program": {
                "variables": declared | dict(variables or {}),
                "nodes": nodes,
                "outputs": outputs or [],
                "jobs": dict(jobs or {}),
            },
            "inputs": dict(inputs or {}),
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

    async def num_held(self) -> list[tuple[int, int]]:
        """Blocks held and contexts, by every engine's own count."""
        infos = await self.executor.engines()
        return [(info.report.num_held, info.report.num_contexts) for info in infos]


class Program:
    """A submitted program."""

    def __init__(self, desk: Desk, program: str) -> None:
        self.id = program
        self.desk = desk
        self._executor = desk.executor
        self._tenant = desk.tenant

    async def get(self, variable: str, wait_s: float = WAIT_S) -> VariableStatus:
        return await self._executor.get(self.id, variable, tenant=self._tenant, wait_s=wait_s)

    async def value(self, variable: str) -> Json:
        """The value of a variable that gets one."""
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

    async def append(self, **append: Json) -> ProgramStatus:
        raw = msgspec.json.encode(append)
        return await self._executor.append(
            self.id, msgspec.json.decode(raw, type=Append), body=raw, tenant=self._tenant
        )

    async def cancel(self) -> ProgramStatus:
        return await self._executor.cancel(self.id, tenant=self._tenant)

    async def status(self) -> ProgramStatus:
        return await self._executor.status(self.id, tenant=self._tenant)

    def read(self, after: int = 0) -> AsyncGenerator[Event, None]:
        return self._executor.events(self.id, tenant=self._tenant, after=after)

    async def events(self, after: int = 0) -> list[Event]:
        """All journaled events to the end of the program."""
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

    async def end(self) -> ProgramStatus:
        """Wait for the end; nothing of the program may be left anywhere."""
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


class Disk:
    """Stands between an executor and its disk: what comes is held until `let_through`."""

    def __init__(self, desk: Desk) -> None:
        self.batches: list[Batch] = []
        self.came = asyncio.Event()
        self._writer = desk.executor.journal._writer
        self._put = self._writer.put
        setattr(self._writer, "put", self._hold)  # noqa: B010 - mypy forbids the plain one

    def _hold(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.came.set()

    def let_through(self) -> None:
        setattr(self._writer, "put", self._put)  # noqa: B010
        for batch in self.batches:
            self._put(batch)


@contextlib.asynccontextmanager
async def desk_of(
    data: Path, functions: Mapping[str, Callable[..., Any]] | None = None, **settings: Any
) -> AsyncIterator[Desk]:
    """An executor on the fake engine, from start to stop."""
    config = Config(**{"data": data, "engine": "fake", **settings})
    executor = Executor(config, functions=functions)
    await executor.start()
    try:
        yield Desk(executor)
    finally:
        await executor.stop()


def say(node: str, *parts: Json, writes: str | None = None, **fields: Json) -> Json:
    """A call on a `prompt`: strings are text, `{...}` as they are; one output at the end.

    Sampling fields go to the output, everything else to the node.
    """
    known = {"after", "when", "timeout_s", "retries", "priority", "on_error", "job", "meta"}
    common = {name: value for name, value in fields.items() if name in known}
    sampling = {name: value for name, value in fields.items() if name not in known}
    segments: list[Json] = [{"text": part} if isinstance(part, str) else part for part in parts]
    segments.append({"output": writes or node, "max_tokens": 64, **sampling})
    return {"id": node, "op": "generate", "prompt": segments, **common}


def read(variable: str) -> Json:
    """A segment that inserts a variable."""
    return {"input": variable}


def var(variable: str) -> Json:
    """An expression that is a variable."""
    return {"var": variable}


def client(node: str, writes: str, /, name: str = "step", **fields: Json) -> Json:
    return {"id": node, "op": "client", "name": name, "output": writes, **fields}


def expr(node: str, expression: Json, writes: str | None = None, **fields: Json) -> Json:
    return {"id": node, "op": "expr", "expr": expression, "output": writes or node, **fields}


def call(node: str, function: str, writes: str | None = None, **fields: Json) -> Json:
    return {"id": node, "op": "call", "function": function, "output": writes or node, **fields}


def answer(prompt: str) -> str:
    """What the fake engine says to a prompt, whatever happened on the way."""
    return default_text(list(prompt.encode()))
