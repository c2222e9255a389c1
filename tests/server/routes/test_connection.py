"""Limits of connections: bytes and seconds of a head and a body, readers, connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn

from conure.server.app import create_app
from conure.server.config import Config
from conure.server.routes.connection import (
    MAX_HEAD_BYTES,
    BoundedHttpProtocol,
    ConnectionLimits,
    max_connections,
)

from ..inprocess import expr
from ..service_double import until


class BoundedServer(NamedTuple):
    """A server that runs."""

    port: int
    uvicorn: uvicorn.Server
    limits: ConnectionLimits


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ENDS_S = 60.0
START = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextlib.asynccontextmanager
async def bounded(data: Path, **limits: Any) -> AsyncIterator[BoundedServer]:
    """Serve an application with limits."""
    app = create_app(Config(data=data, engine="fake"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    connection_limits = ConnectionLimits(**{"max_connections": 100, **limits})
    protocol: Any = partial(BoundedHttpProtocol, limits=connection_limits)
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    async with app.lifespan():
        serving = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started)
        yield BoundedServer(listener.getsockname()[1], server, connection_limits)
        server.should_exit = True
        await serving


async def connect(server: BoundedServer, text: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(text)
    return reader, writer


async def answer_of(connection: Connection) -> bytes:
    """Return everything until the server closes the connection."""
    reader, writer = connection
    async with asyncio.timeout(ENDS_S):
        received = await reader.read()
    writer.close()
    return received


async def test_long_head_is_refused_before_it_is_complete(tmp_path: Path) -> None:
    async with bounded(tmp_path) as server:
        head = START + b"X-a: " + b"a" * MAX_HEAD_BYTES
        assert b" 431 " in await answer_of(await connect(server, head))
        line = b"GET /" + b"a" * MAX_HEAD_BYTES
        assert b"request.head_too_large" in await answer_of(await connect(server, line))


async def test_large_body_does_not_count_as_head(tmp_path: Path) -> None:
    async with bounded(tmp_path) as server, httpx.AsyncClient(timeout=60) as client:
        program = {"program": {"nodes": [expr("e", "a" * 2 * MAX_HEAD_BYTES)]}}
        url = f"http://127.0.0.1:{server.port}/v1/programs"
        assert (await client.post(url, json=program)).status_code == 202
        assert (await client.post(url, json=program)).status_code == 202


async def test_a_head_may_end_in_two_parts(tmp_path: Path) -> None:
    body = b"x" * 2 * MAX_HEAD_BYTES
    head = START.replace(b"GET", b"POST") + b"Connection: close\r\nContent-Length: %d" % len(body)
    async with bounded(tmp_path) as server:
        connection = await connect(server, head + b"\r\n\r")
        await connection[1].drain()
        await asyncio.sleep(0.1)  # the two parts arrive apart
        connection[1].write(b"\n" + body)
        assert b" 405 " in (await answer_of(connection)).split(b"\r\n")[0]


async def test_a_body_after_its_answer_is_not_counted(tmp_path: Path) -> None:
    body = b"x" * 100_000
    head = START.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % len(body)
    async with bounded(tmp_path) as server:
        reader, writer = await connect(server, head)
        assert b" 405 " in await reader.readline()
        protocol: Any = next(iter(server.uvicorn.server_state.connections))
        writer.write(body)
        await until(lambda: protocol._is_in_head)  # the body has arrived
        assert server.limits.body_bytes == 0
        writer.close()


async def test_an_empty_line_between_requests_leaves_the_connection_idle(tmp_path: Path) -> None:
    async with bounded(tmp_path, head_s=0.05) as server:
        reader, writer = await connect(server, START + b"\r\n")
        await reader.readuntil(b" 200 OK")
        writer.write(b"\r\n")
        protocol: Any = next(iter(server.uvicorn.server_state.connections))
        await asyncio.sleep(0.2)
        assert protocol.timeout_keep_alive_task is not None
        writer.write(START + b"Connection: close\r\n\r\n")
        answer = await answer_of((reader, writer))
        assert b" 200 OK" in answer
        assert b" 408 " not in answer


async def test_a_head_that_began_with_the_request_before_can_go_on(tmp_path: Path) -> None:
    async with bounded(tmp_path) as server:
        reader, writer = await connect(server, START + b"\r\n" + START)
        await reader.readuntil(b" 200 OK")
        writer.write(b"\r\n")
        await reader.readuntil(b" 200 OK")
        writer.close()


async def test_a_head_that_began_with_the_request_before_must_arrive_in_time(
    tmp_path: Path,
) -> None:
    async with bounded(tmp_path, head_s=0.05) as server:
        answer = await answer_of(await connect(server, START + b"\r\n" + START))
        assert b" 200 OK" in answer
        assert b" 408 " in answer


async def test_head_and_body_must_arrive_in_time(tmp_path: Path) -> None:
    post = START.replace(b"GET /healthz", b"POST /v1/programs")
    body = post + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    async with bounded(tmp_path, head_s=0.05, body_s=0.05) as server:
        for start in (b"", b"GET", START, body):
            assert b" 408 " in await answer_of(await connect(server, start)), start


async def test_a_body_that_does_not_follow_its_answer_gets_no_second_answer(
    tmp_path: Path,
) -> None:
    post = START.replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\n{"
    async with bounded(tmp_path, body_s=0.05) as server:
        answer = await answer_of(await connect(server, post))
        assert b" 405 " in answer
        assert answer.count(b"HTTP/1.1 ") == 1


async def test_connections_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async with bounded(tmp_path, max_connections=2) as server:
        held = [await connect(server, START) for _ in range(2)]
        for connection in held:
            connection[1].write(b"\r\n")
            assert b" 200 " in await connection[0].readuntil(b"\r\n")
        assert b" 503 " in await answer_of(await connect(server, START + b"\r\n"))
        held[0][1].write(b"Connection: close\r\n\r\n")
        for connection in held:
            connection[1].close()
    assert max_connections() > 0


async def test_client_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    # Each request of the client has its own connection, so the other one can be counted.
    client = httpx.AsyncClient(headers={"Connection": "close"}, timeout=ENDS_S)
    async with bounded(tmp_path) as server, client:
        url = f"http://127.0.0.1:{server.port}"
        state, stall_s = server.uvicorn.server_state, server.limits.stall_s
        nodes = [expr(f"e{i}", {"concat": ["a" * 1_000, {"var": "x"}]}) for i in range(10)]
        program = {"variables": {"x": {}}, "nodes": nodes}
        large = {"program": program, "inputs": {"x": "b" * 1_000_000}}
        path = (await client.post(f"{url}/v1/programs", json=large)).json()["url"]
        complete = (await client.get(f"{url}{path}/events")).content
        ids = [line for line in complete.split(b"\n") if line.startswith(b"id:")]
        await until(lambda: not state.connections)
        server.limits.stall_s = 0.05
        request = START.replace(b"/healthz", f"{path}/events".encode()) + b"\r\n"
        reader, writer = await connect(server)
        with contextlib.closing(writer):
            await until(lambda: len(state.connections) == 1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request)
            await until(lambda: not state.connections)
            server.limits.stall_s = stall_s
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(ENDS_S):
                    assert len(await reader.read()) < len(complete)
            headers = {"Last-Event-ID": ids[-2].split()[1].decode()}
            rest = await client.get(f"{url}{path}/events", headers=headers)
            assert rest.content.count(b"id:") == 1


async def test_an_upgrade_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"model": "default", "prompt": "Hi"}'
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = START.replace(b"GET /healthz", b"POST /v1/tokenize") + upgrade
    head += b"Content-Type: application/json\r\n"
    sized = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    socket_ = START + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    last = START + b"Connection: close, upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with bounded(tmp_path) as server:
        reader, writer = await connect(server, sized + chunked + socket_ + sized[:-5])
        await reader.readuntil(b'"tokens"')
        writer.write(sized[-5:] + last)
        answer = await answer_of((reader, writer))
    assert answer.count(b'"tokens"') == 2
    assert answer.count(b" 200 OK") == 4
    assert caplog.records == []


async def test_the_limits_hold_after_an_upgrade(tmp_path: Path) -> None:
    upgrade = START + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n"
    async with bounded(tmp_path, head_s=0.05) as server:
        answer = await answer_of(await connect(server, upgrade + START))
        assert answer.count(b" 200 OK") == 1
        assert b" 408 " in answer


async def test_a_tunnel_is_refused(tmp_path: Path) -> None:
    async with bounded(tmp_path, head_s=0.05, body_s=0.05) as server:
        head = b"CONNECT example.com:80 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        assert b"HTTP/1.1 400" in await answer_of(await connect(server, head))
