"""LlamaIndex's embedding model on a Conure server."""

from __future__ import annotations

import os
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, model_validator

from ..client import AsyncClient, Client
from ..client.client_cache import ModelClients
from .client_pickling import state_without_client
from .llm.request_options import refuse_unknown


class ConureEmbedding(BaseEmbedding):
    """Embeddings of texts by a model on a Conure server that was started with `--embeddings`.

    An embedding is the mean of the model's last hidden states, scaled to length 1.

    Example:
        ```python
        index = VectorStoreIndex.from_documents(documents, embed_model=ConureEmbedding())
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    model_name: str = "default"
    """Name of a model on the server."""
    dimensions: int | None = Field(default=None, ge=1)
    """Number of components to keep. None: all."""
    base_url: str | None = None
    """URL of the server. None: the environment variable CONURE_URL, else 127.0.0.1:8400."""
    api_key: str | None = Field(default=None, exclude=True, repr=False)
    """Bearer token for a proxy. None: the environment variable CONURE_API_KEY."""
    default_headers: dict[str, str] | None = Field(default=None, exclude=True, repr=False)
    """HTTP headers that are sent with every request, for example for a proxy."""
    client: Client | None = Field(default=None, exclude=True)
    """An open client, used instead of `base_url`. This object does not close it."""
    max_retries: int = Field(default=4, ge=0)
    """Number of retries of a refused request (status 429, 502, 503, 504). A request that gets no
    answer is sent again for some seconds. 0 disables both."""

    _clients: ModelClients = PrivateAttr(default_factory=ModelClients)

    _refuse_unknown = model_validator(mode="before")(classmethod(refuse_unknown))  # type: ignore[arg-type]  # pydantic binds it

    def __getstate__(self) -> dict[Any, Any]:
        return state_without_client(self, super().__getstate__)

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex serializes this class."""
        return "conure_embedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self.connection().embed(texts, model=self.model_name, dimensions=self.dimensions)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        client = self.async_connection()
        return await client.embed(texts, model=self.model_name, dimensions=self.dimensions)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aget_text_embeddings([text]))[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await self._aget_text_embedding(query)

    def connection(self) -> Client:
        """Return the client that requests go through.

        Raises:
            ProgramError: `client.base_url` if the URL is invalid.
        """
        if self.client is not None:
            return self.client
        key = self.api_key or os.environ.get("CONURE_API_KEY")
        headers = tuple(sorted((self.default_headers or {}).items()))
        return self._clients.client(self.base_url, self.max_retries, key, headers=headers)

    def async_connection(self) -> AsyncClient:
        """Return the client for coroutines."""
        return self._clients.asynchronous(self.connection())
