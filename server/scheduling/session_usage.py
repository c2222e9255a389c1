"""Program sessions: consecutive programs that share one place in the queue.

An agent's client may submit every turn as a separate program and name the session that they belong
to. As long as the programs follow each other closely, the scheduler treats them as one program:
with the start time of the first program, and the service that all programs received. The programs
of an agent with ten finished calls therefore precede a new agent's, as if the agent were one
program. A session without a program for longer than `MAX_SILENCE_S` starts over.

Invariants: memory is bounded. A session that is dropped only loses its place in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache

MAX_SILENCE_S = 30.0
"""How long a session keeps its place without a running call, for example while a tool works."""
MAX_SESSIONS = 10_000


@dataclass(slots=True)
class SessionUsage:
    """Start time and received service of a session, shared by its programs."""

    started_at_s: float
    attained_s: float = 0.0
    """Seconds that its ended calls ran on engines."""
    last_active_s: float = 0.0
    num_calls: int = 0
    """Calls that wait or run. The session is active as long as there are any."""

    def call_started(self) -> None:
        """Count a call that was submitted."""
        self.num_calls += 1

    def call_ended(self, now_s: float) -> None:
        """Count a call that ended or was given up."""
        self.num_calls -= 1
        self.last_active_s = now_s

    def has_expired(self, now_s: float) -> bool:
        """Return whether the session was silent for too long to be continued."""
        return not self.num_calls and now_s - self.last_active_s > MAX_SILENCE_S


class SessionTable:
    """The sessions of all tenants. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._sessions: LRUCache[tuple[str, str], SessionUsage] = LRUCache(MAX_SESSIONS)

    def join(self, tenant: str, name: str | None, started_at_s: float) -> SessionUsage:
        """Return the usage record of a starting program: its session's, or a new one.

        Args:
            tenant: owner of the session.
            name: name of the session; None for a program without one.
            started_at_s: start time of the program.
        """
        if name is None:
            return SessionUsage(started_at_s)
        session = self._sessions.get((tenant, name))
        if session is None or session.has_expired(started_at_s):
            session = self._sessions[tenant, name] = SessionUsage(started_at_s)
        session.last_active_s = max(session.last_active_s, started_at_s)
        return session
