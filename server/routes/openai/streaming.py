"""Streams of the completion endpoints: SSE events without names, ended by `[DONE]`."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import Struct

from .execution import CompletionDelta, RequestResult

DONE = b"data: [DONE]\n\n"


def sse_data(content: Struct | dict[str, Any]) -> bytes:
    """Encode one event of a stream."""
    return b"data: %s\n\n" % msgspec.json.encode(content)


class ChunkBuilder(Protocol):
    """Builds the response of one endpoint."""

    def complete(self, final: RequestResult) -> Struct:
        """Return the response of a request that does not stream."""
        ...

    def start(self) -> bytes:
        """Return the chunks before the first delta."""
        ...

    def delta(self, delta: CompletionDelta) -> bytes:
        """Return the chunk of one delta."""
        ...

    def end(self, final: RequestResult) -> bytes:
        """Return the chunks after the last delta."""
        ...
