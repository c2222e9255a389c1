"""Values of sibling calls travel together if they are known at about the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.adapters.speculation import siblings
from conure.adapters.speculation.planned_call import PlannedCall
from conure.adapters.speculation.run import SpeculativeRun
from conure.adapters.speculation.siblings import MAX_WAIT_S, SiblingGroups, Siblings

from .calls import call, node
from .test_run import ClientDouble


def item(variable: str, *reads: str) -> PlannedCall:
    """Return a call that the same part of the application makes for another item."""
    segments = [{"input": name} for name in reads]
    return PlannedCall("at item", variable, node(variable, *segments), frozenset(reads))


@given(first=st.floats(0, 1), others=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_wait_is_at_most_as_long_as_the_first_value_took(first: float, others: list[float]) -> None:
    group = Siblings([item("a", "x"), item("b", "y")], 10.0)
    assert group.wait_s({}, 10.0) == 0
    wait_s = group.wait_s({"x"}, 10 + first)
    assert wait_s == pytest.approx(min(first, MAX_WAIT_S))
    for later in others:
        left_s = group.wait_s({"x"}, 10 + first + later)
        assert left_s == pytest.approx(max(0.0, wait_s - later), abs=1e-9)
    assert group.wait_s({"x", "y"}, 10 + first) == 0


def test_only_calls_of_one_part_that_wait_for_the_application_are_siblings() -> None:
    now = 0.0
    groups = SiblingGroups(lambda: now)
    groups.add([item("a", "x"), call("other", {"y"}, {"input": "y"})], set(), {})
    groups.add([item("b", "x"), item("c", "a")], set(), {"a"})
    groups.add([item("d", "known"), item("e", "x")], {"known"}, {})
    now = 1.0
    assert groups.wait_s({"x", "known"}) == 0


def test_siblings_wait_once() -> None:
    now = 0.0
    groups = SiblingGroups(lambda: now)
    groups.add([item("a", "x", "topic"), item("b", "y", "topic")], {"topic"}, {})
    now = 0.002
    assert groups.wait_s({"x", "topic"}) == pytest.approx(0.002)
    now = 0.004
    assert groups.wait_s({"x", "topic"}) == 0
    now = 0.0
    assert groups.wait_s({"x", "topic"}) == 0


async def test_values_of_siblings_travel_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "MAX_WAIT_S", 60.0)
    client: Any = ClientDouble()
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True)
    run.calls._siblings._clock = iter([0.0, *[60.0] * 9]).__next__
    run.plan([item("a", "x"), item("b", "y")])
    await client.tasks.pop(0)()
    run.set_values({"x": 1})
    sending = asyncio.create_task(client.tasks.pop(0)())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not client.bodies
    run.set_values({"y": 2})
    await client.tasks.pop(0)()
    await sending
    (body,) = client.bodies
    assert body["inputs"] == {"x": 1, "y": 2}


async def test_value_is_sent_alone_if_its_sibling_takes_longer() -> None:
    client: Any = ClientDouble()
    run = SpeculativeRun(client, "run", is_streamed=False, may_grow=True)
    run.calls._siblings._clock = iter([0.0, *[1.0] * 9]).__next__
    run.plan([item("a", "x"), item("b", "y")])
    await client.tasks.pop(0)()
    run.set_values({"x": 1})
    await client.tasks.pop(0)()
    (body,) = client.bodies
    assert body["inputs"] == {"x": 1}
