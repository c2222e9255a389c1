"""What it costs and how it goes: sums for tenants, and numbers for operators.

`/v1/usage` is a tenant's own and comes from the journal; `/metrics` is the process's own, for
Prometheus. Requests are counted here, at the edge, because only the edge sees them.

Kept true: a request adds no label of its own. Its path counts by the template of its route, so
ids make no series; what no route takes is not counted.
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
from .connection import RequestError, service_of, tenant_of
from .document import problems

SECONDS = (0.005, 0.05, 0.5, 5.0, 60.0)
"""Upper ends of what requests take; some wait for values."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")

Since = Annotated[
    str | None,
    QueryParameter(name="since", max_length=10, description="First day, YYYY-MM-DD (UTC)."),
]
Until = Annotated[
    str | None,
    QueryParameter(name="until", max_length=10, description="Last day, YYYY-MM-DD (UTC)."),
]


class Requests(ASGIMiddleware):
    """Counts and times requests until the last byte of their answers."""

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
        """Passes the request on, and counts it however it ends."""
        began = time.perf_counter()
        status = "none"  # of who left before there was an answer

        async def listen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = f"{message['status'] // 100}xx"
            await send(message)

        try:
            await next_app(scope, receive, listen)
        except ConureError as error:  # a gate's, which is answered further out
            status = f"{error.status // 100}xx"
            raise
        finally:
            method, route = str(scope.get("method")), scope.get("path_template", "")
            took_s = time.perf_counter() - began
            self._seconds.labels(method, route, status).observe(took_s)


@get("/metrics", media_type=CONTENT_TYPE_LATEST, responses=problems(), tags=["server"])
async def read_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """What operators watch, for Prometheus."""
    requests: Requests = request.app.state.requests
    page = await service_of(request).metrics() + generate_latest(requests.registry)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@get("/v1/usage", responses=problems(), tags=["server"])
async def read_usage(
    request: Request[Any, Any, Any], since: Since = None, until: Until = None
) -> UsageReport:
    """Sums the receipts of your programs that ended on these days, both included."""
    return await service_of(request).usage(
        tenant=tenant_of(request), since=_day("since", since), until=_day("until", until)
    )


def _day(name: str, text: str | None) -> str | None:
    """A day as the journal writes it.

    Raises:
        RequestError: if it is none.
    """
    if text is None:
        return None
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text).isoformat()
    except ValueError:
        pass
    raise RequestError("request.invalid", f"{name} must be a day as in 2026-01-31, not {text!r}")


ROUTES = (read_metrics, read_usage)
