"""`/v1/embeddings`: the mean of a decoder's last hidden states over the tokens of a text.

Vectors have length 1, as OpenAI's. `dimensions` keeps the first components and scales them to
length 1 again.
"""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from litestar import Request, post
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Meta, Struct, UnsetType

from ...program.errors import ConureError, ProgramError, PromptError
from ...program.ir import Json
from ...service import ModelInfo
from ..openapi import error_responses, json_body, success_response
from ..request_context import AnyRequest, service_of, while_connected
from .errors import ErrorAnswer
from .request_fields import TokenId, read_request
from .routes import check_model

MAX_TEXTS = 2_048
"""Maximum texts of a request: OpenAI's limit."""
MAX_TOKENS = 300_000
"""Maximum tokens of all texts of a request: OpenAI's limit."""

TokenIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
TextInput: TypeAlias = Annotated[str, Meta(max_length=4_194_304)]


class EmbeddingsRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: TextInput | list[TextInput | TokenId | TokenIds]
    """A text, its token ids, or a list of texts or of token ids."""
    dimensions: Annotated[int, Meta(ge=1, le=1_048_576)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Json | UnsetType = UNSET


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of one text: numbers, or float32 numbers (little-endian) in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """The vectors of a request, in the order of its texts."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class NotImplementedByModelError(ConureError):
    """No model of this server supports the request."""

    status = 501


@post(
    "/v1/embeddings",
    status_code=200,
    operation_class=json_body(EmbeddingsRequest),
    responses={
        200: success_response(EmbeddingList, "The vectors"),
        **error_responses(404, 501, content=ErrorAnswer),
    },
    tags=["openai"],
)
async def create_embeddings(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Create embeddings: for each text, the mean of the model's last hidden states."""
    body: EmbeddingsRequest = await read_request(request, EmbeddingsRequest)
    model = check_model(request, body.model)
    embedder = service_of(request).embedder
    if not embedder.is_supported:
        raise NotImplementedByModelError(
            "embeddings_not_supported",
            "this server gives no embeddings: start it with `conure serve --embeddings`, or use "
            "another server for /v1/embeddings",
        )
    texts = await _token_ids(request, body, model)
    vectors = await while_connected(request, embedder.embed(texts))
    num_tokens = sum(map(len, texts))
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    # A request may have millions of numbers.
    content = await asyncio.to_thread(_answer, body, vectors, model.id, usage)
    return ASGIResponse(body=content, media_type="application/json", status_code=200)


def _answer(
    body: EmbeddingsRequest, vectors: Sequence[Sequence[float]], model: str, usage: EmbeddingUsage
) -> bytes:
    # One text at a time: other threads run between two of them.
    data = [
        msgspec.json.encode(Embedding(index=i, embedding=_encoded(_shortened(vector, body), body)))
        for i, vector in enumerate(vectors)
    ]
    whole = msgspec.Raw(b"[" + b",".join(data) + b"]")
    fields = {"object": "list", "data": whole, "model": model, "usage": usage}
    return msgspec.json.encode(fields)


async def _token_ids(
    request: AnyRequest, body: EmbeddingsRequest, model: ModelInfo
) -> list[list[int]]:
    """Return the token ids of all texts, as those of a completion.

    Raises:
        ProgramError: for an empty text, an unknown token id, or too many tokens.
        PromptError: `prompt.too_long`.
    """
    service = service_of(request)
    texts: list[list[int]] = []
    for path, text in _texts(body.input):
        if isinstance(text, str):
            if not text:
                raise ProgramError("empty_input", "an empty text has no embedding", path=path)
            tokenized = await service.tokenize(model.id, text, tools=[], bos=True)
            ids = tokenized.tokens
        else:
            ids = list(text)
            try:
                service.decode([max(ids)])
            except ProgramError as error:
                raise ProgramError(error.code, error.message, path=path) from None
        if len(ids) > model.context_len:
            raise PromptError(
                "prompt.too_long",
                f"the text has {len(ids)} tokens and the model reads {model.context_len}: split it",
                path=path,
            )
        texts.append(ids)
    if (num_tokens := sum(map(len, texts))) > MAX_TOKENS:
        raise ProgramError(
            "too_many_tokens",
            f"the texts have {num_tokens} tokens and a request may have {MAX_TOKENS}: send "
            "several requests",
            path="input",
        )
    return texts


def _texts(given: str | Sequence[str | int | list[int]]) -> list[tuple[str, str | list[int]]]:
    """Return the texts of an input with their paths.

    Raises:
        ProgramError: if it has none or too many, or mixes texts and token ids.
    """
    if isinstance(given, str):
        return [("input", given)]
    kinds = {type(each) for each in given}
    if len(kinds) != 1:
        what = "is an empty list" if not kinds else "mixes texts and token ids"
        raise ProgramError(
            "invalid_input", f"'input' {what}: send texts or token ids", path="input"
        )
    if kinds == {int}:
        return [("input", [each for each in given if isinstance(each, int)])]
    if len(given) > MAX_TEXTS:
        raise ProgramError(
            "too_many_texts",
            f"'input' has {len(given)} texts and a request may have {MAX_TEXTS}: send several "
            "requests",
            path="input",
        )
    return [
        (f"input[{index}]", each) for index, each in enumerate(given) if not isinstance(each, int)
    ]


def _shortened(vector: Sequence[float], body: EmbeddingsRequest) -> list[float]:
    """Return the first components of a vector, at length 1.

    Raises:
        ProgramError: if the request has more dimensions than the model.
    """
    if body.dimensions is not None and body.dimensions > len(vector):
        raise ProgramError(
            "invalid_dimensions",
            f"'dimensions' is {body.dimensions} and the model's embeddings have {len(vector)}",
            path="dimensions",
        )
    kept = vector[: body.dimensions]
    length = math.hypot(*kept) or 1.0
    return [each / length for each in kept]


def _encoded(vector: list[float], body: EmbeddingsRequest) -> list[float] | str:
    if body.encoding_format != "base64":
        return vector
    numbers = array("f", vector)
    if array("H", [1]).tobytes() != b"\x01\x00":  # pragma: no cover - a big-endian machine
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


ROUTES = (create_embeddings,)
BODIES = (EmbeddingsRequest,)
