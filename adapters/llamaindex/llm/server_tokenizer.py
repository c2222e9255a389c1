"""The tokenizer of a server's model, for LlamaIndex's counts."""

from __future__ import annotations

import functools
from typing import Final

from ...client import Client

MAX_CACHED_TEXTS: Final = 65_536
"""LlamaIndex splits a text into words and counts each, so most texts are short and are counted
again and again."""


class ServerTokenizer:
    """Converts a text to token ids with `/v1/tokenize`: one request for a text that is new."""

    def __init__(self, client: Client, model: str) -> None:
        """Send nothing yet.

        Args:
            client: client of the server.
            model: name of the model on the server.
        """
        self._tokenize = functools.lru_cache(MAX_CACHED_TEXTS)(
            functools.partial(_token_ids, client, model)
        )

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            ConureError: if the server cannot answer.
        """
        return list(self._tokenize(text)) if text else []


def _token_ids(client: Client, model: str, text: str) -> tuple[int, ...]:
    return tuple(client.tokenize(text, model=model))
