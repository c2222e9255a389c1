"""What a model makes for itself when it first needs it, and the clients among that.

Knows what of a model a connection depends on. Refuses to know models.

Kept true: calls in several threads agree on one connection pool; settings that change have a
client of their own; a copy of a model, here or in another process, makes its clients anew.
"""

from __future__ import annotations

from typing import Any, Self

from .client import AsyncClient, Client, Retry


class Own:
    """What a model makes for itself in use, which is no part of what the model is: pydantic
    compares all of it as equal, and a copy of the model begins with one that is new.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class OwnClients(Own):
    """The clients of one model."""

    def __init__(self) -> None:
        # Filled by `setdefault`: of two threads that come at once, both get the first one's.
        self._clients: dict[tuple[str | None, int, str | None], Client] = {}
        self._asynchronous: dict[Client, AsyncClient] = {}

    def client(self, base_url: str | None, max_retries: int, api_key: str | None = None) -> Client:
        """The client for these settings.

        Args:
            base_url: of the server; as in `Client`.
            max_retries: as in `Retry`.
            api_key: sent as a bearer token.
        """
        settings = (base_url, max_retries, api_key)
        if settings not in self._clients:
            headers = None if api_key is None else {"authorization": f"Bearer {api_key}"}
            made = Client(base_url, retry=Retry(max_retries=max_retries), headers=headers)
            self._clients.setdefault(settings, made)
        return self._clients[settings]

    def asynchronous(self, client: Client) -> AsyncClient:
        """The client for coroutines beside one for threads, which may be somebody else's."""
        if client not in self._asynchronous:
            self._asynchronous.setdefault(client, client.asynchronous())
        return self._asynchronous[client]

    async def aclose(self) -> None:
        """Close the connections for coroutines that belong to the running loop."""
        for asynchronous in self._asynchronous.values():
            await asynchronous.close()
