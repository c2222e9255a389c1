"""Program events as server-sent events, resumable by sequence number.

Invariants: only journaled events have an `id:`, so a client that reconnects with Last-Event-ID
misses none of them and receives transient text again; an idle stream sends a comment every `PING_S`
seconds; a drain ends every stream with `server.draining`; the service's generator is always closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get
from litestar.openapi import ResponseSpec
from litestar.params import FromPath, HeaderParameter, QueryParameter

from ...program.status import Event, EventType
from ..openapi import ServerSentEvent, error_responses
from ..request_context import EVENT_STREAM, EventStreamResponse, draining_of, service_of, tenant_of

logger = logging.getLogger(__name__)

PING_S = 15.0
PING = b": ping\n\n"
MAX_BATCH, MAX_BATCH_BYTES = 64, 64 * 1024
"""Events that are encoded together, and the bytes after which no event is added to them."""
MAX_WRITE = 32 * 1024
"""Maximum number of bytes per write: what a client that does not read may keep waiting."""
DRAINING: Final = "server.draining"
TRANSIENT: Final[frozenset[EventType]] = frozenset({"node.delta", "yield"})
"""Event types that may lack a sequence number. Dozens of them may occur per step."""
_MAX_SEQ = 2**63 - 1

After = Annotated[
    int,
    QueryParameter(
        name="after", ge=0, le=_MAX_SEQ, description="Last sequence number already received."
    ),
]
LastEventId = Annotated[
    int | None,
    HeaderParameter(
        name="Last-Event-ID",
        ge=0,
        le=_MAX_SEQ,
        description="Like `after`, and takes precedence.",
        schema_extra={"minimum": 0},  # Litestar omits a minimum of 0 if null is allowed.
    ),
]

Types = Annotated[
    list[EventType] | None,
    QueryParameter(
        name="types",
        max_items=32,
        description="Event types to send; repeat the parameter for several. Default: all. "
        "`program.finished` and `server.draining` are always sent.",
    ),
]
Follow = Annotated[
    bool,
    QueryParameter(
        name="follow",
        description="Wait for new events until the program ends; false: send the recorded events "
        "and end.",
    ),
]


@get(
    "/v1/programs/{program:str}/events",
    responses={
        200: ResponseSpec(
            ServerSentEvent,
            generate_examples=False,
            description="Server-sent events, until program.finished or server.draining",
            media_type=EVENT_STREAM,
        ),
        **error_responses(404),
    },
    tags=["programs"],
)
async def read_events(
    request: Request[Any, Any, Any],
    program: FromPath[str],
    after: After = 0,
    last_event_id: LastEventId = None,
    types: Types = None,
    follow: Follow = True,
) -> EventStreamResponse:
    """Stream the events of a program: recorded events after a sequence number, then new ones."""
    # An unknown program must be a 404, which is impossible after the first byte.
    await service_of(request).find(program, tenant=tenant_of(request))
    start = after if last_event_id is None else last_event_id
    return EventStreamResponse(
        sse_stream(request, program, after=start, types=types, follow=follow)
    )


def sse_stream(
    request: Request[Any, Any, Any],
    program: str,
    *,
    after: int,
    types: list[EventType] | None,
    follow: bool = True,
) -> AsyncGenerator[bytes, None]:
    """Return the encoded events of an existing program, optionally restricted to some types."""
    is_durable = types is not None and TRANSIENT.isdisjoint(types)
    source = service_of(request).events(
        program, tenant=tenant_of(request), after=after, is_durable=is_durable, follow=follow
    )
    if types is not None:
        source = _only(source, frozenset([*types, "program.finished", DRAINING]))
    return _lines(batch_events(source, draining_of(request), ping_s=PING_S, is_encoded=True))


async def batch_events(
    source: AsyncGenerator[Event, None],
    draining: asyncio.Event,
    *,
    ping_s: float,
    is_encoded: bool = False,
) -> AsyncGenerator[list[Event] | None, None]:
    """Yield the events of `source` in lists of events that arrived together, and None after
    `ping_s` seconds without one. With `is_encoded`, events that have an encoding lack their data.

    Ends with `source`, or with a `server.draining` event when the server drains. A separate task
    reads the source, so that a ping does not interrupt it. Events are batched because many calls of
    a program end together, and a task or a write for each of their events would cost more than the
    calls.
    """
    inbox = _EventBuffer(source, is_encoded)
    draining_task = asyncio.ensure_future(draining.wait())
    try:
        while True:
            await inbox.wait(draining_task, ping_s)
            if events := inbox.take():
                yield events
                if events[-1].type == DRAINING:
                    return
            elif inbox.reading.done():
                inbox.reading.result()
                return
            elif draining_task.done():
                yield [Event(None, DRAINING, {})]
                return
            else:
                yield None
    finally:
        tasks = (inbox.reading, draining_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await source.aclose()


class _EventBuffer:
    """Events that were read and not taken yet, at most `MAX_BATCH` or `MAX_BATCH_BYTES`.

    A full buffer blocks the source, so that a slow client later receives the missed text in one
    delta.
    """

    def __init__(self, source: AsyncGenerator[Event, None], is_encoded: bool) -> None:
        self._source = source
        self._is_encoded = is_encoded
        self._events: list[Event] = []
        self._num_bytes = 0
        self._has_events = asyncio.Event()
        self._has_space = asyncio.Event()
        self.reading = asyncio.ensure_future(self._read())
        """Ends with the source, by its error if it has one."""

    async def _read(self) -> None:
        try:
            async for event in self._source:
                self._add(event)
                self._has_events.set()
                if len(self._events) >= MAX_BATCH or self._num_bytes >= MAX_BATCH_BYTES:
                    self._has_space.clear()
                    await self._has_space.wait()
        finally:
            self._has_events.set()

    def _add(self, event: Event) -> None:
        if self._is_encoded and event.encoded:  # is held only once
            event = Event(event.seq, event.type, {}, event.encoded)
        self._events.append(event)
        self._num_bytes += len(event.encoded)

    async def wait(self, other: asyncio.Future[Any], wait_s: float) -> None:
        """Return when there are events, the source has ended, `other` is done, or the time is
        over.
        """
        has_events = asyncio.ensure_future(self._has_events.wait())
        try:
            await asyncio.wait((has_events, other), timeout=wait_s, return_when="FIRST_COMPLETED")
        finally:
            has_events.cancel()

    def take(self) -> list[Event]:
        """Return and remove the buffered events."""
        events, self._events = self._events, []
        self._num_bytes = 0
        self._has_space.set()
        if not self.reading.done():
            self._has_events.clear()
        return events


def encode_event(event: Event) -> bytes:
    """Encode an event in the SSE format."""
    return b"".join(_event_parts(event))


def _event_parts(event: Event) -> Iterator[bytes]:
    """Yield an event in the SSE format in parts. All readers share the largest part."""
    head = b"" if event.seq is None else b"id: %d\n" % event.seq
    yield b"%sevent: %s\ndata: " % (head, event.type.encode("ascii"))
    yield event.encoded or msgspec.json.encode(event.data)
    yield b"\n\n"


def _chunks(events: list[Event]) -> Iterator[bytes]:
    """Yield encoded events in writes of at most `MAX_WRITE` bytes."""
    buffer = bytearray()
    for event in events:
        for part in _event_parts(event):
            for start in range(0, len(part), MAX_WRITE):
                if len(buffer) + len(part) - start > MAX_WRITE and buffer:
                    yield bytes(buffer)
                    buffer.clear()
                buffer += part[start : start + MAX_WRITE]
    yield bytes(buffer)


async def _only(
    source: AsyncGenerator[Event, None], types: frozenset[str]
) -> AsyncGenerator[Event, None]:
    """Yield the events of some types. After each `MAX_BATCH` skipped events, other tasks run."""
    num_skipped = 0
    async with aclosing(source):
        async for event in source:
            if event.type in types:
                yield event
                continue
            num_skipped += 1
            if num_skipped % MAX_BATCH == 0:
                await asyncio.sleep(0)


async def _lines(events: AsyncGenerator[list[Event] | None, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for some in events:
                for chunk in (PING,) if some is None else _chunks(some):
                    yield chunk
        except Exception:
            # The status line is out: all that is left is to end the stream. The reader
            # takes it up again after the last id, and gets a proper error there.
            logger.exception("stream of events failed")


ROUTES = (read_events,)
