"""The pages at `/` and `/docs`, and the files that they load from `/dashboard`.

Invariants: a page loads files of this server only, and its content security policy forbids
everything else. A client that does not accept HTML gets JSON at `/`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Struct

from ..dashboard.files import DashboardFile
from ..program.errors import NotFoundError
from .openapi import success_response
from .request_context import AnyRequest, RequestError

HTML = "text/html"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "trusted-types conure-worker",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Scripts may not create markup from text either: values of programs are text on the page."""

_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Welcome(Struct, frozen=True, kw_only=True):
    """Name, version and main pages of this server."""

    name: str
    version: str
    documentation: str
    health: str
    ready: str


@get(
    "/",
    responses={200: success_response(Welcome, "Name and main pages; or the dashboard as HTML")},
    tags=["server"],
)
async def read_root(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Return the name, version and main pages of this server; the dashboard if the client prefers
    `text/html`.
    """
    if _prefers_html(request):
        return _page(request, "index.html")
    welcome = Welcome(
        name="conure",
        version=request.app.state.version,
        documentation="/schema/openapi.json",
        health="/healthz",
        ready="/readyz",
    )
    return ASGIResponse(
        body=msgspec.json.encode(welcome),
        media_type="application/json",
        headers={"vary": "accept"},
    )


@get("/docs", include_in_schema=False)
async def read_reference(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Return the API reference, which reads the OpenAPI document."""
    return _page(request, "reference.html")


@get("/dashboard/{path:path}", include_in_schema=False)
async def read_dashboard_file(request: Request[Any, Any, Any], path: FromPath[str]) -> ASGIResponse:
    """Return a file of the dashboard."""
    return _page(request, path.lstrip("/"))


def _prefers_html(request: AnyRequest) -> bool:
    try:
        return request.accept.best_match(["application/json", HTML]) == HTML
    except OverflowError as exc:
        raise RequestError(
            "request.invalid", "a weight (q) in Accept must be between 0 and 1"
        ) from exc


def _page(request: AnyRequest, path: str) -> ASGIResponse:
    file: DashboardFile | None = request.app.state.dashboard.get(path)
    if file is None:
        raise NotFoundError("route.not_found", f"the dashboard has no file {path}")
    headers = {**_HEADERS, "etag": file.etag, "vary": "accept"}
    if request.headers.get("if-none-match") == file.etag:
        return ASGIResponse(status_code=304, headers=headers, media_type=file.content_type)
    return ASGIResponse(body=file.content, media_type=file.content_type, headers=headers)


ROUTES = (read_root, read_reference, read_dashboard_file)
