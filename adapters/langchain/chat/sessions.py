"""Inference of sessions from message histories.

An agent without a thread id sends the whole history with every call. A call whose messages start
with those of an earlier call and its answer therefore belongs to the session of that call, and
keeps its place in line on the server. Thread-safe.

Invariants: a recorded answer is continued at most once per time it was recorded, so that two users
with equal histories get two sessions; system messages are ignored, because each agent of a team has
its own; the latest `MAX_RECORDED_ANSWERS` answers can be continued, and the conversation of an
older answer continues as a new session. A copy of this object has no recorded answers.

The garbage collector may call `record` and `restore` in a thread that holds the lock: it closes
generators of LangChain, which read their inputs to the end. Both methods take no lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from conure.server.program.ir import Json

from ...client.client_cache import UnsharedState

MAX_RECORDED_ANSWERS: Final = 1_000
_COMPARED_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
"""Message fields that are compared. Names are not: agents add them to answers."""


class ResumedSession(NamedTuple):
    """A session that a call continues, or can continue."""

    session: str
    history_hash: bytes
    """Hash of the history that the call continues."""


class SessionInference(UnsharedState):
    """Sessions by message history."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[ResumedSession] = deque(maxlen=MAX_RECORDED_ANSWERS)
        """Recorded and restored sessions that are not in `_sessions` yet."""
        self._sessions: OrderedDict[bytes, deque[str]] = OrderedDict()
        """By hash of the history up to an answer. Several sessions may have equal histories."""
        self._num_sessions = 0

    def resume(self, messages: Sequence[dict[str, Json]]) -> ResumedSession | None:
        """Take the session that a call continues; None if there is no such session.

        Other calls do not get the session, unless a failed call restores it.
        """
        if not any(message["role"] == "assistant" for message in messages):
            return None
        ends = [*_history_hashes(messages)]
        with self._lock:
            self._put_pending()
            # The longest history is the latest; the shorter ones have been continued.
            for end in reversed(ends):
                if end in self._sessions:
                    return ResumedSession(self._take(end), end)
        return None

    def restore(self, resumed: ResumedSession) -> None:
        """Make the session of a failed call available to its retry."""
        self._pending.append(resumed)

    def record(
        self, messages: Sequence[dict[str, Json]], answer: dict[str, Json], session: str
    ) -> None:
        """Record the answer to a call.

        Args:
            messages: messages of the call.
            answer: as a message.
            session: session of the call, or a new one.
        """
        (*_, end) = _history_hashes([*messages, answer])
        self._pending.append(ResumedSession(session, end))

    def _put_pending(self) -> None:
        while self._pending:
            pending = self._pending.popleft()
            self._put(pending.history_hash, pending.session)

    def _put(self, end: bytes, session: str) -> None:
        self._sessions.setdefault(end, deque()).append(session)
        self._sessions.move_to_end(end)
        self._num_sessions += 1
        if self._num_sessions > MAX_RECORDED_ANSWERS:
            oldest = next(iter(self._sessions))
            self._sessions[oldest].popleft()
            self._count_removed(oldest)

    def _take(self, end: bytes) -> str:
        # Calls without follow-ups leave old entries, so the latest entry is the most probable one.
        session = self._sessions[end].pop()
        self._count_removed(end)
        return session

    def _count_removed(self, end: bytes) -> None:
        self._num_sessions -= 1
        if not self._sessions[end]:
            del self._sessions[end]


def _history_hashes(messages: Sequence[dict[str, Json]]) -> Iterator[bytes]:
    """Yield the hash of the history up to each answer."""
    history = blake2b(digest_size=16)
    for message in messages:
        if message["role"] == "system":
            continue
        parts = [message.get(name) for name in _COMPARED_FIELDS]
        history.update(msgspec.json.encode(parts))
        if message["role"] == "assistant":
            yield history.copy().digest()
