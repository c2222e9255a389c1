"""What the calls of one engine will hold together, step after step, at most.

In every step each running call gets one token. So a call that may write `num_output` tokens is
gone that many steps after it began, and in a step before that it holds its size at the end,
less one token for every step in between. Calls that began at different times do not come to
their ends together; what they hold at once is largest in the last step of one of them, and
that peak, not the sum of their sizes, is the room they need (Past-Future scheduler, ASPLOS'25,
section 3).

Sizes are the longest that calls may come to, for nobody knows when one will stop. The peak is
sound nevertheless: a call that stops sooner takes its own part away and adds nothing. A call
that falls behind, waiting for its prompt or preempted, is late once it should be gone, and
counts whole from then on. Where an estimate is too low the engine preempts and computes again:
that costs time, never an answer.

Tokens that several calls share are there until the last of these is gone, and count once:
with their carrier, the one that is expected to stay longest.

Knows steps and sizes. Refuses to know prompts, prefixes and what room there is.

Kept true: `peak` is exactly the most that is held in any step from now on, if every call that
is not late goes on to its end and every late one stays. So it falls when a call leaves, rises
when one comes, and is never more than the sum of all sizes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add, sub


@dataclass(slots=True, eq=False)
class Stay:
    """Tokens that one call accounts for, until a certain step."""

    ends_at: int
    """The last step in which it is there; it grows by a token in each until then."""
    size: int
    """Tokens in that step, those that it carries for others among them."""
    shared: tuple[Shared, ...]
    """What it reads."""
    is_late: bool = False
    """It should be gone, or nobody can tell when it will be: it counts whole until it is."""


@dataclass(slots=True, eq=False)
class Shared:
    """Tokens that are held as long as one of their readers is there."""

    num_tokens: int
    readers: list[Stay] = field(default_factory=list)
    carrier: Stay = field(init=False)
    """The reader that stays longest, and accounts for them. There is one from the first on."""


class Forecast:
    """The stays of one engine. A change costs time linear in them, reading costs none."""

    def __init__(self, steps: Callable[[], int] | None = None) -> None:
        """Expect nobody.

        Args:
            steps: steps that the engine has made so far; None: it does not tell, so all
                calls count whole as long as they are there.
        """
        self._tells = steps is not None
        self._steps = steps or int
        self._late_size = 0
        # Of those that are not late, side by side, in the order of their ends.
        self._stays: list[Stay] = []
        self._ends: list[int] = []
        self._held: list[int] = []
        """What all that are there hold in its last step."""
        self._highest: int | None = 0
        """The largest of these; None: it has to be looked for."""

    @property
    def peak(self) -> int:
        """Tokens that all may come to hold together."""
        if self._ends and self._ends[0] < self._steps():
            self._pass_time()
        return self._get_highest() + self._late_size

    def enter(self, num_steps: int, size: int, shared: tuple[Shared, ...] = ()) -> Stay:
        """A call comes.

        Args:
            num_steps: after which it is gone.
            size: its tokens by then, without those that it shares.
            shared: what it reads, of the books of this forecast or new.
        """
        now = self._pass_time()
        stay = Stay(now + num_steps, size, shared, is_late=not self._tells)
        for part in shared:
            if not part.readers:
                part.carrier = stay
                stay.size += part.num_tokens
            part.readers.append(stay)
        self._insert(stay)
        return stay

    def leave(self, stay: Stay) -> None:
        """It is gone, and with it what nobody else reads."""
        self._pass_time()
        for part in stay.shared:
            part.readers.remove(stay)
            if part.carrier is stay and part.readers:
                self._carry(part, max(part.readers, key=_length))
        self._delete(stay)

    def grow(self, part: Shared, num_tokens: int) -> None:
        """So many tokens more are shared by the readers of a part."""
        self._pass_time()
        part.num_tokens += num_tokens
        self._account(part.carrier, num_tokens)

    def postpone(self, stay: Stay, num_steps: int) -> bool:
        """It has so many steps before it, from now on, or more; returns whether it had fewer."""
        now = self._pass_time()
        ends_at = now + num_steps
        if not self._tells or ends_at <= stay.ends_at:
            return False
        if stay.is_late:
            self._delete(stay)
            stay.ends_at, stay.is_late = ends_at, False
            self._insert(stay)
            for part in stay.shared:
                if part.carrier is stay:  # others may stay longer now
                    self._carry(part, max(part.readers, key=_length))
        else:
            self._shift(stay, ends_at)
            for part in self._outlasted(ends_at, stay.shared):
                self._carry(part, stay)
        return True

    def exceeds(self, capacity: int, num_steps: int, size: int) -> bool:
        """Whether another call would surely be too much: by one look, at the peak."""
        peak, added = self.peak, 0
        if self._ends:
            missing = (
                self._pass_time() + num_steps - self._ends[self._held.index(self._get_highest())]
            )
            added = max(size - missing, 0) if missing >= 0 else 0
        return peak + added > capacity

    def peak_with(self, num_steps: int, size: int, shared: Iterable[Shared]) -> int:
        """The peak, from now to its end, if another call came now.

        Args:
            num_steps: after which it is gone.
            size: its tokens by then, without what it shares with others.
            shared: what it reads that is there already.
        """
        end = self._pass_time() + num_steps
        held, last = self._held_with(end, size, self._outlasted(end, shared))
        return self._late_size + max(last, max(held, default=0))

    def _get_highest(self) -> int:
        if self._highest is None:
            self._highest = max(self._held, default=0)
        return self._highest

    # --- who carries ----------------------------------------------------------------------

    def _outlasted(self, end: int, shared: Iterable[Shared]) -> list[Shared]:
        """What a stay until then has to carry, since all that carry it now end sooner."""
        return [
            part
            for part in shared
            if part.readers and not part.carrier.is_late and part.carrier.ends_at < end
        ]

    def _carry(self, part: Shared, carrier: Stay) -> None:
        before = part.carrier
        if carrier is before:
            return
        part.carrier = carrier
        if carrier.is_late or before.is_late:
            self._account(before, -part.num_tokens)
            self._account(carrier, part.num_tokens)
            return
        carrier.size += part.num_tokens
        before.size -= part.num_tokens
        if before.ends_at < carrier.ends_at:
            self._hold(part.num_tokens, before.ends_at, carrier.ends_at)
        else:
            self._hold(-part.num_tokens, carrier.ends_at, before.ends_at)

    def _account(self, stay: Stay, num_tokens: int) -> None:
        """A stay accounts for so many tokens more, or fewer, in all its steps."""
        stay.size += num_tokens
        if stay.is_late:
            self._late_size += num_tokens
        else:
            self._hold(num_tokens, -1, stay.ends_at)

    def _hold(self, num_tokens: int, after: int, last: int) -> None:
        """So many tokens more are held in the steps after one up to another."""
        first = bisect_right(self._ends, after)
        end = bisect_right(self._ends, last, first)
        if first < end:
            self._held[first:end] = [held + num_tokens for held in self._held[first:end]]
            self._highest = None

    # --- who is there ---------------------------------------------------------------------

    def _pass_time(self) -> int:
        """Let those be late that should be gone; returns the steps made so far."""
        now, ends = self._steps(), self._ends
        if ends and ends[0] < now:
            num_late = bisect_left(ends, now)
            late = self._stays[:num_late]
            del ends[:num_late], self._held[:num_late], self._stays[:num_late]
            for stay in late:
                stay.is_late = True
                self._late_size += stay.size
            self._highest = None
            for stay in late:
                for part in stay.shared:
                    if not part.carrier.is_late:
                        self._carry(part, stay)
        return now

    def _insert(self, stay: Stay) -> None:
        if stay.is_late:
            self._late_size += stay.size
            return
        outlasted = self._outlasted(stay.ends_at, stay.shared)
        held, last = self._held_with(stay.ends_at, stay.size, outlasted)
        for part in outlasted:
            part.carrier.size -= part.num_tokens
            stay.size += part.num_tokens
            part.carrier = stay
        place = len(held)
        held.append(last)
        self._held[:place] = held
        self._ends.insert(place, stay.ends_at)
        self._stays.insert(place, stay)
        self._highest = None

    def _delete(self, stay: Stay) -> None:
        if stay.is_late:
            self._late_size -= stay.size
            return
        ends, held = self._ends, self._held
        last = bisect_right(ends, stay.ends_at)
        place = self._place(stay, last)
        weight = stay.size - stay.ends_at
        held[:last] = [each - weight for each in map(sub, held[:last], ends)]
        del ends[place], held[place], self._stays[place]
        self._highest = None

    def _shift(self, stay: Stay, ends_at: int) -> None:
        """It ends later: until its former end it holds less, and after that it is still there."""
        ends, held = self._ends, self._held
        delay, weight = ends_at - stay.ends_at, stay.size - ends_at
        first = bisect_right(ends, stay.ends_at)
        cut = bisect_right(ends, ends_at, first)
        place = self._place(stay, first)
        last = self._held_in(ends_at) + stay.size
        held[:cut] = [
            *[each - delay for each in held[:first]],
            *[each + weight for each in map(add, held[first:cut], ends[first:cut])],
            last,
        ]
        ends.insert(cut, ends_at)
        self._stays.insert(cut, stay)
        del ends[place], held[place], self._stays[place]
        stay.ends_at = ends_at
        self._highest = None

    def _place(self, stay: Stay, end: int) -> int:
        """Where it stands, the last of its end being right before there."""
        place = end - 1
        while self._stays[place] is not stay:
            place -= 1
        return place

    # --- what they hold -------------------------------------------------------------------

    def _held_in(self, step: int) -> int:
        """What will be held in a step to come."""
        place = bisect_left(self._ends, step)
        if place == len(self._ends):
            return 0
        return self._held[place] - (len(self._ends) - place) * (self._ends[place] - step)

    def _held_with(self, end: int, size: int, outlasted: list[Shared]) -> tuple[list[int], int]:
        """What will be held in the last step of every stay up to an end, and in that end, with one
        more stay until there, which carries what it outlasts once that is not carried any more.
        """
        ends, held = self._ends, self._held
        # In a step before its end it lacks one token for each step in between.
        weight = size - end
        last = bisect_right(ends, end)
        found: list[int] = []
        for part in sorted(outlasted, key=lambda part: part.carrier.ends_at):
            first = len(found)
            cut = bisect_right(ends, part.carrier.ends_at, first, last)
            found += [weight + each for each in map(add, held[first:cut], ends[first:cut])]
            weight += part.num_tokens
        first = len(found)
        found += [weight + each for each in map(add, held[first:last], ends[first:last])]
        return found, self._held_in(end) + weight + end


def _length(stay: Stay) -> float:
    """By which stays are compared; nobody knows how long those stay that are late."""
    return float("inf") if stay.is_late else stay.ends_at
