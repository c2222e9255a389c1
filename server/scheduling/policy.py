"""Scheduling policies: in which order calls wait, and which engine a call gets.

A policy consists of four pure functions over records, so that policies can be compared on one
workload with the same queues, reservations and engines:

    visible_state    hides the parts of a request that the policy does not use
    rank             the call's position in the queue; a smaller rank runs first
    cost             the cost of running a call on an engine; the lowest cost wins
    holds            whether a program should not begin while others run on an engine

The policies:

    fcfs            request by request: in order of arrival, on the engine with the most room
    parrot          OSDI'24, section 5.4, Algorithm 1: applications in order, a task group
                    on one engine, then by prefix; similar calls together
    least-attained  Autellix (NSDI'26): programs that received the least service first; only
                    long calls follow their program's prefix
    conure          Algorithm 1, completed where it is undefined: the cost to all calls, in seconds;
                    deadlines, priorities, fair shares of tenants

**Ranks age.** A rank is a point in time: the arrival of the call, plus a delay that is larger for
less urgent calls. Calls therefore age without being updated, and none starves: a call that arrives
`patience_s` after another one of equal priority always ranks after it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from msgspec.structs import replace

from .holds import Opening, ProgramsAhead
from .request import PriorityInputs, ResourceRequest
from .reservations import EngineReservations
from .service_time import ServiceTimeEstimator

BACKGROUND_DELAY_S = 30.0
"""Delay of a call that no reader waits for."""
MAX_PLACE_IN_LINE_S = 600.0
"""How long a program that a reader waits for keeps its place in the queue after its start."""
MAX_BACKGROUND_PLACE_S = 10.0
"""How long a program that no reader waits for keeps its place in the queue after its start."""
DUE_S = 30.0
"""A call without a deadline is treated as due `DUE_S` plus its delays after its program's start. A
call with a deadline ranks `DUE_S` before its latest start, so it overtakes only calls that have
waited for less than `DUE_S` plus their delays."""
LENGTH_PENALTY = 0.25
"""Delay of a program per second of its own length, up to `MAX_LENGTH_S`. Short programs go
first."""
MAX_LENGTH_S = 600.0
WORK_PENALTY = 2.0
"""Delay of a program per second of engine time that its remaining calls need, up to `MAX_WORK_S`.
Programs that end soon go first."""
MAX_WORK_S = 60.0
PRIORITY_S = 60.0
"""Delay or advance per step of priority."""
MAX_TENANT_OVERUSE_DELAY_S = 30.0
"""Maximum delay of a call because its tenant used more than its fair share."""
MAX_ATTAINED_S = 600.0
"""Maximum service of a program that delays its next call."""
DEPTH_S = 0.01
"""Advance of a call for each call that follows it, for at most `MAX_DEPTH` of them."""
MAX_DEPTH = 100

LONG_CALL_TOKENS = 2_048
"""Calls of this size and larger are worth sending to their prefix (Autellix, section 4.3)."""
HOLD_MARGIN = 2.0
"""A hold must save this many times its cost, because programs that arrive later prolong it."""
BACKGROUND_WEIGHT = 0.1
"""Weight of a second of a call that no reader waits for, relative to one that a reader waits
for."""


class Rank(NamedTuple):
    """A call's position in the queue."""

    at_s: float
    """A smaller value runs first."""
    why: str


class EngineCandidate(NamedTuple):
    """One engine from the point of view of one call."""

    reservations: EngineReservations
    num_new_tokens: int
    """Tokens that the call would add to those reserved on the engine."""
    num_free_tokens: int
    """Tokens that such calls may still reserve, for any length of time."""
    num_shared_tokens: int
    """Leading prompt tokens whose KV the engine has."""
    num_group_members: int
    """Calls of the same task group that run on the engine."""
    group_waiting_tokens: int
    """Tokens that the waiting calls of the group need, including this call."""
    group_size: int
    """Waiting and running calls of the group, including this call; 1 without a group."""
    has_room: bool
    """Whether the engine has room for the call now."""


