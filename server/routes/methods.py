"""An application class that supports HEAD for every GET route and completes `Allow` headers.

A HEAD request runs as a GET whose body is dropped. A completed `Allow` header lists the methods of
all handlers of a path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from litestar import Litestar
from litestar.routes import HTTPRoute


class HttpMethods:
    """The methods of an application's paths."""

    def __init__(self, app: Litestar) -> None:
        self._methods: dict[str, set[str]] = {}
        for route in app.routes:
            if isinstance(route, HTTPRoute):
                methods = self._methods.setdefault(route.path_format, set())
                methods.update(str(method) for method in route.methods)

    def allow(self, path: str) -> bytes:
        """Return the `Allow` header of a path template."""
        return with_head(self._methods.get(path, ()))


def with_head(methods: Iterable[str]) -> bytes:
    """Return methods as an `Allow` header; GET adds HEAD."""
    names = {name.strip() for name in methods}
    return ", ".join(sorted(names | ({"HEAD"} if "GET" in names else set()))).encode()


class MethodsApp(Litestar):
    """A Litestar application with HEAD routes and complete `Allow` headers."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            await self._head(scope, receive, send)
            return

        async def send_with_allow(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, self._complete(scope, value) if name.lower() == b"allow" else value)
                    for name, value in message["headers"]
                ]
            await send(message)

        await super().__call__(scope, receive, send_with_allow)

    def _complete(self, scope: Any, allow: bytes) -> bytes:
        """Return the `Allow` header of the request's path template.

        Without a template, returns the given header with HEAD.
        """
        template = scope.get("path_template")
        of_template = HttpMethods(self).allow(template) if isinstance(template, str) else b""
        return of_template or with_head(allow.decode("ascii").split(","))

    async def _head(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the request as a GET, and send only status and headers of the response.

        The handler then receives a disconnect, which ends a stream.
        """

        async def send_head(message: Any) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        as_get: Any = {**scope, "method": "GET"}
        await super().__call__(as_get, receive, send_head)
