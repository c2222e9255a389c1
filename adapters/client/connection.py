"""Settings and event-stream state shared by `Client` and `AsyncClient`.

Responsibility: the address, the timeouts, the in-process application, and one reader's position in
a program's events over any number of connections.
Out of scope: sending requests (`sync_client`, `async_client`), retries of requests (`exchange`).
Invariants: a reader returns each event once, in order, and gives up only after the server was
unreachable for the time that `Retry` allows.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import httpx

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Json
from conure.server.program.status import Event, EventType

from .client_steps import ClientStepDeduplicator
from .exchange.problems import ServerUnreachableError, error_of
from .exchange.programs import program_path
from .exchange.records import EVENT_HEADERS, EVENT_STREAM, Reply, Request
from .exchange.retry import OutageTimer, Retry
from .exchange.transfer import is_retryable
from .local_app import Application, LocalApp
from .sse import Cursor

DEFAULT_URL = "http://127.0.0.1:8400"
MAX_PORT: Final = 65_535
CONNECT_TIMEOUT_S = 5.0
STREAM_SILENCE_S = 45.0
"""Read timeout of an event stream. The server pings more often: silence is a lost connection."""

_ROUTE = re.compile(
    r"/v1/(chat/completions|completions|embeddings|models|programs|responses|session)(?=/*$)"
)
"""Routes that users mistakenly give as the address of a server."""

LAST: Final = "program.finished"
"""The event that ends every stream."""
FAILURE_EVENTS: Final[frozenset[EventType]] = frozenset(
    {"node.failed", "node.killed", "node.skipped"}
)
"""Events after which the variables of a node get no values."""

logger = logging.getLogger(__name__)

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


class ClientSettings:
    """Configuration and state that a `Client` shares with its `AsyncClient`."""

    def __init__(
        self,
        base_url: str | None,
        *,
        app: Application | None,
        timeout_s: float,
        retry: Retry | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.base_url = address_of(base_url)
        self.local_app = None if app is None else LocalApp(app)
        self.timeout_s = timeout_s
        self.retry = retry or Retry()
        self.headers = {"content-type": "application/json", **(headers or {})}
        self.deduplicator = ClientStepDeduplicator()
        self.is_known = False
        """The server has answered this client."""
        self.is_closed = False
        """The `Client` was closed: its `AsyncClient` refuses requests, too."""

    @property
    def server(self) -> object:
        """Identifies the server: equal for clients of the same server."""
        return self.base_url if self.local_app is None else self.local_app

    @property
    def identity(self) -> object:
        """Identifies server and sender: equal for clients whose requests have equal headers."""
        return self.server, frozenset(self.headers.items())

    def request_arguments(self, request: Request) -> dict[str, Any]:
        """Return the arguments of httpx's `build_request`."""
        limit_s = math.inf if request.timeout_s is None else request.timeout_s
        return {
            "method": request.method,
            "url": request.path,
            "content": request.body,
            "params": request.query or None,
            "headers": request.headers,
            "timeout": httpx.Timeout(
                min(self.timeout_s, limit_s),
                connect=min(CONNECT_TIMEOUT_S, self.timeout_s, limit_s),
                read=min(self.timeout_s + request.wait_s, limit_s),
            ),
        }

    def unreachable(self, problem: httpx.TransportError) -> ServerUnreachableError:
        """Return the error for a request that got no answer."""
        was_sent = not isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout)
        reason = str(problem) or type(problem).__name__
        if isinstance(problem, httpx.ReadTimeout):
            read_s = _read_timeout_s(problem, self.timeout_s)
            setting = " (timeout_s)" if read_s == self.timeout_s else ""
            seconds = f"{read_s:.3g}" if read_s < 100 else f"{read_s:.0f}"
            advice = f"the client waits {seconds} s{setting} for an answer"
        else:
            advice = "is the server running (`conure serve`), and is this its address?"
        address = str(httpx.URL(self.base_url).copy_with(userinfo=None))
        return ServerUnreachableError(
            f"no answer from {address}: {reason}; {advice}",
            was_sent=was_sent,
            is_known=self.is_known,
        )


def _read_timeout_s(problem: httpx.TransportError, default_s: float) -> float:
    """Return the read timeout of the request that failed."""
    try:
        read_s: float | None = problem.request.extensions["timeout"]["read"]
    except (RuntimeError, KeyError):  # the error was not raised by a request
        return default_s
    return default_s if read_s is None else read_s