class Policy(Protocol):
    """Ranks calls and costs engines."""

    @property
    def name(self) -> str:
        """Return the name of the policy in settings."""
        ...

    @property
    def patience_s(self) -> float:
        """Return the time after which no newly arriving call of equal priority can overtake a
        waiting one.
        """
        ...

    def visible_state(self, request: ResourceRequest) -> ResourceRequest:
        """Return the request without the parts that this policy does not use."""
        ...

    def rank(self, inputs: PriorityInputs) -> Rank:
        """Return a call's position in the queue."""
        ...

    def cost(
        self,
        request: ResourceRequest,
        candidate: EngineCandidate,
        service_time: ServiceTimeEstimator,
    ) -> tuple[float, ...]:
        """Return the cost of an engine for a call, to be compared with the costs of other engines.

        The engines compared are those with room, or all considered engines if none has room.
        """
        ...

    def holds(
        self, opening: Opening, ahead: ProgramsAhead, service_time: ServiceTimeEstimator
    ) -> bool:
        """Return whether a program should not begin while the programs ahead of it run.

        More programs ahead, or fewer steps, never turn a hold into a start.
        """
        ...


class NeverHolds:
    """Lets every program begin as soon as an engine has room."""

    def holds(
        self, opening: Opening, ahead: ProgramsAhead, service_time: ServiceTimeEstimator
    ) -> bool:
        """Return False."""
        return False


class FcfsPolicy(NeverHolds):
    """First come, first served: request by request, like a server without programs."""

    name = "fcfs"
    patience_s = 0.0

    def visible_state(self, request: ResourceRequest) -> ResourceRequest:
        """Return the length only."""
        return _as_single_request(request)

    def rank(self, inputs: PriorityInputs) -> Rank:
        """Rank in order of arrival."""
        return Rank(inputs.arrived_at_s - inputs.priority * PRIORITY_S, "in order of arrival")

    def cost(
        self,
        request: ResourceRequest,
        candidate: EngineCandidate,
        service_time: ServiceTimeEstimator,
    ) -> tuple[float, ...]:
        """Prefer the engine with the most free tokens."""
        return (-candidate.num_free_tokens,)


class LeastAttainedPolicy(NeverHolds):
    """Programs that received the least service first (PLAS), with aging instead of promotion."""

    name = "least-attained"
    patience_s = MAX_ATTAINED_S

    def visible_state(self, request: ResourceRequest) -> ResourceRequest:
        """Return the prefixes of long calls; no groups and objectives."""
        if request.num_tokens < LONG_CALL_TOKENS:
            return _as_single_request(request)
        return replace(request, group=None, is_latency_critical=False)

    def rank(self, inputs: PriorityInputs) -> Rank:
        """Delay a call by the service that its program received."""
        attained_s = min(inputs.attained_s, MAX_ATTAINED_S)
        at_s = inputs.arrived_at_s + attained_s - inputs.priority * PRIORITY_S
        return Rank(at_s, f"its program has run {inputs.attained_s:.2f} s")

    def cost(
        self,
        request: ResourceRequest,
        candidate: EngineCandidate,
        service_time: ServiceTimeEstimator,
    ) -> tuple[float, ...]:
        """Prefer the prefix of a long call, then the engine with the most free tokens."""
        return (-candidate.num_shared_tokens, -candidate.num_free_tokens)


