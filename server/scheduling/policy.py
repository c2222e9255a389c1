"""The policies: what order calls wait in, and which of several engines one should get.

A policy is three pure functions over records, behind one interface, so that policies can be
compared on one workload by the same queue, books and engines:

    see     what it knows of a call; what it does not know is left out of the demand
    rank    a call's place in the queue, lower is sooner
    price   what an engine costs a call, lower is better

    fcfs            request by request: in order of arrival, on the emptiest engine
    parrot          OSDI'24, section 5.4, Algorithm 1: applications in order, a task group
                    on one engine, then where the prefix is; like to like
    least-attained  Autellix (NSDI'26): programs that have had least service first; only long
                    calls follow their program's prefix
    conure          Algorithm 1 with its gaps filled: what everybody pays for the placement,
                    in seconds; deadlines, priorities, shares of tenants

**Ranks age.** A rank is a point in time: when a call came, later by so much the less urgent
it is. So a call ages without being touched, and none starves: of equal priority, whatever
comes `patience_s` after it stands behind it, whoever that is.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from .demand import Demand, Standing
from .load import Load
from .pace import Pace

THROUGHPUT_S = 30.0
"""How much longer a call waits that nobody waits for."""
LINE_S = 600.0
"""How long a program that is waited for keeps its place in line, once it began."""
HEAD_START_S = 10.0
"""The same where nobody waits for it, and how much sooner at most a call comes that is late."""
LENGTH, LONGEST_S = 0.25, 600.0
"""How much of its own length a program stands back, of so much at most: short ones first."""
PRIORITY_S = 60.0
"""What one step of priority is worth."""
AHEAD_S = 30.0
"""How much later at most a call comes because its tenant has had more than its share."""
ATTAINED_S = 600.0
"""Service of a program that counts against its next call, at most."""
DEPTH_S, MAX_DEPTH = 0.01, 100
"""By how much a call comes before others of its time for every call behind it."""

LONG_TOKENS = 2_048
"""Calls from here on are worth sending to their prefix (Autellix, section 4.3)."""
UNWAITED = 0.1
"""What a second of a call that nobody waits for is worth, beside one of a call that is."""
TAKEN = 0.5
"""What a second is worth of an engine that others cannot have because of a strict call."""


class Rank(NamedTuple):
    """A place in the queue."""

    at_s: float
    """Lower is sooner."""
    why: str


class Offer(NamedTuple):
    """One engine, as one call finds it."""

    load: Load
    num_added: int
    """Tokens that the engine would hold on top."""
    room: int
    """Tokens that it may take on of such calls, however long they stay."""
    num_shared: int
    """Leading tokens of the prompt whose KV is there."""
    num_mates: int
    """Calls of its task group that run there."""
    mate_tokens: int
    """That calls of its group which still wait will need, itself included."""
    num_group: int
    """Calls of its group that wait or run, itself included; 1 without a group."""
    is_fit: bool
    """Whether there is room now."""


class Policy(Protocol):
    """How calls are ordered and placed."""

    @property
    def name(self) -> str:
        """What it is called in settings."""
        ...

    @property
    def patience_s(self) -> float:
        """After how long a waiting call is overtaken by nobody of its priority."""
        ...

    def see(self, demand: Demand) -> Demand:
        """The demand without what this policy does not know."""
        ...

    def rank(self, standing: Standing) -> Rank:
        """A call's place in the queue."""
        ...

    def price(self, demand: Demand, offer: Offer, pace: Pace) -> tuple[float, ...]:
        """What an engine costs the call; compared among those that fit, or if none does."""
        ...


class Fcfs:
    """Request by request, as a server without programs does it."""

    name = "fcfs"
    patience_s = 0.0

    def see(self, demand: Demand) -> Demand:
        """Nothing but the length."""
        return _as_single_request(demand)

    def rank(self, standing: Standing) -> Rank:
        """In order of arrival."""
        return Rank(standing.came_s - standing.priority * PRIORITY_S, "in order of arrival")

    def price(self, demand: Demand, offer: Offer, pace: Pace) -> tuple[float, ...]:
        """The emptiest engine."""
        return (-offer.room,)


class LeastAttained:
    """Programs that have had least service come first (PLAS); ages instead of promoting."""

    name = "least-attained"
    patience_s = ATTAINED_S

    def see(self, demand: Demand) -> Demand:
        """Where a long call's prefix is; nothing of groups and objectives."""
        if demand.num_tokens < LONG_TOKENS:
            return _as_single_request(demand)
        return replace(demand, group=None, is_strict=False)

    def rank(self, standing: Standing) -> Rank:
        """Later by the service that the program has had."""
        attained_s = min(standing.attained_s, ATTAINED_S)
        at_s = standing.came_s + attained_s - standing.priority * PRIORITY_S
        return Rank(at_s, f"its program has run {standing.attained_s:.2f} s")

    def price(self, demand: Demand, offer: Offer, pace: Pace) -> tuple[float, ...]:
        """The prefix of a long call, else the emptiest engine."""
        return (-offer.num_shared, -offer.room)


