"""What calls are worth, and what engines cost them: every policy by its own rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.scheduling.demand import Demand, Standing
from conure.server.scheduling.load import Load
from conure.server.scheduling.pace import Pace
from conure.server.scheduling.policy import (
    AHEAD_S,
    ATTAINED_S,
    HEAD_START_S,
    LENGTH,
    LINE_S,
    LONGEST_S,
    POLICIES,
    PRIORITY_S,
    THROUGHPUT_S,
    Offer,
    Policy,
)

from .desks import demand, prefixes


@pytest.fixture(params=POLICIES.values(), ids=lambda policy: policy.name)
def policy(request: pytest.FixtureRequest) -> Policy:
    found: Policy = request.param
    return found


def at(name: str, came_s: float = 1000.0, **fields: Any) -> float:
    """A rank, beside that of a plain call that came at the same time in a new program."""
    standing = Standing(**{"came_s": came_s, "began_s": came_s, **fields})
    return POLICIES[name].rank(standing).at_s - came_s


seconds = st.floats(0, 1e6)
standings = st.builds(
    Standing,
    came_s=seconds,
    began_s=seconds,
    kind=st.sampled_from(["latency", "throughput"]),
    depth=st.integers(0, 10_000),
    priority=st.just(0),
    latest_s=st.none() | st.floats(-1e6, 2e6),
    total_s=seconds,
    attained_s=seconds,
    ahead_s=st.floats(-1e3, 1e6),
)


@given(waiting=standings, other=standings)
def test_whoever_waited_long_enough_is_overtaken_by_nobody(
    waiting: Standing, other: Standing
) -> None:
    """So nobody starves: however urgent, old or lucky those are that come later."""
    for policy in POLICIES.values():
        if other.came_s > waiting.came_s + policy.patience_s and other.began_s <= other.came_s:
            began_s = min(waiting.began_s, waiting.came_s)
            known = Standing(
                came_s=waiting.came_s,
                began_s=began_s,
                kind=waiting.kind,
                depth=waiting.depth,
                latest_s=waiting.latest_s,
                total_s=waiting.total_s,
                attained_s=waiting.attained_s,
                ahead_s=waiting.ahead_s,
            )
            assert policy.rank(other).at_s >= policy.rank(known).at_s - 1e-6


def test_one_step_of_priority_is_worth_a_minute_everywhere(policy: Policy) -> None:
    assert at(policy.name, priority=1) == pytest.approx(at(policy.name) - PRIORITY_S)


def test_what_somebody_waits_for_comes_before_what_nobody_does() -> None:
    assert at("conure", kind="throughput") == at("conure") + THROUGHPUT_S


def test_work_on_what_began_long_ago_comes_first_within_limits() -> None:
    assert at("conure", began_s=995.0) == pytest.approx(-5.0)
    assert at("conure", began_s=0.0) == pytest.approx(-LINE_S)
    bulk = at("conure", kind="throughput")
    assert at("conure", kind="throughput", began_s=0.0) == pytest.approx(bulk - HEAD_START_S)


def test_a_short_program_comes_a_little_sooner() -> None:
    assert at("conure", total_s=40.0) == pytest.approx(LENGTH * 40.0)
    assert at("conure", total_s=1e9) == pytest.approx(LENGTH * LONGEST_S)


def test_a_deadline_says_how_long_a_call_can_wait() -> None:
    assert at("conure", latest_s=1004.0) == pytest.approx(4.0)
    assert at("conure", latest_s=5000.0) == pytest.approx(THROUGHPUT_S)
    assert at("conure", latest_s=-5000.0) == pytest.approx(-HEAD_START_S)


def test_the_longer_way_to_go_comes_first() -> None:
    assert at("conure", depth=3) < at("conure", depth=2) < at("conure")
    assert at("parrot", depth=3) < at("parrot", depth=2) < at("parrot")


def test_a_tenant_that_has_had_more_than_its_share_stands_back() -> None:
    assert at("conure", ahead_s=7.0) == pytest.approx(7.0)
    assert at("conure", ahead_s=1e9) == pytest.approx(AHEAD_S)
    assert at("conure", ahead_s=-7.0) == 0.0


def test_least_attained_counts_what_the_program_has_had() -> None:
    assert at("least-attained", attained_s=12.0) == pytest.approx(12.0)
    assert at("least-attained", attained_s=1e9) == pytest.approx(ATTAINED_S)
    assert at("least-attained", kind="throughput") == 0.0


def test_first_come_first_served_knows_nothing_else() -> None:
    assert at("fcfs", kind="throughput", depth=7, attained_s=99.0, latest_s=0.0) == 0.0


def test_a_policy_sees_of_a_call_what_it_is_meant_to_know() -> None:
    short = demand(need=100, prefixes=prefixes(50), group="g", is_strict=True, home="e", num_home=9)
    long = demand(need=5_000, prefixes=prefixes(50), group="g", is_strict=True)
    for name in ("parrot", "conure"):
        assert POLICIES[name].see(short) is short
    assert POLICIES["fcfs"].see(short) == demand(need=100)
    assert POLICIES["least-attained"].see(short) == demand(need=100)
    assert POLICIES["least-attained"].see(long) == demand(need=5_000, prefixes=prefixes(50))


def offer(load: Load, wanted: Demand, mates: int = 0) -> Offer:
    added = load.num_added(wanted)
    shared = load.num_shared(wanted)
    room = load.room(is_strict=wanted.is_strict)
    is_fit = load.fits(wanted, added, room)
    return Offer(load, added, room, shared, mates, wanted.num_tokens, mates + 1, is_fit)


def cheapest(name: str, wanted: Demand, *loads: Load, mates: int = 0) -> str:
    """The engine that a policy prefers; the task group's others run on the first."""
    offers = [offer(load, wanted, mates if load is loads[0] else 0) for load in loads]
    pace = Pace(prompt_token_s=1e-4, step_s=0.02, held_token_s=2e-6)
    return min(offers, key=lambda each: POLICIES[name].price(wanted, each, pace)).load.engine


