"""Stream thousands of calls, and check that all their resources are released.

    cd benchmarks; python -m cookbook.stream_soak [--calls N] [--out FILE]

LangChain, LlamaIndex and the `openai` package stream answers from one `conure serve --engine fake`,
with blocking calls and with coroutines, plain and (LangChain, LlamaIndex) accelerated. Every tenth
stream is closed after its first piece. Afterwards, with all clients closed, this process must have
as many sockets, threads and tasks as before, and the server as many sockets and open programs.
During the second half of the calls, the number of Python objects may grow by fewer than 2,000,
since caches fill, or by fewer than one per call, whichever is more.

The exit code is 1 if one of these checks fails. Memory of both processes is reported but not
checked, because an allocator keeps freed memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, NamedTuple

import openai

from conure.adapters import langchain, llamaindex
from conure.adapters.client import Client
from temporary_server import TemporaryServer, started

SETTLE_S = 30.0
"""Time limit for the release. The server learns with a delay that a client closed a stream."""
WIDTH = 8
"""Streams at the same time, with coroutines."""
LEFT_EVERY = 10


class Held(NamedTuple):
    """What the processes hold."""

    sockets: int
    threads: int
    tasks: int
    server_sockets: int
    open_programs: int


class Memory(NamedTuple):
    """Memory of both processes."""

    objects: int
    """Python objects of this process that the garbage collector tracks."""
    client_mb: float
    server_mb: float


class Clients:
    """One client of each kind."""

    def __init__(self, url: str) -> None:
        self.conure = Client(url)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.aopenai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.langchain = langchain.ChatConure(client=self.conure, temperature=0)
        self.fast_chain = langchain.accelerate(self.langchain)
        self.llamaindex = llamaindex.Conure(client=self.conure, temperature=0)

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.aopenai.close()
        await self.langchain.async_connection().close()
        await self.llamaindex._clients.aclose()

    def close(self) -> None:
        """Close all other connections."""
        self.openai.close()
        self.conure.close()

    def of_openai(self, prompt: str) -> Iterator[Any]:
        """Stream with the `openai` package."""
        with self.openai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": prompt}], stream=True
        ) as stream:
            yield from stream

    async def of_aopenai(self, prompt: str) -> AsyncIterator[Any]:
        """`of_openai` for coroutines."""
        stream = await self.aopenai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": prompt}], stream=True
        )
        async with stream:
            async for chunk in stream:
                yield chunk

    def of_run(self, prompt: str) -> Iterator[Any]:
        """Stream with LlamaIndex in a run."""
        with llamaindex.conure_run():
            stream = self.llamaindex.stream_complete(prompt)
        with closing(stream):
            yield from stream

    async def of_arun(self, prompt: str) -> AsyncIterator[Any]:
        """`of_run` for coroutines."""
        with llamaindex.conure_run():
            stream: Any = await self.llamaindex.astream_complete(prompt)
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk

    async def of_llamaindex(self, prompt: str) -> AsyncIterator[Any]:
        """Stream with LlamaIndex."""
        stream: Any = await self.llamaindex.astream_complete(prompt)
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk

    def blocking(self) -> dict[str, Callable[[str], Any]]:
        """Return the ways to stream with blocking calls."""
        return {
            "langchain": self.langchain.stream,
            "langchain accelerated": self.fast_chain.stream,
            "llamaindex": self.llamaindex.stream_complete,
            "llamaindex in a run": self.of_run,
            "openai": self.of_openai,
        }

    def awaited(self) -> dict[str, Callable[[str], Any]]:
        """Return the ways to stream with coroutines."""
        return {
            "langchain": self.langchain.astream,
            "langchain accelerated": self.fast_chain.astream,
            "llamaindex": self.of_llamaindex,
            "llamaindex in a run": self.of_arun,
            "openai": self.of_aopenai,
        }


def read(stream: Callable[[str], Any], num_calls: int) -> None:
    """Stream answers one after the other."""
    for number in range(num_calls):
        with closing(stream(f"Call {number}")) as pieces:
            for _ in pieces:
                if number % LEFT_EVERY == 0:
                    break


async def aread(stream: Callable[[str], Any], num_calls: int) -> None:
    """Stream answers, some at the same time."""

    async def some(first: int) -> None:
        for number in range(first, num_calls, WIDTH):
            async with aclosing(stream(f"Call {number}")) as pieces:
                async for _ in pieces:
                    if number % LEFT_EVERY == 0:
                        break

    await asyncio.gather(*map(some, range(WIDTH)))


def held(server: TemporaryServer, client: Client, num_tasks: int) -> Held:
    """Return what the processes hold now."""
    programs = client.programs(status="running")
    return Held(
        _num_sockets("self"),
        threading.active_count(),
        num_tasks,
        _num_sockets(str(server.pid)),
        len(programs.programs),
    )


def memory(server: TemporaryServer) -> Memory:
    """Return the memory after a full collection."""
    gc.collect()
    return Memory(len(gc.get_objects()), _memory_mb("self"), _memory_mb(str(server.pid)))


def _num_sockets(process: str) -> int:
    num_sockets = 0
    for each in Path(f"/proc/{process}/fd").iterdir():
        try:
            num_sockets += str(each.readlink()).startswith("socket:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return num_sockets


def _memory_mb(process: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS:")]
    return round(int(line.split()[1]) / 1024, 1)


def settled(is_settled: Callable[[], bool]) -> bool:
    """Wait until a condition holds; return whether it does."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        gc.collect()
        if is_settled():
            return True
        time.sleep(0.05)
    return is_settled()


def run(server: TemporaryServer, num_calls: int) -> dict[str, Any]:
    """Stream; return what was held before and after, and the memory halfway and at the end."""
    watcher = Client(server.url)
    watcher.models()
    before = held(server, watcher, 0)
    clients = Clients(server.url)
    ways = 2 * len(clients.blocking())
    each = -(-num_calls // ways)
    loop = asyncio.new_event_loop()

    def go(count: int) -> None:
        for stream in clients.blocking().values():
            read(stream, count)
        for stream in clients.awaited().values():
            work: Awaitable[None] = aread(stream, count)
            loop.run_until_complete(work)

    start = time.perf_counter()
    go(each // 2)
    halfway = memory(server)
    go(each - each // 2)
    took_s = time.perf_counter() - start
    end = memory(server)
    loop.run_until_complete(clients.aclose())
    # Libraries leave generators to the garbage collector. A loop that continued would close them.
    loop.run_until_complete(loop.shutdown_asyncgens())
    num_tasks = len(asyncio.all_tasks(loop))
    loop.close()
    clients.close()
    is_clean = settled(lambda: held(server, watcher, num_tasks) == before)
    after = held(server, watcher, num_tasks)
    watcher.close()
    num_second_half = ways * (each - each // 2)
    return {
        "calls": ways * each,
        "seconds": round(took_s, 1),
        "before": before._asdict(),
        "after": after._asdict(),
        "memory_halfway": halfway._asdict(),
        "memory_at_the_end": end._asdict(),
        "objects_per_call": round((end.objects - halfway.objects) / num_second_half, 3),
        "is_clean": is_clean and end.objects - halfway.objects < max(2_000, num_second_half),
    }


def main() -> int:
    """Print the figures; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with started("--engine", "fake") as server:
        figures = run(server, options.calls)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return int(not figures["is_clean"])


if __name__ == "__main__":
    sys.exit(main())
