"""Usage and metrics: sums for tenants from the journal, and Prometheus metrics of the process.

Requests are counted here because only the HTTP layer sees them.

Invariant: requests add no new label values. A path is counted under its route template, so
ids create no series; requests without a route are not counted.
"""

from __future__ import annotations

import re
import time
from datetime import date
from typing import Annotated, Any

from litestar import Request, Response, get
from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.params import QueryParameter
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Histogram,
    Info,
    generate_latest,
)

from ..program.errors import ConureError
from ..program.status import UsageReport
from .openapi import error_responses
from .request_context import RequestError, service_of, tenant_of

SECONDS = (0.005, 0.05, 0.5, 5.0, 60.0)
"""Histogram buckets of request durations. Some requests wait for values."""
_METRICS_TYPE = CONTENT_TYPE_LATEST.replace("; charset=utf-8", "")
"""Media type of Prometheus text; Litestar adds the charset to a `text/` type."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")

Since = Annotated[
    str | None,
    QueryParameter(name="since", max_length=10, description="First day, YYYY-MM-DD (UTC)."),
]
Until = Annotated[
    str | None,
    QueryParameter(name="until", max_length=10, description="Last day, YYYY-MM-DD (UTC)."),
]


class RequestMetricsMiddleware(ASGIMiddleware):
    """Counts and times requests until the last byte of the response."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        Info("conure_build", "What runs.", registry=self.registry).info({"version": version})
        self._seconds = Histogram(
            "conure_http_request_seconds",
            "Requests, by the class of their answer's status.",
            ["method", "route", "status"],
            buckets=SECONDS,
            registry=self.registry,
        )

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass the request on, and count it however it ends."""
        started = time.perf_counter()
        status = "none"  # The client disconnected before the response started.

        async def listen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = f"{message['status'] // 100}xx"
            await send(message)

        try:
            await next_app(scope, receive, listen)
        except ConureError as error:  # Raised by a middleware and answered by an outer layer.
            status = f"{error.status // 100}xx"
            raise
        finally:
            method, route = str(scope.get("method")), scope.get("path_template", "")
            took_s = time.perf_counter() - started
            self._seconds.labels(method, route, status).observe(took_s)


@get("/metrics", media_type=_METRICS_TYPE, responses=error_responses(), tags=["server"])
async def read_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the server's metrics in Prometheus text format."""
    requests: RequestMetricsMiddleware = request.app.state.requests
    page = await service_of(request).metrics() + generate_latest(requests.registry)
    return Response(page, media_type=_METRICS_TYPE)


@get("/v1/usage", responses=error_responses(), tags=["server"])
async def read_usage(
    request: Request[Any, Any, Any], since: Since = None, until: Until = None
) -> UsageReport:
    """Return the summed receipts of your programs that ended between two days, both inclusive."""
    return await service_of(request).usage(
        tenant=tenant_of(request), since=_day("since", since), until=_day("until", until)
    )


def _day(name: str, text: str | None) -> str | None:
    """Return a day in the journal's format.

    Raises:
        RequestError: if the text is not a day.
    """
    if text is None:
        return None
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text).isoformat()
    except ValueError:
        pass
    raise RequestError("request.invalid", f"{name} must be a day such as 2026-01-31, got {text!r}")


ROUTES = (read_metrics, read_usage)
