"""The OpenAPI document at `/schema`, as JSON and YAML, without a viewer that loads external files.

Invariants: the first request for a format makes it, in a thread, because this takes half a second;
the event loop serves other requests meanwhile. Each format is made once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
from litestar import Litestar, Request, get
from litestar.openapi import OpenAPIConfig
from litestar.response.base import ASGIResponse
from litestar.types import ControllerRouterHandler
from msgspec import Struct

JSON = "application/vnd.oai.openapi+json"
YAML = "application/vnd.oai.openapi"


class OpenApiDocument:
    """The document of an application, made on demand.

    Args:
        version: version of Conure.
        routes: returns the handlers that the document describes. `ROUTES` is not among them.
        bodies: the structs that `json_body` refers to.
    """

    def __init__(
        self,
        version: str,
        routes: Callable[[], Sequence[ControllerRouterHandler]],
        bodies: Sequence[type[Struct]],
    ) -> None:
        self._version = version
        self._routes = routes
        self._bodies = bodies
        self._lock = asyncio.Lock()

    async def json(self) -> bytes:
        """Return the document as JSON."""
        async with self._lock:
            return await asyncio.to_thread(lambda: self._json)

    async def yaml(self) -> bytes:
        """Return the document as YAML."""
        async with self._lock:
            return await asyncio.to_thread(lambda: self._yaml)

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(self._complete())

    @cached_property
    def _yaml(self) -> bytes:
        # Loaded on demand: few requests need it. It has no type stubs.
        import yaml  # type: ignore[import-untyped]

        document: bytes = yaml.dump(msgspec.json.decode(self._json), encoding="utf-8")
        return document

    def _complete(self) -> dict[str, Any]:
        """Return what Litestar derives from the handlers, with the schemas of the bodies."""
        document = self._derived()
        components = document.get("components", {})
        schemas = {**components.get("schemas", {}), **_schemas_of(self._bodies)}
        return {**document, "components": {**components, "schemas": schemas}}

    def _derived(self) -> dict[str, Any]:
        # Litestar's own route would make the document on the event loop. So a second application,
        # used only in this method, describes the handlers.
        described = Litestar(
            self._routes(),
            openapi_config=OpenAPIConfig(
                title="Conure",
                version=self._version,
                summary="A server for LLM applications: whole programs of LLM calls.",
                use_handler_docstrings=True,
            ),
            logging_config=None,
        )
        return described.openapi_schema.to_schema()


def _schemas_of(bodies: Sequence[type[Struct]]) -> dict[str, Any]:
    """Return the schemas of structs by the names that references use.

    The schema of a node kind has its public name: `Map` instead of `MapNode`.
    """
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    text = msgspec.json.encode(schemas)
    text = re.sub(rb'"(#/components/schemas/)?([A-Z][a-z]+)Node"', rb'"\1\2"', text)
    published: dict[str, Any] = msgspec.json.decode(text)
    return published


@get(["/schema", "/schema/openapi.json"], include_in_schema=False)
async def read_json(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Return the OpenAPI document as JSON."""
    document: OpenApiDocument = request.app.state.openapi
    return ASGIResponse(body=await document.json(), media_type=JSON)


@get(["/schema/openapi.yaml", "/schema/openapi.yml"], include_in_schema=False)
async def read_yaml(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Return the OpenAPI document as YAML."""
    document: OpenApiDocument = request.app.state.openapi
    return ASGIResponse(body=await document.yaml(), media_type=YAML)


ROUTES = (read_json, read_yaml)
