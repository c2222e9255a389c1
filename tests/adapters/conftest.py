"""A scripted server double, and clients of both kinds connected to it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest

from conure.adapters.client import AsyncClient, Client, Retry
from conure.server.app import create_app
from conure.server.config import Config

from .left import submitted

__all__ = ["submitted"]

Message = MutableMapping[str, Any]


@dataclass
class Answer:
    """One scripted reply: a JSON body, or the chunks of a stream."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] | None = None
    is_cut: bool = False
    """The connection breaks after the last chunk."""
    is_lost: bool = False
    """The request is read, and the connection breaks before a reply."""
    gate: Callable[[], bool] | None = None
    """The last chunk of the stream is sent once this returns True."""


@dataclass
class Seen:
    """One received request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Any


class Double:
    """An ASGI application with scripted replies. The last reply of a path is repeated."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.num_disconnects = 0
        self._disconnected = threading.Condition()
        self.lifespan: list[str] = []
        self._script: dict[tuple[str, str], deque[Answer]] = defaultdict(deque)

    def wait_for_disconnects(self, count: int) -> None:
        """Wait until this many streams were left; the application counts in its own thread."""
        with self._disconnected:
            assert self._disconnected.wait_for(lambda: self.num_disconnects >= count, timeout=60)
            assert self.num_disconnects == count

    def on(self, method: str, path: str, *answers: Answer) -> None:
        """Append replies to the script of a path."""
        self._script[method, path].extend(answers)

    def answer(self, method: str, path: str, answer: Answer) -> None:
        """Replace the script of a path by one reply."""
        self._script[method, path] = deque([answer])

    def of(self, method: str, path: str) -> list[Seen]:
        """Return the requests to a path."""
        return [seen for seen in self.seen if (seen.method, seen.path) == (method, path)]

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        body = (await receive())["body"]
        seen = Seen(
            scope["method"],
            scope["path"],
            scope["query_string"].decode(),
            {key.decode(): value.decode() for key, value in scope["headers"]},
            msgspec.json.decode(body) if body else None,
        )
        self.seen.append(seen)
        answers = self._script[seen.method, seen.path]
        if not answers:
            return await _send(send, Answer(404, _problem(404, "program.not_found", "no such")))
        answer = answers.popleft() if len(answers) > 1 else answers[0]
        if answer.is_lost:
            raise ConnectionResetError("lost")
        if answer.chunks is None:
            return await _send(send, answer)
        return await self._stream(answer, receive, send)

    async def _stream(self, answer: Answer, receive: Any, send: Any) -> None:
        head = [(b"content-type", b"text/event-stream"), *_headers(answer)]
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        disconnect = asyncio.create_task(receive())
        try:
            for index, chunk in enumerate(answer.chunks or []):
                if answer.gate is not None and index == len(answer.chunks or []) - 1:
                    while not answer.gate():
                        if disconnect.done():
                            with self._disconnected:
                                self.num_disconnects += 1
                                self._disconnected.notify_all()
                            return
                        await asyncio.sleep(0.001)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if answer.is_cut:
                raise ConnectionResetError("cut")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            disconnect.cancel()

    async def _live(self, receive: Any, send: Any) -> None:
        for what in ("startup", "shutdown"):
            await receive()
            self.lifespan.append(what)
            await send({"type": f"lifespan.{what}.complete"})


async def _send(send: Any, answer: Answer) -> None:
    await send(
        {"type": "http.response.start", "status": answer.status, "headers": _headers(answer)}
    )
    body = answer.body if isinstance(answer.body, bytes) else msgspec.json.encode(answer.body)
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _headers(answer: Answer) -> list[tuple[bytes, bytes]]:
    return [(key.encode(), value.encode()) for key, value in answer.headers.items()]


def _problem(status: int, code: str, detail: str, **more: Any) -> dict[str, Any]:
    title = "Problem"
    return {
        "type": f"urn:conure:problem:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        "request_id": "req_1",
        **more,
    }


def _sse(seq: int | None, kind: str, **data: Any) -> bytes:
    head = "" if seq is None else f"id: {seq}\n"
    return f"{head}event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


class Kit:
    """Builders of replies and events."""

    Answer = Answer
    problem = staticmethod(_problem)
    sse = staticmethod(_sse)
    program = {"nodes": [], "outputs": ["out"]}  # noqa: RUF012
    path = "/v1/programs/p_1"

    @staticmethod
    def accepted(output: str = "out") -> Any:
        """Return the reply to a submission."""
        body = {"id": "p_1", "status": "accepted", "outputs": [output], "url": "/v1/programs/p_1"}
        return Answer(202, body)

    @staticmethod
    def followed(*chunks: bytes, **more: Any) -> Any:
        """Return the reply to a submission with `follow`."""
        headers = {"Location": "/v1/programs/p_1"}
        return Answer(202, headers=headers, chunks=list(chunks), **more)

    @staticmethod
    def status(phase: str, **more: Any) -> Any:
        """Return a program's status."""
        body = {"id": "p_1", "status": phase, "created_at": "now", "outputs": ["out"], **more}
        return Answer(200, body)

    @staticmethod
    def delta(text: str, offset: int, attempt: int = 0) -> bytes:
        """Return the event of a text delta."""
        return _sse(
            None, "node.delta", variable="answer", text=text, attempt=attempt, offset=offset
        )

    @staticmethod
    def committed(value: Any) -> bytes:
        """Return the events of the committed answer and the program's end."""
        return _sse(5, "variable.committed", variable="answer", value=value) + Kit.finished(6)

    @staticmethod
    def finished(seq: int, status: str = "done") -> bytes:
        """Return the last event."""
        return _sse(seq, "program.finished", program="p_1", status=status, receipt={"calls": 1})


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def double() -> Double:
    return Double()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server with the scripted engine."""
    app = create_app(Config(engine="fake", data=tmp_path_factory.mktemp("data")))
    with Client(app=app) as client:
        yield client
        gc.collect()  # closes streams that LangChain leaves open when a parallel one fails


class Caller:
    """Calls a synchronous or an asynchronous client in the same way."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    async def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the client or of its runs."""
        if isinstance(self.client, AsyncClient):
            call: Awaitable[Any] = method(*args, **kwargs)
            return await call
        return await asyncio.to_thread(method, *args, **kwargs)

    async def events(self, run: Any, after: int = 0, **kwargs: Any) -> list[Any]:
        """Return all events of a run."""
        if isinstance(self.client, AsyncClient):
            return [event async for event in run.events(after, **kwargs)]
        return await asyncio.to_thread(lambda: list(run.events(after, **kwargs)))

    async def submit(self, **kwargs: Any) -> Any:
        """Submit the kit's program."""
        return await self(self.client.submit, Kit.program, **kwargs)


LOOKS = count()
FAST = Retry(
    max_retries=3,
    base_delay_s=0.0001,
    max_delay_s=0.001,
    unreachable_timeout_s=0.5,
    first_contact_timeout_s=0.1,
    # Each look at the clock takes 5 ms: an outage ends after so many tries, on a busy machine too.
    clock=lambda: 0.005 * next(LOOKS),
)


@pytest.fixture(params=["threads", "coroutines"])
async def caller(request: pytest.FixtureRequest, double: Double) -> AsyncIterator[Caller]:
    if request.param == "coroutines":
        async with AsyncClient(app=double, retry=FAST) as client:
            yield Caller(client)
    else:
        with await asyncio.to_thread(lambda: Client(app=double, retry=FAST)) as client:
            yield Caller(client)
