"""What a flow yields and receives.

Every operation is a *flow*: a generator that yields requests and sleeps and receives replies, so
that `Client` and `AsyncClient` run the same code.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

EVENT_STREAM: Final = "text/event-stream"
EVENT_HEADERS: Final = {"accept": EVENT_STREAM, "accept-encoding": "identity"}


class Request(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    body: bytes | None = None
    query: dict[str, str] = {}  # noqa: RUF012 - never written to
    headers: dict[str, str] = {}  # noqa: RUF012
    wait_s: float = 0.0
    """How long the server may hold the request, on top of the client's timeout."""
    timeout_s: float | None = None
    """Longest wait for the reply. None: the client's timeout and `wait_s`."""
    repeatable: bool = True
    accepts_stream: bool = False
    """The reply may be an event stream, which then stays open."""


class Reply(NamedTuple):
    """One HTTP reply, read completely unless it is an event stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: Any = None
    """The open response, if it is an event stream."""
    url: str = ""
    """The address that the reply came from, without the query."""


class Sleep(NamedTuple):
    """A pause of the flow."""

    delay_s: float


Flow: TypeAlias = Generator[Request | Sleep, Reply | None, T]
