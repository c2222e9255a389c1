"""What handlers add to the OpenAPI document that Litestar derives from them.

Handlers read raw bytes, so that Conure's decoder validates the body rather than Litestar. An
operation therefore refers to the schemas of its bodies, which `openapi_document` adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from litestar import MediaType
from litestar.openapi import ResponseSpec
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
