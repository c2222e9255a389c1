"""The OpenAPI document: additions to what Litestar derives from the handlers.

Handlers read raw bytes, so that Conure's decoder validates the body rather than Litestar. The body
schemas are therefore registered here; msgspec generates them with all bounds.

The document is served as JSON and YAML only, without a viewer that would load external files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType, Request
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import (
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Reference,
    RequestBody,
    Schema,
)
from msgspec import Struct
from msgspec.json import decode, encode

from .problem import PROBLEM_JSON, ProblemDetails
from .request_context import EVENT_STREAM

_ERRORS = (400, 403, 413, 415, 429, 500, 503)


def error_responses(*more: int, content: type[Struct] = ProblemDetails) -> dict[int, ResponseSpec]:
    """Return the error responses of a route: those of every route, and `more`."""
    media_type = PROBLEM_JSON if content is ProblemDetails else "application/json"
    return {
        status: ResponseSpec(
            content,
            generate_examples=False,
            description=HTTPStatus(status).phrase,
            media_type=media_type,
        )
        for status in sorted({*_ERRORS, *more})
    }


def success_response(content: type[Struct], description: str) -> ResponseSpec:
    """Return the specification of a successful response that the handler's annotation does not
    define.
    """
    return ResponseSpec(content, generate_examples=False, description=description)


class ServerSentEvent(Struct, frozen=True, omit_defaults=True):
    """An event of a stream; `data` is JSON."""

    event: str
    data: str
    id: str = ""


def json_body(
    *bodies: type[Struct], streams: int | None = None, texts: int | None = None
) -> type[Operation]:
    """Return an operation class whose request body is the JSON of one of `bodies`.

    Args:
        bodies: the structs; none: the operation has no body.
        streams: the status of a response that may also be an event stream.
        texts: the status of a response that may also be plain text.
    """

    @dataclass
    class BodyOperation(Operation):
        def __post_init__(self) -> None:
            references = [Reference(ref=f"#/components/schemas/{b.__name__}") for b in bodies]
            if references:
                schema = references[0] if len(references) == 1 else Schema(one_of=[*references])
                content = {"application/json": OpenAPIMediaType(schema=schema)}
                self.request_body = RequestBody(content=content, required=True)
            _add_media_type(self, streams, EVENT_STREAM, Schema(type=OpenAPIType.OBJECT))
            _add_media_type(self, texts, MediaType.TEXT, Schema(type=OpenAPIType.STRING))

    return BodyOperation


def _add_media_type(
    operation: Operation, status: int | None, media_type: str, schema: Schema
) -> None:
    """Add another media type to the response of a status."""
    answer = (operation.responses or {}).get(str(status))
    if isinstance(answer, OpenAPIResponse) and answer.content is not None:
        answer.content[media_type] = OpenAPIMediaType(schema=schema)


class _BodySchemas:
    """Schemas of request bodies. They are generated when the document is requested: 40 ms."""

    def __init__(self, bodies: Sequence[type[Struct]]) -> None:
        self._bodies = bodies

    @cached_property
    def by_name(self) -> dict[str, Any]:
        """The schemas by the names that references use."""
        _, schemas = msgspec.json.schema_components(
            self._bodies, ref_template="#/components/schemas/{name}"
        )
        return _with_published_names(schemas)


class _JsonPage(JsonRenderPlugin):
    def __init__(self, bodies: _BodySchemas) -> None:
        super().__init__()
        self._bodies = bodies

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(request, _with_bodies(openapi_schema, self._bodies.by_name))


class _YamlPage(YamlRenderPlugin):
    def __init__(self, bodies: _BodySchemas) -> None:
        super().__init__()
        self._bodies = bodies

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(request, _with_bodies(openapi_schema, self._bodies.by_name))


def _with_bodies(document: dict[str, Any], bodies: dict[str, Any]) -> dict[str, Any]:
    components = document.get("components", {})
    schemas = {**components.get("schemas", {}), **bodies}
    # Defaults may be structs, which YAML cannot represent.
    complete: dict[str, Any] = msgspec.to_builtins(
        {**document, "components": {**components, "schemas": schemas}}, str_keys=True
    )
    return complete


def openapi_config(version: str, bodies: Sequence[type[Struct]]) -> OpenAPIConfig:
    """Return the OpenAPI configuration; `bodies` are the structs that `json_body` refers to."""
    schemas = _BodySchemas(bodies)
    return OpenAPIConfig(
        title="Conure",
        version=version,
        summary="A server for LLM applications: whole programs of LLM calls.",
        use_handler_docstrings=True,
        path="/schema",
        render_plugins=[_JsonPage(schemas), _YamlPage(schemas)],
    )


def _with_published_names(schemas: dict[str, Any]) -> dict[str, Any]:
    """Name the schema of each node kind by its public name: `Map` instead of `MapNode`."""
    text = re.sub(rb'"(#/components/schemas/)?([A-Z][a-z]+)Node"', rb'"\1\2"', encode(schemas))
    published: dict[str, Any] = decode(text)
    return published