def loaded(engine: str, *demands: Demand, strict_tokens: int | None = None) -> Load:
    load = Load(engine, 64_000, 256, strict_tokens)
    for each in demands:
        load.book(each)
    return load


def test_a_prefix_is_worth_what_it_saves_and_no_more() -> None:
    readers = [demand(need=1_100, num_output=100, prefixes=prefixes(900)) for _ in range(2)]
    wanted = readers[0]
    holder, empty = loaded("holder", readers[1]), loaded("empty")
    assert cheapest("conure", wanted, holder, empty) == "holder"
    busy = loaded("busy", readers[1])
    busy.num_filling = 3_000  # to wait for these takes longer than to fill 900
    assert cheapest("conure", wanted, busy, empty) == "empty"
    assert cheapest("parrot", wanted, busy, empty) == "busy"
    assert cheapest("fcfs", POLICIES["fcfs"].see(wanted), holder, empty) == "empty"


def test_parrot_keeps_a_group_together_and_conure_spreads_it_where_that_is_faster() -> None:
    mate = demand(need=1_100, num_output=100, group="g")
    home, empty = loaded("home", mate), loaded("empty")
    home.num_filling = 1_000
    assert cheapest("parrot", mate, home, empty, mates=1) == "home"
    assert cheapest("conure", mate, home, empty, mates=1) == "empty"


def test_bulk_keeps_away_from_calls_that_are_waited_for() -> None:
    strict = demand(need=1_000, num_output=500, is_strict=True)
    bulk = demand(need=5_000, num_output=500, is_waited=False)
    waited_for, full = loaded("waited", strict), loaded("full", *[bulk] * 6)
    for name in ("parrot", "conure"):
        assert cheapest(name, bulk, waited_for, full) == "full"


def test_a_strict_call_goes_where_one_is_before_it_takes_an_engine_from_the_others() -> None:
    strict = demand(need=500, num_output=400, is_strict=True)
    taken = loaded("taken", strict, strict_tokens=2_000)
    empty = loaded("empty", strict_tokens=2_000)
    for name in ("parrot", "conure"):
        assert cheapest(name, strict, taken, empty) == "taken"
    unbound_taken, unbound_empty = loaded("taken", strict), loaded("empty")
    assert cheapest("conure", strict, unbound_taken, unbound_empty) == "empty"
