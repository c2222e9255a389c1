"""Clients that LangChain and LlamaIndex models create at first use.

Invariants: all models of a process with equal settings share one client, and so its connections.
The cache holds the clients of the `MAX_CLIENTS` settings that were used last. A client that leaves
the cache lives as long as an object refers to it. Its connections are closed with it, or at exit.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Final, Self

from .async_client import AsyncClient
from .connection import address_of
from .exchange.retry import Retry
from .sync_client import Client

MAX_CLIENTS: Final = 64
DEFAULT_TIMEOUT_S: Final = 30.0


class UnsharedState:
    """State of a model that is neither compared nor copied.

    All instances are equal, because pydantic compares private attributes, and a copy of the model
    starts with a new instance.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class ModelClients(UnsharedState):
    """The clients that one model uses; other models with equal settings use the same ones."""

    def __init__(self) -> None:
        self._used: set[AsyncClient] = set()

    def client(
        self,
        base_url: str | None,
        max_retries: int,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> Client:
        """Return the client for these settings.

        Args:
            base_url: URL of the server, as in `Client`.
            max_retries: as in `Retry`.
            api_key: sent as a bearer token.
            timeout_s: for one call; also limits how long a server without an answer is waited for.
            headers: sent with every request.

        Raises:
            ProgramError: `client.base_url` if the URL is invalid.
        """
        if api_key is not None:
            headers = (*headers, ("authorization", f"Bearer {api_key}"))
        return _shared_client(address_of(base_url), max_retries, timeout_s, headers).client()

    def asynchronous(self, client: Client) -> AsyncClient:
        """Return the `AsyncClient` with the settings of a client, which `aclose` closes.

        Args:
            client: from `client`, or a client that the user passed to the model.
        """
        self._used.add(client.twin)
        return client.twin

    async def aclose(self) -> None:
        """Close the asynchronous connections of the running loop before the loop ends."""
        for client in tuple(self._used):  # another task may add a client meanwhile
            await client.close()


class SharedClient:
    """Creates the client of one combination of settings at first use, and after it was closed."""

    def __init__(
        self,
        base_url: str,
        max_retries: int,
        timeout_s: float | None,
        headers: tuple[tuple[str, str], ...],
    ) -> None:
        self._create = functools.partial(
            Client,
            base_url,
            timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else min(DEFAULT_TIMEOUT_S, timeout_s),
            retry=Retry(max_retries=max_retries).bounded(timeout_s),
            headers=dict(headers),
        )
        self._lock = threading.Lock()
        self._client: Client | None = None

    def client(self) -> Client:
        """Return the client; create it at first use and after it was closed."""
        with self._lock:
            if self._client is None or self._client.is_closed:
                self._client = self._create()
                self._client.close_with_last_use()
            return self._client


_shared_client = functools.lru_cache(MAX_CLIENTS)(SharedClient)