class Parrot:
    """Algorithm 1 as the paper has it; what it leaves open is decided like to like."""

    name = "parrot"
    patience_s = LINE_S

    def see(self, demand: Demand) -> Demand:
        """Everything."""
        return demand

    def rank(self, standing: Standing) -> Rank:
        """Applications in order of arrival, each in topological order."""
        began_s = max(standing.began_s, standing.came_s - LINE_S + MAX_DEPTH * DEPTH_S)
        at_s = began_s - _head(standing) - standing.priority * PRIORITY_S
        return Rank(at_s, "in the order of applications")

    def price(self, demand: Demand, offer: Offer, pace: Pace) -> tuple[float, ...]:
        """Its task group, then its prefix, then calls that are run like it, then room."""
        load = offer.load
        takes_much = load.strict_tokens is not None or load.num_strict > 0
        is_unlike = takes_much and demand.is_strict != (load.num_strict > 0)
        cannot_take_group = offer.mate_tokens > load.room(is_strict=False)
        return (
            -float(offer.num_mates > 0),
            float(cannot_take_group),
            -float(offer.num_shared),
            float(is_unlike),
            -offer.room,
        )


class Conure:
    """Algorithm 1 with its gaps filled: spread or pack is decided by what it costs."""

    name = "conure"
    patience_s = LINE_S + LENGTH * LONGEST_S + THROUGHPUT_S + AHEAD_S + MAX_DEPTH * DEPTH_S

    def see(self, demand: Demand) -> Demand:
        """Everything."""
        return demand

    def rank(self, standing: Standing) -> Rank:
        """Programs in order of arrival, short ones a little sooner, so that those which have
        begun end before others begin; then by what a call is worth. The constants above say what
        counts how much.
        """
        came_s = standing.came_s
        stands_back_s = LENGTH * min(standing.total_s, LONGEST_S)
        if standing.latest_s is not None:
            # A deadline says how long a call can wait, which is all that the kind would guess.
            soonest_s, longest_s = came_s - HEAD_START_S, came_s + THROUGHPUT_S
            at_s = min(max(standing.latest_s, soonest_s), longest_s)
            why = f"{standing.latest_s - came_s:.2f} s of slack"
        elif standing.kind == "latency":
            at_s = max(standing.began_s, came_s - LINE_S) + stands_back_s
            why = f"is waited for, {standing.depth} calls behind it"
        else:
            at_s = max(standing.began_s, came_s - HEAD_START_S) + THROUGHPUT_S + stands_back_s
            why = "is not waited for"
        ahead_s = min(max(standing.ahead_s, 0.0), AHEAD_S)
        if ahead_s:
            why += f", its tenant is {ahead_s:.1f} s ahead of its share"
        if standing.priority:
            why += f", priority {standing.priority}"
        at_s += ahead_s - _head(standing) - standing.priority * PRIORITY_S
        return Rank(at_s, why)

    def price(self, demand: Demand, offer: Offer, pace: Pace) -> tuple[float, ...]:
        """Seconds that the placement costs this call and those that run there, by their worth.

        What the call has to fill is work wherever it happens. What it takes there, to fill, to
        wait for prompts before its own and for longer steps, counts by its own worth. What
        others wait because of it counts once for every call that is waited for by itself. A
        strict call that comes where none is takes most of the engine from everybody else (the
        paper's 64,000 tokens that become 2,000): that part of its time is paid as well.
        """
        load = offer.load
        fill_s = (demand.num_prompt - offer.num_shared) * pace.prompt_token_s
        attended_s = demand.num_output * pace.held_token_s
        takes_s = fill_s + load.num_filling * pace.prompt_token_s
        takes_s += (load.used + offer.num_added) * attended_s
        # Of a group only the end counts, which each of its calls moves by its part.
        worth = (1.0 if demand.is_waited else UNWAITED) / offer.num_group
        harm_s = load.num_strict * (fill_s + offer.num_added * attended_s)
        cost_s = fill_s + worth * takes_s + harm_s
        if demand.is_strict and not load.num_strict:
            lost = 1.0 - load.bound(is_strict=True) / load.capacity
            cost_s += TAKEN * lost * demand.num_output * pace.step_s
        if not offer.is_fit:
            shortage = offer.num_added - offer.room
            cost_s += max(shortage, 0) * pace.prompt_token_s
        return (cost_s, -offer.room)


def _head(standing: Standing) -> float:
    return min(standing.depth, MAX_DEPTH) * DEPTH_S


def _as_single_request(demand: Demand) -> Demand:
    return replace(
        demand, prefixes=(), group=None, is_strict=False, is_waited=True, home=None, num_home=0
    )


DEFAULT_POLICY: Final = "conure"
POLICIES: Final = MappingProxyType(
    {policy.name: policy for policy in (Fcfs(), Parrot(), LeastAttained(), Conure())}
)
"""Every policy by its name."""


def policy_named(name: str) -> Policy:
    """The policy of that name; KeyError if there is none."""
    policy: Policy = POLICIES[name]
    return policy


def explain(policy: str, demand: Demand, offer: Offer, num_able: int, num_offers: int) -> str:
    """Why this engine, in words for a program's status."""
    reasons = []
    if offer.num_mates:
        reasons.append(f"{offer.num_mates} calls of its group run here")
    if offer.num_shared:
        reasons.append(f"{offer.num_shared} of {demand.num_prompt} prompt tokens are here")
    if offer.load.num_calls == 1:
        reasons.append("it was empty")
    if not reasons:
        reasons.append("it costs least" if policy == "conure" else "most room")
    return f"{policy}: {', '.join(reasons)}; {num_able} of {num_offers} engines looked at had room"
