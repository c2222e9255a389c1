"""How a client reaches its server, and how it stays on an event stream.

What clients for threads and for coroutines share beside the exchanges themselves: the
address, the timeouts, the application in this process, and the state of one reader of
events. Knows httpx; refuses to know what programs mean.

Kept true: a reader of events gives each of them out once, in order, and gives up only
after the server was out of reach for all retries.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import httpx

from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType

from .asgi import Application, LocalApp
from .exchange import (
    EVENT_HEADERS,
    EVENT_STREAM,
    Outage,
    Reply,
    Request,
    Retry,
    ServerUnreachableError,
    error_of,
    program_path,
)
from .sse import Cursor
from .steps import Desk

DEFAULT_URL = "http://127.0.0.1:8400"
CONNECT_S = 5.0
STREAM_SILENCE_S = 45.0
"""An event stream that says nothing for so long is opened anew; a dead server shows then."""

LAST: Final = "program.finished"
"""The event that ends every stream."""

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


class Settings:
    """What a client and its sibling of the other kind have in common."""

    def __init__(
        self,
        base_url: str | None,
        *,
        app: Application | None,
        timeout_s: float,
        retry: Retry | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.base_url = base_url or os.environ.get("CONURE_URL") or DEFAULT_URL
        self.local = None if app is None else LocalApp(app)
        self.timeout_s = timeout_s
        self.retry = retry or Retry()
        self.headers = {"content-type": "application/json", **(headers or {})}
        self.desk = Desk()
        self.is_known = False
        """The server has answered."""

    @property
    def server(self) -> object:
        """Which server this is: clients with equal ones speak to the same."""
        return self.base_url if self.local is None else self.local

    def arguments(self, request: Request) -> dict[str, Any]:
        """Arguments of httpx's `request` for one of ours."""
        return {
            "method": request.method,
            "url": request.path,
            "content": request.body,
            "params": request.query or None,
            "headers": request.headers,
            "timeout": httpx.Timeout(
                self.timeout_s, connect=CONNECT_S, read=self.timeout_s + request.wait_s
            ),
        }

    def unreachable(self, problem: httpx.TransportError) -> ServerUnreachableError:
        """What a user is told when no answer came."""
        was_sent = not isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)
        what = str(problem) or type(problem).__name__
        return ServerUnreachableError(
            f"no answer from {self.base_url}: {what}; is the server running (`conure serve`)?",
            was_sent=was_sent,
            is_known=self.is_known,
        )


def wanted(types: Collection[EventType] | None) -> dict[str, list[str]]:
    """The query for events of these types; None: of all."""
    # The last event comes in any case; to name none would be to ask for all.
    return {} if types is None else {"types": sorted({*types, LAST})}


def following(wait_s: float | None) -> dict[str, Any]:
    """How a program is submitted whose outputs are all that is waited for: they come with its
    events, unless somebody waits only so long, which a stream cannot tell in time.
    """
    return {"follow": True, "types": ["variable.committed"]} if wait_s is None else {}


def is_stream(response: httpx.Response) -> bool:
    """Whether an answer is the stream of events of a program that it names.

    It may be silent from here on, for longer than an answer may take to begin.
    """
    headers = response.headers
    is_events = headers.get("content-type", "").startswith(EVENT_STREAM)
    if not (is_events and response.is_success and "location" in headers):
        return False
    response.request.extensions["timeout"]["read"] = STREAM_SILENCE_S
    return True


def committed(events: list[Event]) -> dict[str, Json]:
    """The values that events tell of, by variable."""
    return {
        event.data["variable"]: event.data["value"]
        for event in events
        if event.type == "variable.committed"
    }


def ends(events: list[Event]) -> bool:
    """Whether no more events follow: a stream read to its end leaves its connection to others."""
    return any(event.type == LAST for event in events)


class Opened(NamedTuple):
    """The events of a program that came as the answer to its submission."""

    response: httpx.Response
    types: Collection[EventType] | None

    def serves(self, after: int, types: Collection[EventType] | None) -> bool:
        """Whether they are what a reader asks for."""
        return not after and self.types == types


class Follower:
    """One reader of a program's events, over any number of connections."""

    def __init__(
        self, settings: Settings, program: str, after: int, types: Collection[EventType] | None
    ) -> None:
        self.is_over = False
        """The program's last event was given out."""
        self._settings = settings
        self._path = f"{program_path(program)}/events"
        self._types = types
        self._cursor = Cursor(after)
        self._num_misses = 0
        self._outage = Outage(settings.retry)
        self._pause_s = 0.0
        self._is_quiet = True

    def arguments(self) -> dict[str, Any]:
        """Arguments of httpx's `stream` for the next connection."""
        self._cursor.reconnect()
        self._pause_s = 0.0
        self._is_quiet = True
        return {
            "method": "GET",
            "url": self._path,
            "params": {"after": str(self._cursor.after), **wanted(self._types)},
            "headers": EVENT_HEADERS,
            "timeout": httpx.Timeout(
                self._settings.timeout_s, connect=CONNECT_S, read=STREAM_SILENCE_S
            ),
        }

    def feed(self, chunk: bytes) -> list[Event]:
        """Events that a chunk completes."""
        self._settings.is_known = True
        self._outage.over()  # a ping is an answer too
        events = self._cursor.feed(chunk)
        for event in events:
            if event.type == "server.draining":
                continue
            self._num_misses = 0
            self._is_quiet = False
            self.is_over = self.is_over or event.type == LAST
        return events

    def refused(self, reply: Reply) -> None:
        """The server answered without a stream.

        Raises:
            ConureError: if asking again would change nothing, or was tried often enough.
        """
        problem = error_of(reply)
        retry = self._settings.retry
        asked_s = problem.retry_after_s
        if reply.status not in (429, 502, 503, 504) or self._num_misses >= retry.max_retries:
            raise problem
        if asked_s is not None and asked_s > retry.most_asked_s:
            raise problem
        self._miss(asked_s)

    def broken(self, problem: httpx.TransportError) -> None:
        """The connection broke.

        Raises:
            ServerUnreachableError: if it did so for too long without a byte in between.
        """
        if not self.is_over:
            self._pause_s = self._outage.pause_s(self._settings.unreachable(problem))

    def may_have_ended(self) -> bool:
        """Whether the stream ended by itself with nothing new, as after a program's end."""
        return self._is_quiet and not self._pause_s and not self.is_over

    def pause_s(self) -> float:
        """Seconds to wait before the next connection."""
        if self._is_quiet and not self._pause_s:
            self._miss(None)
        return self._pause_s

    def _miss(self, asked_s: float | None) -> None:
        self._pause_s = self._settings.retry.delay_s(self._num_misses, asked_s)
        self._num_misses += 1