class ParrotPolicy(NeverHolds):
    """Algorithm 1 of the paper. Where it leaves a choice open, similar calls go together."""

    name = "parrot"
    patience_s = MAX_PLACE_IN_LINE_S

    def visible_state(self, request: ResourceRequest) -> ResourceRequest:
        """Return everything."""
        return request

    def rank(self, inputs: PriorityInputs) -> Rank:
        """Rank applications in order of arrival, and the calls of each in topological order."""
        started_s = max(
            inputs.program_started_at_s,
            inputs.arrived_at_s - MAX_PLACE_IN_LINE_S + MAX_DEPTH * DEPTH_S,
        )
        at_s = started_s - _depth_bonus_s(inputs) - inputs.priority * PRIORITY_S
        return Rank(at_s, "in the order of applications")

    def cost(
        self,
        request: ResourceRequest,
        candidate: EngineCandidate,
        service_time: ServiceTimeEstimator,
    ) -> tuple[float, ...]:
        """Prefer the task group's engine, then the prefix, then similar calls, then free tokens."""
        engine = candidate.reservations
        has_limit = engine.latency_tokens is not None or engine.num_latency_critical > 0
        is_other_kind = has_limit and request.is_latency_critical != (
            engine.num_latency_critical > 0
        )
        cannot_take_group = candidate.group_waiting_tokens > engine.num_free_tokens(
            is_latency_critical=False
        )
        return (
            -float(candidate.num_group_members > 0),
            float(cannot_take_group),
            -float(candidate.num_shared_tokens),
            float(is_other_kind),
            -candidate.num_free_tokens,
        )


class ConurePolicy:
    """Algorithm 1, completed where it is undefined: spread or pack, whichever costs less."""

    name = "conure"
    patience_s = (
        MAX_PLACE_IN_LINE_S
        + LENGTH_PENALTY * MAX_LENGTH_S
        + WORK_PENALTY * MAX_WORK_S
        + BACKGROUND_DELAY_S
        + MAX_TENANT_OVERUSE_DELAY_S
        + MAX_DEPTH * DEPTH_S
        + DUE_S
    )

    def visible_state(self, request: ResourceRequest) -> ResourceRequest:
        """Return everything."""
        return request

    def rank(self, inputs: PriorityInputs) -> Rank:
        """Rank programs in order of arrival, then by urgency.

        Programs with little remaining work rank earlier (shortest remaining processing time), so
        that started programs end before others start. A deadline advances a call and never delays
        it. The constants above define the weights.
        """
        arrived_s = inputs.arrived_at_s
        length_penalty_s = LENGTH_PENALTY * min(inputs.total_s, MAX_LENGTH_S)
        length_penalty_s += WORK_PENALTY * min(inputs.remaining_work_s, MAX_WORK_S)
        if inputs.kind == "latency":
            at_s = (
                max(inputs.program_started_at_s, arrived_s - MAX_PLACE_IN_LINE_S) + length_penalty_s
            )
            why = f"a reader waits for it, {inputs.depth} calls follow it"
        else:
            at_s = (
                max(inputs.program_started_at_s, arrived_s - MAX_BACKGROUND_PLACE_S)
                + BACKGROUND_DELAY_S
                + length_penalty_s
            )
            why = "no reader waits for it"
        if inputs.latest_start_s is not None:
            # A late call ranks like one without slack, not earlier: its duration is only an
            # estimate.
            due_at_s = max(inputs.latest_start_s, arrived_s) - DUE_S
            if due_at_s < at_s:
                at_s = due_at_s
                slack_s = inputs.latest_start_s - arrived_s
                why = f"{slack_s:.2f} s of slack" if slack_s >= 0.0 else f"{-slack_s:.2f} s late"
        overuse_s = min(max(inputs.tenant_overuse_s, 0.0), MAX_TENANT_OVERUSE_DELAY_S)
        if overuse_s:
            why += f", its tenant is {overuse_s:.1f} s ahead of its share"
        if inputs.priority:
            why += f", priority {inputs.priority}"
        at_s += overuse_s - _depth_bonus_s(inputs) - inputs.priority * PRIORITY_S
        return Rank(at_s, why)

    def cost(
        self,
        request: ResourceRequest,
        candidate: EngineCandidate,
        service_time: ServiceTimeEstimator,
    ) -> tuple[float, ...]:
        """Return the weighted seconds that the placement costs this call and the running calls.

        The cost is the sum of these parts:
        - Prefilling is work on whichever engine it happens, so it counts fully.
        - The call's own latency counts by its weight: its prefill, prompts queued before it, and
          the longer steps of a fuller engine.
        - The delay of others counts once per latency-critical call on the engine.
        - Without room, the prefill time of the tokens that are missing.

        A latency-critical call on an engine without one also takes most of that engine from other
        calls (the paper's 64,000 tokens become 2,000): that share of its duration is added.
        """
        engine = candidate.reservations
        fill_s = (request.num_prompt - candidate.num_shared_tokens) * service_time.prompt_token_s
        decode_s_per_held_token = request.num_output * service_time.held_token_s
        latency_s = fill_s + engine.num_prefilling_tokens * service_time.prompt_token_s
        latency_s += (engine.reserved_tokens + candidate.num_new_tokens) * decode_s_per_held_token
        # Only the end of a group counts, and each of its calls contributes its share to it.
        weight = (1.0 if request.is_latency_sensitive else BACKGROUND_WEIGHT) / candidate.group_size
        delay_of_others_s = engine.num_latency_critical * (
            fill_s + candidate.num_new_tokens * decode_s_per_held_token
        )
        cost_s = fill_s + weight * latency_s + delay_of_others_s
        if request.is_latency_critical and not engine.num_latency_critical:
            lost_share = 1.0 - engine.token_limit(is_latency_critical=True) / engine.capacity
            cost_s += lost_share * request.num_output * service_time.step_s
        if not candidate.has_room:
            shortage = candidate.num_new_tokens - candidate.num_free_tokens
            cost_s += max(shortage, 0) * service_time.prompt_token_s
        return (cost_s, -candidate.num_free_tokens)

    def holds(
        self, opening: Opening, ahead: ProgramsAhead, service_time: ServiceTimeEstimator
    ) -> bool:
        """Compare the seconds that a hold costs with those that it saves, over all programs.

        To begin now delays every program ahead by the prefill. A hold delays every program that
        waits to begin until the programs ahead have ended (Smith's rule on both choices).
        """
        cost_s = opening.num_waiting_programs * ahead.num_steps * service_time.bare_step_s
        saved_s = ahead.num_programs * opening.num_prefill_tokens * service_time.prompt_token_s
        return cost_s * HOLD_MARGIN < saved_s


