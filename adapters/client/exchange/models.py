"""Operations on models: list, tokenize, embed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from conure.server.program.ir import Json

from ..json_encoding import encode_json
from .records import Flow, Request
from .retry import Retry
from .transfer import fetch

EMBEDDING_BATCH: Final = 64
"""Texts of one request, at most."""
EMBEDDING_CHARS: Final = 65_536
"""Characters of the texts of one request, unless one text is longer."""
EMBEDDING_WAIT_S: Final = 600.0
"""How long a server may compute before it answers. On a CPU, a request takes seconds."""


class _ModelPage(msgspec.Struct, frozen=True):
    data: list[dict[str, Json]]


def list_all(retry: Retry) -> Flow[list[dict[str, Json]]]:
    """Read the list of models."""
    return (yield from fetch(Request("GET", "/v1/models"), retry, _ModelPage)).data


def find_named(models: Iterable[dict[str, Json]], name: str) -> dict[str, Json] | None:
    """Return the model with this id or alias, None if there is none."""
    named = (each for each in models if name in (each["id"], *each.get("aliases", ())))
    return next(named, None)


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
    for batch in _batches(texts):
        body: dict[str, Json] = {"model": model, "input": batch}
        if dimensions is not None:
            body["dimensions"] = dimensions
        request = Request("POST", "/v1/embeddings", encode_json(body), wait_s=EMBEDDING_WAIT_S)
        page = yield from fetch(request, retry, _EmbeddingPage)
        vectors += [each.embedding for each in page.data]
    return vectors


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts of each request."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        if batch and (len(batch) == EMBEDDING_BATCH or num_chars + len(text) > EMBEDDING_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += len(text)
    if batch:
        yield batch
