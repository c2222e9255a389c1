"""Which calls belong together, where nothing but what they say tells it.

An agent that knows no thread asks again and again, each time with all that was said before. So
a call whose messages begin with those of an earlier call and its answer goes on with it, and is
of the same session: it keeps its place in line on the server, as if the agent had named one.

Knows messages in the shape of a program. Refuses to know LangChain, runs and what a session
is good for. Safe for any number of threads.

Kept true: what was said is gone on with once, so that two users who were told the same are two;
what a system message says does not count, because the parts of a team have one each; what is
remembered is bounded, and what is forgotten costs a place in line and nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from conure.server.program.ir import Json

MAX_CONVERSATIONS: Final = 1_000
_SAID = ("role", "content", "tool_calls", "tool_call_id")
"""What of a message counts: agents put names to answers."""


class Conversations:
    """What was said last, and the session that it was said in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[bytes, str] = OrderedDict()

    def resumed(self, messages: Sequence[dict[str, Json]]) -> str | None:
        """The session that a call goes on with; None if it begins one, or stands alone."""
        if not any(message["role"] == "assistant" for message in messages):
            return None
        ends = [*_ends(messages)]
        with self._lock:
            # The longest beginning is the latest: what stands before it was gone on with.
            found = (self._sessions.pop(end, None) for end in reversed(ends))
            return next((session for session in found if session is not None), None)

    def said(
        self, messages: Sequence[dict[str, Json]], answer: dict[str, Json], session: str
    ) -> None:
        """A call has its answer.

        Args:
            messages: of the call.
            answer: as it would stand among them.
            session: of the call, or a new one.
        """
        (*_, end) = _ends([*messages, answer])
        with self._lock:
            self._sessions[end] = session
            if len(self._sessions) > MAX_CONVERSATIONS:
                self._sessions.popitem(last=False)


def _ends(messages: Sequence[dict[str, Json]]) -> Iterator[bytes]:
    """What is said up to each answer, hashed."""
    said = blake2b(digest_size=16)
    for message in messages:
        if message["role"] == "system":
            continue
        parts = [message.get(name) for name in _SAID]
        said.update(msgspec.json.encode(parts))
        if message["role"] == "assistant":
            yield said.copy().digest()
