"""Ranks of calls and costs of engines under each policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from conure.server.scheduling.policy import (
    BACKGROUND_DELAY_S,
    DUE_S,
    LENGTH_PENALTY,
    MAX_ATTAINED_S,
    MAX_BACKGROUND_PLACE_S,
    MAX_LENGTH_S,
    MAX_PLACE_IN_LINE_S,
    MAX_TENANT_OVERUSE_DELAY_S,
    MAX_WORK_S,
    POLICIES,
    PRIORITY_S,
    WORK_PENALTY,
    EngineCandidate,
    Policy,
    explain,
)
from conure.server.scheduling.request import PriorityInputs, ResourceRequest
from conure.server.scheduling.reservations import EngineReservations
from conure.server.scheduling.service_time import ServiceTimeEstimator

from .scheduler_harness import prefixes, resource_request


@pytest.fixture(params=POLICIES.values(), ids=lambda policy: policy.name)
def policy(request: pytest.FixtureRequest) -> Policy:
    found: Policy = request.param
    return found


def at(name: str, arrived_s: float = 1000.0, **fields: Any) -> float:
    """Return a rank relative to a default call of a new program that arrives at the same time."""
    inputs = PriorityInputs(
        **{"arrived_at_s": arrived_s, "program_started_at_s": arrived_s, **fields}
    )
    return POLICIES[name].rank(inputs).at_s - arrived_s


seconds = st.floats(0, 1e6)
priority_inputs = st.builds(
    PriorityInputs,
    arrived_at_s=seconds,
    program_started_at_s=seconds,
    kind=st.sampled_from(["latency", "throughput"]),
    depth=st.integers(0, 10_000),
    priority=st.just(0),
    latest_start_s=st.none() | st.floats(-1e6, 2e6),
    total_s=seconds,
    remaining_work_s=seconds,
    attained_s=seconds,
    tenant_overuse_s=st.floats(-1e3, 1e6),
)


@given(waiting=priority_inputs, other=priority_inputs)
def test_long_waiting_call_is_not_overtaken(waiting: PriorityInputs, other: PriorityInputs) -> None:
    """No call starves, however urgent later calls are."""
    for policy in POLICIES.values():
        if (
            other.arrived_at_s > waiting.arrived_at_s + policy.patience_s
            and other.program_started_at_s <= other.arrived_at_s
        ):
            began_s = min(waiting.program_started_at_s, waiting.arrived_at_s)
            known = PriorityInputs(
                arrived_at_s=waiting.arrived_at_s,
                program_started_at_s=began_s,
                kind=waiting.kind,
                depth=waiting.depth,
                latest_start_s=waiting.latest_start_s,
                total_s=waiting.total_s,
                remaining_work_s=waiting.remaining_work_s,
                attained_s=waiting.attained_s,
                tenant_overuse_s=waiting.tenant_overuse_s,
            )
            assert policy.rank(other).at_s >= policy.rank(known).at_s - 1e-6


def test_priority_step_is_one_minute_in_every_policy(policy: Policy) -> None:
    assert at(policy.name, priority=1) == pytest.approx(at(policy.name) - PRIORITY_S)


def test_latency_call_ranks_before_background_call() -> None:
    assert at("conure", kind="throughput") == at("conure") + BACKGROUND_DELAY_S


def test_early_start_advances_rank_up_to_limit() -> None:
    assert at("conure", program_started_at_s=995.0) == pytest.approx(-5.0)
    assert at("conure", program_started_at_s=0.0) == pytest.approx(-MAX_PLACE_IN_LINE_S)
    bulk = at("conure", kind="throughput")
    assert at("conure", kind="throughput", program_started_at_s=0.0) == pytest.approx(
        bulk - MAX_BACKGROUND_PLACE_S
    )


def test_shorter_program_ranks_earlier() -> None:
    assert at("conure", total_s=40.0) == pytest.approx(LENGTH_PENALTY * 40.0)
    assert at("conure", total_s=1e9) == pytest.approx(LENGTH_PENALTY * MAX_LENGTH_S)


def test_program_with_less_work_left_ranks_earlier() -> None:
    assert at("conure", remaining_work_s=3.0) == pytest.approx(WORK_PENALTY * 3.0)
    assert at("conure", remaining_work_s=1e9) == pytest.approx(WORK_PENALTY * MAX_WORK_S)
    for name in set(POLICIES) - {"conure"}:
        assert at(name, remaining_work_s=3.0) == at(name)


def test_deadline_ranks_by_slack() -> None:
    assert at("conure", latest_start_s=1004.0) == pytest.approx(4.0 - DUE_S)
    assert at("conure", latest_start_s=5000.0) == at("conure")
    assert at("conure", latest_start_s=-5000.0) == pytest.approx(-DUE_S), "a late call"


@pytest.mark.parametrize(
    ("latest_start_s", "why"),
    [
        (1004.0, "4.00 s of slack"),
        (997.0, "3.00 s late"),
        (4500.0, "a reader waits for it, 0 calls follow it"),
    ],
)
def test_the_reason_of_a_rank_is_what_decided_it(latest_start_s: float, why: str) -> None:
    inputs = PriorityInputs(
        arrived_at_s=1000.0, program_started_at_s=1000.0, latest_start_s=latest_start_s
    )
    assert POLICIES["conure"].rank(inputs).why == why


@given(inputs=priority_inputs, policy=st.sampled_from(list(POLICIES.values())))
def test_deadline_never_lowers_urgency(inputs: PriorityInputs, policy: Policy) -> None:
    assert policy.rank(inputs).at_s <= policy.rank(replace(inputs, latest_start_s=None)).at_s


@given(inputs=priority_inputs, slack_s=st.floats(0, 1e3))
def test_less_slack_never_lowers_urgency(inputs: PriorityInputs, slack_s: float) -> None:
    if inputs.latest_start_s is not None:
        tighter = replace(inputs, latest_start_s=inputs.latest_start_s - slack_s)
        assert POLICIES["conure"].rank(tighter).at_s <= POLICIES["conure"].rank(inputs).at_s


def test_deeper_call_ranks_first() -> None:
    assert at("conure", depth=3) < at("conure", depth=2) < at("conure")
    assert at("parrot", depth=3) < at("parrot", depth=2) < at("parrot")


def test_tenant_overuse_delays_rank() -> None:
    assert at("conure", tenant_overuse_s=7.0) == pytest.approx(7.0)
    assert at("conure", tenant_overuse_s=1e9) == pytest.approx(MAX_TENANT_OVERUSE_DELAY_S)
    assert at("conure", tenant_overuse_s=-7.0) == 0.0


def test_least_attained_delays_by_program_service() -> None:
    assert at("least-attained", attained_s=12.0) == pytest.approx(12.0)
    assert at("least-attained", attained_s=1e9) == pytest.approx(MAX_ATTAINED_S)
    assert at("least-attained", kind="throughput") == 0.0


def test_fcfs_ignores_everything_but_arrival() -> None:
    assert at("fcfs", kind="throughput", depth=7, attained_s=99.0, latest_start_s=0.0) == 0.0


def test_policy_hides_unknown_request_fields() -> None:
    short = resource_request(
        need=100,
        prefixes=prefixes(50),
        group="g",
        is_latency_critical=True,
        affinity_engine="e",
        num_affinity_tokens=9,
    )
    long = resource_request(need=5_000, prefixes=prefixes(50), group="g", is_latency_critical=True)
    for name in ("parrot", "conure"):
        assert POLICIES[name].visible_state(short) is short
    assert POLICIES["fcfs"].visible_state(short) == resource_request(need=100)
    assert POLICIES["least-attained"].visible_state(short) == resource_request(need=100)
    assert POLICIES["least-attained"].visible_state(long) == resource_request(
        need=5_000, prefixes=prefixes(50)
    )


def offer(
    engine: EngineReservations, request: ResourceRequest, num_members: int = 0
) -> EngineCandidate:
    added = engine.num_new_tokens(request)
    shared = engine.num_shared_tokens(request)
    room = engine.num_free_tokens(is_latency_critical=request.is_latency_critical)
    is_fit = engine.fits(request, added, room)
    return EngineCandidate(
        engine, added, room, shared, num_members, request.num_tokens, num_members + 1, is_fit
    )


def cheapest(
    name: str, request: ResourceRequest, *engines: EngineReservations, num_members: int = 0
) -> str:
    """Return the engine that a policy prefers; other members of the task group run on the first
    one.
    """
    candidates = [
        offer(engine, request, num_members if engine is engines[0] else 0) for engine in engines
    ]
    service_time = ServiceTimeEstimator(prompt_token_s=1e-4, step_s=0.02, held_token_s=2e-6)
    return min(
        candidates, key=lambda each: POLICIES[name].cost(request, each, service_time)
    ).reservations.engine


def engine_with(
    name: str, *requests: ResourceRequest, latency_tokens: int | None = None
) -> EngineReservations:
    engine = EngineReservations(name, 64_000, 256, latency_tokens)
    for each in requests:
        engine.reserve(each)
    return engine


def test_prefix_is_worth_exactly_its_prefill_time() -> None:
    readers = [
        resource_request(need=1_100, num_output=100, prefixes=prefixes(900)) for _ in range(2)
    ]
    request = readers[0]
    holder, empty = engine_with("holder", readers[1]), engine_with("empty")
    assert cheapest("conure", request, holder, empty) == "holder"
    busy = engine_with("busy", readers[1])
    busy.num_prefilling_tokens = 3_000  # Waiting for these takes longer than prefilling 900.
    assert cheapest("conure", request, busy, empty) == "empty"
    assert cheapest("parrot", request, busy, empty) == "busy"
    assert cheapest("fcfs", POLICIES["fcfs"].visible_state(request), holder, empty) == "empty"


def test_parrot_packs_group_and_conure_spreads_if_faster() -> None:
    member = resource_request(need=1_100, num_output=100, group="g")
    home, empty = engine_with("home", member), engine_with("empty")
    home.num_prefilling_tokens = 1_000
    assert cheapest("parrot", member, home, empty, num_members=1) == "home"
    assert cheapest("conure", member, home, empty, num_members=1) == "empty"


def test_batch_call_avoids_engine_with_critical_call() -> None:
    critical = resource_request(need=1_000, num_output=500, is_latency_critical=True)
    bulk = resource_request(need=5_000, num_output=500, is_latency_sensitive=False)
    waited_for, full = engine_with("waited", critical), engine_with("full", *[bulk] * 6)
    for name in ("parrot", "conure"):
        assert cheapest(name, bulk, waited_for, full) == "full"


def test_parrot_reports_room_only_where_room_decides() -> None:
    request = resource_request(need=100)
    candidate = offer(engine_with("busy", request, request), request)
    reasons = {name: explain(name, request, candidate, 1, 2).partition(";")[0] for name in POLICIES}
    assert reasons == {
        "fcfs": "fcfs: most room",
        "parrot": "parrot: it costs least",
        "least-attained": "least-attained: most room",
        "conure": "conure: it costs least",
    }


def test_critical_call_joins_engine_with_critical_call() -> None:
    critical = resource_request(need=500, num_output=400, is_latency_critical=True)
    taken = engine_with("taken", critical, latency_tokens=2_000)
    empty = engine_with("empty", latency_tokens=2_000)
    for name in ("parrot", "conure"):
        assert cheapest(name, critical, taken, empty) == "taken"
    unbound_taken, unbound_empty = engine_with("taken", critical), engine_with("empty")
    assert cheapest("conure", critical, unbound_taken, unbound_empty) == "empty"
