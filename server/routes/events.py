"""Events of a program as server-sent events, resumable by sequence number.

Knows the SSE wire. Kept true: `id:` stands only on journaled events, so that a reader that
reconnects with Last-Event-ID misses none and gets transient text afresh; a silent stream
still says a comment every `PING_S` seconds; a drain ends every stream with
`server.draining`; the service's generator is always closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get
from litestar.openapi import ResponseSpec
from litestar.params import FromPath, HeaderParameter, QueryParameter

from ..program.status import Event, EventType
from .connection import (
    EVENT_STREAM,
    EventStream,
    draining_of,
    service_of,
    tenant_of,
)
from .document import problems

logger = logging.getLogger(__name__)

PING_S = 15.0
PING = b": ping\n\n"
MOST_AT_ONCE = 64
"""Events that go out in one piece."""
DRAINING: Final = "server.draining"
TRANSIENT: Final[frozenset[EventType]] = frozenset({"node.delta", "yield"})
"""Types of events that may come without a sequence number, by the dozen for every step."""
_MAX_SEQ = 2**63 - 1

After = Annotated[
    int,
    QueryParameter(name="after", ge=0, le=_MAX_SEQ, description="Sequence number already seen."),
]
LastEventId = Annotated[
    int | None,
    HeaderParameter(
        name="Last-Event-ID",
        ge=0,
        le=_MAX_SEQ,
        description="As `after`; it wins.",
        schema_extra={"minimum": 0},  # the page leaves a lower end of 0 out where null may stand
    ),
]

Types = Annotated[
    list[EventType] | None,
    QueryParameter(
        name="types",
        max_items=32,
        description="Only these types, the parameter once for each; all if left out. "
        "`program.finished` and `server.draining` come in any case.",
    ),
]


@get(
    "/v1/programs/{program:str}/events",
    responses={
        200: ResponseSpec(
            str,
            generate_examples=False,
            description="Server-sent events, until program.finished or server.draining",
            media_type=EVENT_STREAM,
        ),
        **problems(404),
    },
    tags=["programs"],
)
async def read_events(
    request: Request[Any, Any, Any],
    program: FromPath[str],
    after: After = 0,
    last_event_id: LastEventId = None,
    types: Types = None,
) -> EventStream:
    """Events of a program: those after a sequence number, then what comes."""
    # An unknown program must be a 404, and after the first byte it is too late for one.
    await service_of(request).find(program, tenant=tenant_of(request))
    start = after if last_event_id is None else last_event_id
    return EventStream(lines_of(request, program, after=start, types=types))


def lines_of(
    request: Request[Any, Any, Any], program: str, *, after: int, types: list[EventType] | None
) -> AsyncGenerator[bytes, None]:
    """The events of a program that there is, on the wire: of these types, and the last one."""
    is_durable = types is not None and TRANSIENT.isdisjoint(types)
    source = service_of(request).events(
        program, tenant=tenant_of(request), after=after, is_durable=is_durable
    )
    if types is not None:
        source = _only(source, frozenset([*types, "program.finished", DRAINING]))
    return _lines(follow(source, draining_of(request), ping_s=PING_S))


async def follow(
    source: AsyncGenerator[Event, None], draining: asyncio.Event, *, ping_s: float
) -> AsyncGenerator[list[Event] | None, None]:
    """Yields what `source` yields, in lists of what came at once, and None whenever nothing
    came for `ping_s` seconds.

    Ends with `source`, or with a `server.draining` event once the server drains. A task of
    its own reads the source, which a ping does not disturb; a program's calls end by the
    dozen, and a task or a write for each of their events would cost more than the calls.
    """
    inbox = _Inbox(source)
    drained = asyncio.ensure_future(draining.wait())
    try:
        while True:
            await inbox.wait(drained, ping_s)
            if events := inbox.take():
                yield events
                if events[-1].type == DRAINING:
                    return
            elif inbox.reading.done():
                inbox.reading.result()
                return
            elif drained.done():
                yield [Event(None, DRAINING, {})]
                return
            else:
                yield None
    finally:
        tasks = (inbox.reading, drained)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await source.aclose()


class _Inbox:
    """Events that were read and not taken yet: `MOST_AT_ONCE`, then the source has to wait, so
    that what a slow reader misses of a text comes in one piece.
    """

    def __init__(self, source: AsyncGenerator[Event, None]) -> None:
        self._source = source
        self._events: list[Event] = []
        self._came = asyncio.Event()
        self._taken = asyncio.Event()
        self.reading = asyncio.ensure_future(self._read())
        """Ends with the source, by its error if it has one."""

    async def _read(self) -> None:
        try:
            async for event in self._source:
                self._events.append(event)
                self._came.set()
                if len(self._events) >= MOST_AT_ONCE:
                    self._taken.clear()
                    await self._taken.wait()
        finally:
            self._came.set()

    async def wait(self, other: asyncio.Future[Any], wait_s: float) -> None:
        """Returns when there are events, no more are to come, `other` is done, or it is time."""
        coming = asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait((coming, other), timeout=wait_s, return_when="FIRST_COMPLETED")
        finally:
            coming.cancel()

    def take(self) -> list[Event]:
        """What there is."""
        events, self._events = self._events, []
        self._taken.set()
        if not self.reading.done():
            self._came.clear()
        return events


def event_bytes(event: Event) -> bytes:
    """One event on the wire."""
    data = msgspec.json.encode(event.data)
    head = b"" if event.seq is None else b"id: %d\n" % event.seq
    return b"%sevent: %s\ndata: %s\n\n" % (head, event.type.encode("ascii"), data)


async def _only(
    source: AsyncGenerator[Event, None], wanted: frozenset[str]
) -> AsyncGenerator[Event, None]:
    """Those of some types; others count as silence, and do not keep the loop from its work."""
    num_skipped = 0
    async with aclosing(source):
        async for event in source:
            if event.type in wanted:
                yield event
                continue
            num_skipped += 1
            if num_skipped % MOST_AT_ONCE == 0:
                await asyncio.sleep(0)


async def _lines(events: AsyncGenerator[list[Event] | None, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for some in events:
                yield PING if some is None else b"".join(map(event_bytes, some))
        except Exception:
            # The status line is out: all that is left is to end the stream. The reader
            # takes it up again after the last id, and gets a proper error there.
            logger.exception("stream of events failed")


ROUTES = (read_events,)
