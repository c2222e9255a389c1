"""LangChain's `Embeddings` on a Conure server."""

from __future__ import annotations

import os

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr

from ..client import AsyncClient, Client
from ..client.client_cache import ModelClients


class ConureEmbeddings(BaseModel, Embeddings):
    """Embeddings of texts by a model on a Conure server that was started with `--embeddings`.

    An embedding is the mean of the model's last hidden states, scaled to length 1.

    Example:
        ```python
        vectors = ConureEmbeddings().embed_documents(["a tree", "a house"])
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    model: str = "default"
    """Name of a model on the server."""
    dimensions: int | None = Field(default=None, ge=1)
    """Number of components to keep. None: all."""
    base_url: str | None = None
    """URL of the server. None: the environment variable CONURE_URL, else 127.0.0.1:8400."""
    api_key: SecretStr | None = Field(
        default_factory=lambda: SecretStr(key) if (key := os.getenv("CONURE_API_KEY")) else None
    )
    """Bearer token for a proxy. Default: that of the environment variable CONURE_API_KEY. None: no
    token."""
    default_headers: dict[str, str] | None = Field(default=None, repr=False)
    """HTTP headers that are sent with every request, for example for a proxy."""
    client: Client | None = Field(default=None, exclude=True)
    """An open client, used instead of `base_url`. This object does not close it."""
    max_retries: int = Field(default=4, ge=0)
    """Number of retries of a refused request (status 429, 502, 503, 504). A request that gets no
    answer is sent again for some seconds. 0 disables both."""

    _clients: ModelClients = PrivateAttr(default_factory=ModelClients)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the embeddings of texts.

        Raises:
            ConureError: if the server has no embeddings, or a text is empty or too long.
        """
        return self.connection().embed(texts, model=self.model, dimensions=self.dimensions)

    def embed_query(self, text: str) -> list[float]:
        """Return the embedding of a query, the same as of a document with this text."""
        return self.embed_documents([text])[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """`embed_documents` for asyncio."""
        client = self.async_connection()
        return await client.embed(texts, model=self.model, dimensions=self.dimensions)

    async def aembed_query(self, text: str) -> list[float]:
        """`embed_query` for asyncio."""
        return (await self.aembed_documents([text]))[0]

    def connection(self) -> Client:
        """Return the client that requests go through.

        Raises:
            ProgramError: `client.base_url` if the URL is invalid.
        """
        if self.client is not None:
            return self.client
        key = None if self.api_key is None else self.api_key.get_secret_value()
        headers = tuple(sorted((self.default_headers or {}).items()))
        return self._clients.client(self.base_url, self.max_retries, key, headers=headers)

    def async_connection(self) -> AsyncClient:
        """Return the client for coroutines."""
        return self._clients.asynchronous(self.connection())
