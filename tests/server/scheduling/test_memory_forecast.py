"""The peak forecast, compared with a model that simulates every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from conure.server.scheduling.request import ResourceRequest
from conure.server.scheduling.reservations import EngineReservations, Reservation

from .scheduler_harness import prefixes, resource_request

CAPACITY = 300
LENGTHS = (20, 40, 60)
"""Lengths of the prefixes of one `shared_tokens`."""


@dataclass
class ReferenceCall:
    """A call in the model."""

    request: ResourceRequest
    ends_at: int
    reservation: Reservation = field(init=False)

    def tokens_in(self, step: int, now: int) -> tuple[int, int]:
        """Return the shared tokens and the call's own tokens in a future step."""
        if self.ends_at < step and self.ends_at >= now:
            return 0, 0
        shared = self.request.prefixes[-1].num_tokens if self.request.prefixes else 0
        missing = max(self.ends_at - step, 0)
        return shared, self.request.num_tokens - shared - missing


class ReferenceEngine:
    """An engine's reservations and the model of them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.now = 0
        self.calls: list[ReferenceCall] = []
        self.load = EngineReservations("e", capacity, 99, steps=lambda: self.now)

    def add(self, request: ResourceRequest) -> ReferenceCall:
        call = ReferenceCall(request, self.now + request.num_output)
        call.reservation = self.load.reserve(request)
        self.calls.append(call)
        return call

    def remove(self, call: ReferenceCall) -> None:
        self.calls.remove(call)
        self.load.release(call.reservation)

    def has_room(self, request: ResourceRequest) -> bool:
        num_added, room = (
            self.load.num_new_tokens(request),
            self.load.num_free_tokens(is_latency_critical=False),
        )
        return self.load.fits(request, num_added, room)

    def peak(self, *others: ReferenceCall) -> int:
        """Return the maximum over all steps from now on; overdue calls hold their full size."""
        calls = [*self.calls, *others]
        if not calls:
            return 0
        totals = []
        for step in range(self.now, max(self.now, *(call.ends_at for call in calls)) + 1):
            held = [call.tokens_in(step, self.now) for call in calls]
            totals.append(
                max(shared_tokens for shared_tokens, _ in held)
                + sum(own_tokens for _, own_tokens in held)
            )
        return max(totals)


@st.composite
def demands(draw: st.DrawFn) -> ResourceRequest:
    boundaries = LENGTHS[: draw(st.integers(0, len(LENGTHS)))]
    num_output = draw(st.integers(1, 30))
    own_tokens = draw(st.integers(0, 30))
    return resource_request(
        need=(boundaries[-1] if boundaries else 0) + own_tokens + num_output,
        num_output=num_output,
        prefixes=prefixes(*boundaries, stays=draw(st.booleans())),
    )


@given(st.data())
def test_peak_equals_step_by_step_simulation(data: st.DataObject) -> None:
    """Calls may keep pace, stop early, begin late or never reach their ends."""
    model = ReferenceEngine()
    for each in data.draw(st.lists(demands(), max_size=12)):
        model.now += data.draw(st.integers(0, 10))
        match data.draw(st.sampled_from(("all keep pace", "one begins", "one stops", "nothing"))):
            case "all keep pace":
                for call in [g for g in model.calls if g.ends_at <= model.now]:
                    model.remove(call)
            case "one begins" if model.calls:
                call = data.draw(st.sampled_from(model.calls))
                model.load.on_prefill_done(call.reservation)
                call.ends_at = model.now + call.request.num_output
            case "one stops" if model.calls:
                model.remove(data.draw(st.sampled_from(model.calls)))
            case _:
                pass
        assert model.load.peak == model.peak()
        newcomer = ReferenceCall(each, model.now + each.num_output)
        fits = model.has_room(each)
        assert fits == (model.peak(newcomer) <= CAPACITY) or not model.calls
        model.add(each)
        assert model.load.peak == model.peak() <= model.load.reserved_tokens
    for call in list(model.calls):
        model.remove(call)
    assert (model.load.peak, model.load.reserved_tokens, model.load.active_prefixes) == (0, 0, {})


@given(st.lists(st.sets(st.sampled_from(LENGTHS)), max_size=8), st.data())
def test_reservations_end_empty_for_any_boundaries(
    known: list[set[int]], data: st.DataObject
) -> None:
    model = ReferenceEngine()
    for boundaries in known:
        model.now += data.draw(st.integers(0, 3))
        model.add(resource_request(need=65, num_output=5, prefixes=prefixes(*sorted(boundaries))))
        if data.draw(st.booleans()):
            model.remove(data.draw(st.sampled_from(model.calls)))
        assert 0 <= model.load.peak <= model.load.reserved_tokens
    for call in list(model.calls):
        model.remove(call)
    assert (model.load.peak, model.load.reserved_tokens, model.load.active_prefixes) == (0, 0, {})


def test_staggered_calls_need_less_than_their_sum() -> None:
    """Ten calls of a hundred tokens, ten steps apart: the first ends when the last begins."""
    model = ReferenceEngine(capacity=700)
    request = resource_request(need=110, num_output=100)
    for _ in range(10):
        assert model.has_room(request)
        model.add(request)
        model.now += 10
    assert model.load.reserved_tokens == 1_100
    assert model.load.peak == 10 * 10 + sum(range(10, 101, 10))


def test_simultaneous_calls_need_their_sum() -> None:
    model = ReferenceEngine(capacity=270)
    request = resource_request(need=110, num_output=100)
    model.add(request)
    model.add(request)
    assert model.load.peak == model.load.reserved_tokens == 220
    assert not model.has_room(request)
    model.now = 50
    assert not model.has_room(request), "the others reach 220 tokens, and the new call 60 by then"
    model.now = 60
    assert model.has_room(request), "the others reach 220 tokens, and the new call 50 by then"


def test_prefix_counts_until_its_longest_reader_ends() -> None:
    model = ReferenceEngine()
    short, long = (
        resource_request(need=60 + num_output, num_output=num_output, prefixes=prefixes(60))
        for num_output in (10, 100)
    )
    model.add(short)
    assert model.load.peak == 70
    model.add(long)
    assert model.load.peak == 160


def test_early_end_reassigns_prefix_to_longest_reader() -> None:
    model = ReferenceEngine()
    for num_output in (10, 30, 100):
        model.add(
            resource_request(need=60 + num_output, num_output=num_output, prefixes=prefixes(60))
        )
    model.remove(model.calls[2])
    model.add(resource_request(need=90, num_output=80))
    assert model.load.peak == 60 + 30 + (90 - 50), "in step 30, not 60 + 90 in step 80"


def test_overdue_call_keeps_accounting_for_prefix() -> None:
    model = ReferenceEngine()
    short, long = (
        resource_request(need=60 + num_output, num_output=num_output, prefixes=prefixes(60))
        for num_output in (10, 20)
    )
    first = model.add(short)
    model.add(long)
    model.now = 15
    assert model.load.peak == 60 + 10 + 20
    model.add(resource_request(need=110, num_output=100))
    assert model.load.peak == 60 + 10 + 110, "the overdue call may run until step 115"
    model.load.on_prefill_done(first.reservation)
    assert model.load.peak == 110, "its end is known again, and precedes the last step"


def test_overdue_call_counts_full_size_until_end() -> None:
    model = ReferenceEngine()
    slow = model.add(resource_request(need=30, num_output=20))
    model.now = 50
    assert model.load.peak == 30
    model.add(resource_request(need=40, num_output=20))
    assert model.load.peak == 70
    model.remove(slow)
    assert model.load.peak == 40


def test_output_grows_from_end_of_prefill() -> None:
    model = ReferenceEngine()
    first = model.add(resource_request(need=110, num_output=100))
    model.now = 60
    model.load.on_prefill_done(first.reservation)
    model.add(resource_request(need=50, num_output=40))
    assert model.load.peak == 110, "when the second ends, the first has 60 steps to go"
    model.now = 130
    assert model.load.peak == 110 + 50, "the second is overdue"


def test_missing_step_count_reserves_full_length() -> None:
    engine = EngineReservations("e", 200, 9)
    request = resource_request(need=90, num_output=80, prefixes=prefixes(5))
    reservations = [engine.reserve(request), engine.reserve(request)]
    assert engine.peak == engine.reserved_tokens == 175
    engine.release(reservations[0])
    assert engine.peak == engine.reserved_tokens == 90
