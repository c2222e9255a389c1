"""Which calls belong together, where nothing but what they say tells it.

An agent that knows no thread asks again and again, each time with all that was said before. So
a call whose messages begin with those of an earlier call and its answer goes on with it, and is
of the same session: it keeps its place in line on the server, as if the agent had named one.

Knows messages in the shape of a program. Refuses to know LangChain, runs and what a session
is good for. Safe for any number of threads.

Kept true: what was said is gone on with once, and as often as it was said, so that two users who
were told the same are two; what a system message says does not count, because the parts of a team
have one each; what is remembered is bounded, and what is forgotten costs a place in line and
nothing else. A copy begins with nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from conure.server.program.ir import Json

from ..own import Own

MAX_CONVERSATIONS: Final = 1_000
_SAID = ("role", "content", "tool_calls", "tool_call_id")
"""What of a message counts: agents put names to answers."""


class Resumed(NamedTuple):
    """What a call goes on with."""

    session: str
    end: bytes
    """Of what was said before, hashed."""


class Conversations(Own):
    """What was said last, and the sessions that it was said in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[bytes, deque[str]] = OrderedDict()
        """By what was said up to the answer; the same may have been said in several."""
        self._num_sessions = 0

    def resumed(self, messages: Sequence[dict[str, Json]]) -> Resumed | None:
        """What a call goes on with; None if it begins a session, or stands alone.

        Nobody else goes on with it then; a call that comes to nothing gives it back.
        """
        if not any(message["role"] == "assistant" for message in messages):
            return None
        ends = [*_ends(messages)]
        with self._lock:
            # The longest beginning is the latest: what stands before it was gone on with.
            for end in reversed(ends):
                if end in self._sessions:
                    return Resumed(self._take(end), end)
        return None

    def give_back(self, resumed: Resumed) -> None:
        """The call has no answer: who tries again goes on with the same."""
        self._put(resumed.end, resumed.session)

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
        self._put(end, session)

    def _put(self, end: bytes, session: str) -> None:
        with self._lock:
            self._sessions.setdefault(end, deque()).append(session)
            self._sessions.move_to_end(end)
            self._num_sessions += 1
            if self._num_sessions > MAX_CONVERSATIONS:
                oldest = next(iter(self._sessions))
                self._sessions[oldest].popleft()
                self._one_less(oldest)

    def _take(self, end: bytes) -> str:
        # The latest one: where many stand alone, those before it are not gone on with.
        session = self._sessions[end].pop()
        self._one_less(end)
        return session

    def _one_less(self, end: bytes) -> None:
        self._num_sessions -= 1
        if not self._sessions[end]:
            del self._sessions[end]


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
