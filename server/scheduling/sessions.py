"""Programs that follow each other as one: the turns of an agent whose client sends them singly.

A program may name the session that it belongs to. As long as they follow each other closely,
programs of one session stand in line like one program: since the first began, and with the
service that all of them have had. So an agent with ten calls behind it goes before one that
begins, as it would if it had come as one program; a chat that was silent for long is new.

Knows names, times and service. Refuses to know programs and engines; whose prefix lies where
is the roster's business. Kept true: memory is bounded, and what is forgotten costs a place in
line and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

GAP_S = 30.0
"""How long a session may be silent, as while a tool works, and keep its place in line."""
MAX_SESSIONS = 10_000


@dataclass(slots=True)
class Service:
    """Since when something is served, and how much of it it has had. Shared by a session."""

    began_s: float
    attained_s: float = 0.0
    """Seconds that its ended calls ran on engines."""
    last_s: float = 0.0
    """When it was last heard of."""
    num_calls: int = 0
    """That wait or run: as long as there are any, it is not silent."""

    def begin(self) -> None:
        """A call has come."""
        self.num_calls += 1

    def end(self, now_s: float) -> None:
        """A call has ended, or was given up."""
        self.num_calls -= 1
        self.last_s = now_s

    def is_silent(self, now_s: float) -> bool:
        """Whether whoever comes now is new."""
        return not self.num_calls and now_s - self.last_s > GAP_S


class Sessions:
    """The sessions of all tenants; times are seconds on one clock."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Service] = OrderedDict()

    def join(self, tenant: str, name: str | None, began_s: float) -> Service:
        """The service of a program that begins: its session's, or one of its own.

        Args:
            tenant: whose session it is.
            name: of the session; None: it belongs to none.
            began_s: when the program came.
        """
        if name is None:
            return Service(began_s)
        key = (tenant, name)
        found = self._known.get(key)
        if found is None or found.is_silent(began_s):
            found = self._known[key] = Service(began_s)
        found.last_s = max(found.last_s, began_s)
        self._known.move_to_end(key)
        if len(self._known) > MAX_SESSIONS:
            self._known.popitem(last=False)
        return found
