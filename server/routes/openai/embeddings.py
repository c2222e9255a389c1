"""`/v1/embeddings`: refused, because no engine returns the hidden states of a text."""

from __future__ import annotations

from typing import Any

from litestar import Request, post

from ...program.errors import ConureError
from ...program.ir import Json
from ..openapi import error_responses
from .errors import ErrorAnswer


class NotImplementedByModelError(ConureError):
    """No model of this server can do what the request asks for."""

    status = 501


@post(
    "/v1/embeddings",
    status_code=200,
    responses=error_responses(501, content=ErrorAnswer),
    tags=["openai"],
)
async def create_embeddings(request: Request[Any, Any, Any]) -> Json:
    """Refuse to create embeddings."""
    raise NotImplementedByModelError(
        "embeddings_not_supported",
        "the models of this server generate text and give no embeddings: use another server for "
        "/v1/embeddings",
    )


ROUTES = (create_embeddings,)