def _depth_bonus_s(inputs: PriorityInputs) -> float:
    return min(inputs.depth, MAX_DEPTH) * DEPTH_S


def _as_single_request(request: ResourceRequest) -> ResourceRequest:
    return replace(
        request,
        prefixes=(),
        group=None,
        is_latency_critical=False,
        is_latency_sensitive=True,
        opens_program=False,
        num_remaining_steps=0,
        affinity_engine=None,
        num_affinity_tokens=0,
    )


DEFAULT_POLICY: Final = "conure"
POLICIES: Final = MappingProxyType(
    {
        policy.name: policy
        for policy in (FcfsPolicy(), ParrotPolicy(), LeastAttainedPolicy(), ConurePolicy())
    }
)
"""Every policy by name."""


def policy_named(name: str) -> Policy:
    """Return the policy of that name. Raises KeyError for an unknown name."""
    policy: Policy = POLICIES[name]
    return policy


def explain(
    policy: str,
    request: ResourceRequest,
    candidate: EngineCandidate,
    num_with_room: int,
    num_considered: int,
) -> str:
    """Return why an engine was chosen, for the program's status."""
    reasons = []
    if candidate.num_group_members:
        reasons.append(f"{candidate.num_group_members} calls of its group run here")
    if candidate.num_shared_tokens:
        reasons.append(
            f"{candidate.num_shared_tokens} of {request.num_prompt} prompt tokens are here"
        )
    if candidate.reservations.num_calls == 1:
        reasons.append("it was empty")
    if not reasons:
        considers_room_only = policy in (FcfsPolicy.name, LeastAttainedPolicy.name)
        reasons.append("most room" if considers_room_only else "it costs least")
    room = f"{num_with_room} of {num_considered} considered engines had room"
    return f"{policy}: {', '.join(reasons)}; {room}"
