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

from ..program.status import Event
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
DRAINING: Final = "server.draining"
_MAX_SEQ = 2**63 - 1

After = Annotated[
    int,
    QueryParameter(name="after", ge=0, le=_MAX_SEQ, description="Sequence number already seen."),
]
LastEventId = Annotated[
    int | None,
    HeaderParameter(name="Last-Event-ID", ge=0, le=_MAX_SEQ, description="As `after`; it wins."),
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
) -> EventStream:
    """Events of a program: those after a sequence number, then what comes."""
    service, tenant = service_of(request), tenant_of(request)
    # An unknown program must be a 404, and after the first byte it is too late for one.
    await service.status(program, tenant=tenant)
    start = after if last_event_id is None else last_event_id
    source = service.events(program, tenant=tenant, after=start)
    return EventStream(_lines(follow(source, draining_of(request), ping_s=PING_S)))


async def follow(
    source: AsyncGenerator[Event, None], draining: asyncio.Event, *, ping_s: float
) -> AsyncGenerator[Event | None, None]:
    """Yields what `source` yields, and None whenever nothing came for `ping_s` seconds.

    Ends with `source`, or with a `server.draining` event once the server drains. Each item
    is awaited in a task of its own, which a ping does not disturb; waiting for that task
    also lets other requests run, however fast the source is.
    """
    drained = asyncio.ensure_future(draining.wait())
    item: asyncio.Future[Event | None] | None = None
    try:
        while True:
            item = item or asyncio.ensure_future(_next(source))
            await asyncio.wait((item, drained), timeout=ping_s, return_when=asyncio.FIRST_COMPLETED)
            if item.done():
                event = item.result()
                item = None
                if event is None:
                    return
                yield event
                if event.type == DRAINING:
                    return
            elif drained.done():
                yield Event(None, DRAINING, {})
                return
            else:
                yield None
    finally:
        waiting: list[asyncio.Future[Any]] = [task for task in (item, drained) if task is not None]
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await source.aclose()


async def _next(source: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(source, None)


def event_bytes(event: Event) -> bytes:
    """One event on the wire."""
    data = msgspec.json.encode(event.data)
    head = b"" if event.seq is None else b"id: %d\n" % event.seq
    return b"%sevent: %s\ndata: %s\n\n" % (head, event.type.encode("ascii"), data)


async def _lines(events: AsyncGenerator[Event | None, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for event in events:
                yield PING if event is None else event_bytes(event)
        except Exception:
            # The status line is out: all that is left is to end the stream. The reader
            # takes it up again after the last id, and gets a proper error there.
            logger.exception("stream of events failed")


ROUTES = (read_events,)
