"""Operations on models: list, tokenize, embed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from conure.server.program.ir import Json

from ..json_encoding import encode_json
from .records import Flow, Request
from .retry import Retry
from .transfer import fetch

EMBEDDING_BATCH: Final = 64
"""Texts of one request."""


class _ModelPage(msgspec.Struct, frozen=True):
    data: list[dict[str, Json]]


def list_all(retry: Retry) -> Flow[list[dict[str, Json]]]:
    """Read the list of models."""
    return (yield from fetch(Request("GET", "/v1/models"), retry, _ModelPage)).data


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


def tokenize(body: Json, retry: Retry) -> Flow[list[int]]:
    """Return the token ids of a prompt."""
    request = Request("POST", "/v1/tokenize", encode_json(body))
    return (yield from fetch(request, retry, _Tokens)).tokens


class _Embedding(msgspec.Struct, frozen=True):
    embedding: list[float]


class _EmbeddingPage(msgspec.Struct, frozen=True):
    data: list[_Embedding]


def embed(
    texts: Sequence[str], retry: Retry, *, model: str, dimensions: int | None
) -> Flow[list[list[float]]]:
    """Return the embeddings of texts, in requests of bounded size."""
    vectors: list[list[float]] = []
    for begin in range(0, len(texts), EMBEDDING_BATCH):
        body: dict[str, Json] = {
            "model": model,
            "input": list(texts[begin : begin + EMBEDDING_BATCH]),
        }
        if dimensions is not None:
            body["dimensions"] = dimensions
        request = Request("POST", "/v1/embeddings", encode_json(body))
        page = yield from fetch(request, retry, _EmbeddingPage)
        vectors += [each.embedding for each in page.data]
    return vectors
