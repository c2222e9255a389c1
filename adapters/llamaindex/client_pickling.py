"""Pickling of LlamaIndex components that have an open client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def state_without_client(component: Any, state: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Return the state of a component, with the URL of the server in place of an open client.

    LlamaIndex would remove the client, which cannot be pickled, from the component itself.

    Args:
        component: has the fields `client` and `base_url`.
        state: the component's `__getstate__` of LlamaIndex.

    Raises:
        TypeError: if the client has no URL.
    """
    if component.client is None:
        return state()
    if not isinstance(component.client.server, str):
        component.client.__reduce__()  # raises with the reason
    travelling = {"client": None, "base_url": component.client.server}
    made: dict[Any, Any] = component.model_copy(update=travelling).__getstate__()
    return made