def address_of(base_url: str | None, *, name: str = "base_url") -> str:
    """Return the address of a server in one form: without a final slash, and without `/v1`.

    Args:
        base_url: None: the environment variable CONURE_URL, or `DEFAULT_URL`.
        name: name of the argument, for the error message.

    Raises:
        ProgramError: `client.base_url` if it is not the address of an HTTP server.
    """
    variable = None if base_url else os.environ.get("CONURE_URL")
    name = "the environment variable CONURE_URL" if variable else name
    given = base_url or variable or DEFAULT_URL
    try:
        url = httpx.URL(given.strip())
    except httpx.InvalidURL as problem:
        reason = "it is not a valid URL" if "@" in given else str(problem)
        raise _invalid_url(name, given, reason) from None
    if url.scheme not in ("http", "https"):
        example = DEFAULT_URL if "//" in given else f"http://{re.split('[?#]', given.strip())[0]}"
        raise _invalid_url(name, given, "it does not begin with http:// or https://", example)
    if not url.host or "%" in url.host:
        raise _invalid_url(name, given, "it has no valid host name")
    if url.port is not None and not 0 < url.port <= MAX_PORT:
        raise _invalid_url(name, given, f"its port is not between 1 and {MAX_PORT:,}")
    if url.query or url.fragment:
        example = str(url.copy_with(query=None, fragment=None)).rstrip("/")
        raise _invalid_url(name, given, "it has a query or a fragment", example)
    if route := _ROUTE.search(url.path):
        example = str(url.copy_with(path=url.path[: route.start()] or "/")).rstrip("/")
        raise _invalid_url(name, given, f"{route[0]} is a route of it", example)
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")


def _invalid_url(name: str, given: str, reason: str, example: str = DEFAULT_URL) -> ProgramError:
    shown = repr(_without_user(given))
    message = f"{name} {shown} is not the address of a server: {reason}; write for example"
    return ProgramError("client.base_url", f"{message} {_without_user(example)}")


def _without_user(url: str) -> str:
    """Return a URL, or what was meant to be one, without the user and the password in it."""
    scheme, slashes, rest = url.rpartition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def types_query(types: Collection[EventType] | None) -> dict[str, list[str]]:
    """Return the query for events of these types, or of all types for None."""
    # An empty list would select all types. The last event is always sent, so naming it is safe.
    return {} if types is None else {"types": sorted({*types, LAST})}


def attach_arguments(wait_s: float | None) -> dict[str, Any]:
    """Return the arguments of `submit` for a caller that only waits for the outputs.

    Without a time limit the values arrive on the event stream, which saves a round trip. With a
    limit they are polled, because a stream has no time limit per value.
    """
    return {"follow": True, "types": ["variable.committed"]} if wait_s is None else {}


def begins_event_stream(response: httpx.Response, limit_s: float | None) -> bool:
    """Return whether a response is the event stream of the program in its Location header.

    If so, extend its read timeout: a stream may be silent for longer than a reply may take.

    Args:
        response: to a submission.
        limit_s: how long the caller waits; None: without a limit.
    """
    headers = response.headers
    is_events = headers.get("content-type", "").startswith(EVENT_STREAM)
    if not (is_events and response.is_success and "location" in headers):
        return False
    response.request.extensions["timeout"]["read"] = _silence_s(limit_s)
    return True


def _silence_s(limit_s: float | None) -> float:
    """Return the read timeout of an event stream whose caller waits for at most `limit_s`."""
    return STREAM_SILENCE_S if limit_s is None else min(STREAM_SILENCE_S, limit_s)


def reply_of(response: httpx.Response, body: bytes, stream: httpx.Response | None = None) -> Reply:
    """Return a response as a reply."""
    url = str(response.url.copy_with(query=None, userinfo=None))
    return Reply(response.status_code, response.headers, body, stream, url)


def committed_values(events: list[Event]) -> dict[str, Json]:
    """Return the values that the events report, by variable."""
    return {
        event.data["variable"]: event.data["value"]
        for event in events
        if event.type == "variable.committed"
    }


def has_failure(events: list[Event]) -> bool:
    """Return whether a node ended without values for its variables."""
    return any(event.type in FAILURE_EVENTS for event in events)


def has_last_event(events: list[Event]) -> bool:
    """Return whether no more events follow."""
    return any(event.type == LAST for event in events)


class AttachedStream(NamedTuple):
    """The event stream that a program's submission was answered with."""

    response: httpx.Response
    types: Collection[EventType] | None

    def serves(self, reader: EventReader) -> bool:
        """Return whether the stream has the events of a reader, from the first to the last."""
        return reader.is_complete and self.types == reader.types


class EventReader:
    """One reader of a program's events, over any number of connections."""

    def __init__(
        self,
        settings: ClientSettings,
        program: str,
        after: int,
        types: Collection[EventType] | None,
        *,
        follow: bool = True,
        retry: Retry | None = None,
    ) -> None:
        """Start before the first connection.

        Args:
            settings: of the client.
            program: its id.
            after: skip events with this sequence number or a lower one.
            types: only events of these types, and the last event. None: all events.
            follow: wait for new events until the program ends.
            retry: instead of the policy of the client.
        """
        self.is_over = False
        """The program's last event was returned."""
        self.types = types
        self.is_complete = follow and not after
        """Whether all events of the program are read."""
        self.program = program
        self.retry = retry or settings.retry
        self._settings = settings
        self._path = f"{program_path(program)}/events"
        self._follow = follow
        self._cursor = Cursor(after)
        self._num_failures = 0
        """Refused or empty connections since the last event. Both lengthen the delay."""
        self._num_refusals = 0
        """Refused connections since the server last sent something."""
        self._outage = OutageTimer(self.retry)
        self._delay_s = 0.0
        self._is_empty = True
        """Whether no event was received on the current connection."""
        self._has_program_ended = False
        """Whether the program's status is final. Its last events may still be unread."""

    def stream_arguments(self) -> dict[str, Any]:
        """Return the arguments of httpx's `stream` for the next connection."""
        self._cursor.reconnect()
        self._delay_s = 0.0
        self._is_empty = True
        return {
            "method": "GET",
            "url": self._path,
            "params": {
                "after": str(self._cursor.after),
                **types_query(self.types),
                **({} if self._follow else {"follow": "false"}),
            },
            "headers": EVENT_HEADERS,
            "timeout": httpx.Timeout(
                self._settings.timeout_s,
                connect=min(CONNECT_TIMEOUT_S, self._settings.timeout_s),
                read=_silence_s(self.retry.reply_timeout_s()),
            ),
        }

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that a chunk completes."""
        self._settings.is_known = True
        self._outage.reset()  # a ping counts as an answer, too
        self._num_refusals = 0
        events = self._cursor.feed(chunk)
        for event in events:
            if event.type == "server.draining":
                continue
            self._num_failures = 0
            self._is_empty = False
            self.is_over = self.is_over or event.type == LAST
        return events

    def on_refusal(self, reply: Reply) -> None:
        """Record a reply that is not a stream.

        Raises:
            ConureError: if the reply is final or the retries are used up.
        """
        if not is_retryable(reply, self.retry, self._num_refusals):
            raise error_of(reply)
        self._num_refusals += 1
        self._add_failure(error_of(reply).retry_after_s)

    def on_end(self) -> None:
        """Record that the server ended the stream."""
        self.is_over = self.is_over or not self._follow

    def on_disconnect(self, problem: httpx.TransportError) -> None:
        """Record that the connection broke.

        Raises:
            ServerUnreachableError: if the server has sent nothing for too long.
        """
        if not self.is_over:
            failure = self._settings.unreachable(problem)
            self._delay_s = self._outage.next_delay_s(failure)
            if self._outage.num_tries == 1:
                logger.warning("connection lost (%s); reconnecting", problem)

    def may_have_ended(self) -> bool:
        """Return whether the stream ended normally without an event, as after a program's end."""
        return self._is_empty and not self._delay_s and not self.is_over

    def on_ended(self) -> None:
        """Record that the program has ended, after a connection without an event.

        Its last events may be newer than the connection, so they are read over one more. If that
        one is empty, too, the server no longer has them.
        """
        self.is_over = self._has_program_ended
        self._has_program_ended = True

    def next_delay_s(self) -> float:
        """Return the delay before the next connection."""
        if self._is_empty and not self._delay_s and not self._has_program_ended:
            self._add_failure(None)
        return self._delay_s

    def _add_failure(self, asked_s: float | None) -> None:
        self._delay_s = self.retry.delay_s(self._num_failures, asked_s)
        self._num_failures += 1
