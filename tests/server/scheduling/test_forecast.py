"""What calls will hold together, against a model that lives through every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.scheduling.demand import Demand
from conure.server.scheduling.load import Booking, Load

from .desks import demand, prefixes

CAPACITY = 300
LENGTHS = (20, 40, 60)
"""Of the prefixes of one text."""


@dataclass
class Guest:
    """A call in the model."""

    wanted: Demand
    ends_at: int
    booking: Booking = field(init=False)

    def held_in(self, step: int, now: int) -> tuple[int, int]:
        """Tokens of the text and of its own in a step to come."""
        if self.ends_at < step and self.ends_at >= now:
            return 0, 0
        shared = self.wanted.prefixes[-1].num_tokens if self.wanted.prefixes else 0
        missing = max(self.ends_at - step, 0)
        return shared, self.wanted.num_tokens - shared - missing


class House:
    """An engine's books beside the model of them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.now = 0
        self.guests: list[Guest] = []
        self.load = Load("e", capacity, 99, steps=lambda: self.now)

    def enter(self, wanted: Demand) -> Guest:
        guest = Guest(wanted, self.now + wanted.num_output)
        guest.booking = self.load.book(wanted)
        self.guests.append(guest)
        return guest

    def leave(self, guest: Guest) -> None:
        self.guests.remove(guest)
        self.load.leave(guest.booking)

    def takes(self, wanted: Demand) -> bool:
        num_added, room = self.load.num_added(wanted), self.load.room(is_strict=False)
        return self.load.fits(wanted, num_added, room)

    def peak(self, *others: Guest) -> int:
        """The most of all steps from now on; late calls hold all that they may."""
        guests = [*self.guests, *others]
        if not guests:
            return 0
        totals = []
        for step in range(self.now, max(self.now, *(guest.ends_at for guest in guests)) + 1):
            held = [guest.held_in(step, self.now) for guest in guests]
            totals.append(max(text for text, _ in held) + sum(own for _, own in held))
        return max(totals)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    cuts = LENGTHS[: draw(st.integers(0, len(LENGTHS)))]
    num_output = draw(st.integers(1, 30))
    own = draw(st.integers(0, 30))
    return demand(
        need=(cuts[-1] if cuts else 0) + own + num_output,
        num_output=num_output,
        prefixes=prefixes(*cuts, stays=draw(st.booleans())),
    )


@settings(deadline=None)
@given(st.data())
def test_the_peak_is_that_of_living_through_it(data: st.DataObject) -> None:
    """Whether calls keep pace, stop early, begin late or never come to their ends."""
    house = House()
    for each in data.draw(st.lists(demands(), max_size=12)):
        house.now += data.draw(st.integers(0, 10))
        match data.draw(st.sampled_from(("all keep pace", "one begins", "one stops", "nothing"))):
            case "all keep pace":
                for guest in [g for g in house.guests if g.ends_at <= house.now]:
                    house.leave(guest)
            case "one begins" if house.guests:
                guest = data.draw(st.sampled_from(house.guests))
                house.load.filled(guest.booking)
                guest.ends_at = house.now + guest.wanted.num_output
            case "one stops" if house.guests:
                house.leave(data.draw(st.sampled_from(house.guests)))
            case _:
                pass
        assert house.load.peak == house.peak()
        newcomer = Guest(each, house.now + each.num_output)
        fits = house.takes(each)
        assert fits == (house.peak(newcomer) <= CAPACITY) or not house.guests
        house.enter(each)
        assert house.load.peak == house.peak() <= house.load.used
    for guest in list(house.guests):
        house.leave(guest)
    assert (house.load.peak, house.load.used, house.load.held) == (0, 0, {})


@given(st.lists(st.sets(st.sampled_from(LENGTHS)), max_size=8), st.data())
def test_whatever_boundaries_prompts_know_the_books_are_empty_in_the_end(
    known: list[set[int]], data: st.DataObject
) -> None:
    house = House()
    for cuts in known:
        house.now += data.draw(st.integers(0, 3))
        house.enter(demand(need=65, num_output=5, prefixes=prefixes(*sorted(cuts))))
        if data.draw(st.booleans()):
            house.leave(data.draw(st.sampled_from(house.guests)))
        assert 0 <= house.load.peak <= house.load.used
    for guest in list(house.guests):
        house.leave(guest)
    assert (house.load.peak, house.load.used, house.load.held) == (0, 0, {})


def test_calls_that_began_one_after_the_other_need_less_than_all_they_write() -> None:
    """Ten calls of a hundred tokens, ten steps apart: the first ends as the last begins."""
    house = House(capacity=700)
    wanted = demand(need=110, num_output=100)
    for _ in range(10):
        assert house.takes(wanted)
        house.enter(wanted)
        house.now += 10
    assert house.load.used == 1_100
    assert house.load.peak == 10 * 10 + sum(range(10, 101, 10))


def test_calls_that_begin_together_need_all_they_write() -> None:
    house = House(capacity=270)
    wanted = demand(need=110, num_output=100)
    house.enter(wanted)
    house.enter(wanted)
    assert house.load.peak == house.load.used == 220
    assert not house.takes(wanted)
    house.now = 50
    assert not house.takes(wanted), "they come to 220, and it to 60 by then"
    house.now = 60
    assert house.takes(wanted), "they come to 220, and it to 50 by then"


def test_a_prefix_counts_until_its_longest_reader_ends() -> None:
    house = House()
    short, long = (
        demand(need=60 + num_output, num_output=num_output, prefixes=prefixes(60))
        for num_output in (10, 100)
    )
    house.enter(short)
    assert house.load.peak == 70
    house.enter(long)
    assert house.load.peak == 160


def test_who_stops_early_leaves_a_prefix_to_the_one_that_stays_longest_then() -> None:
    house = House()
    for num_output in (10, 30, 100):
        house.enter(demand(need=60 + num_output, num_output=num_output, prefixes=prefixes(60)))
    house.leave(house.guests[2])
    house.enter(demand(need=90, num_output=80))
    assert house.load.peak == 60 + 30 + (90 - 50), "in step 30, not 60 + 90 in step 80"


def test_a_late_call_keeps_its_prefix_whoever_else_reads_it() -> None:
    house = House()
    short, long = (
        demand(need=60 + num_output, num_output=num_output, prefixes=prefixes(60))
        for num_output in (10, 20)
    )
    first = house.enter(short)
    house.enter(long)
    house.now = 15
    assert house.load.peak == 60 + 10 + 20
    house.enter(demand(need=110, num_output=100))
    assert house.load.peak == 60 + 10 + 110, "until it is gone, and that may be in step 115"
    house.load.filled(first.booking)
    assert house.load.peak == 110, "its end is known again, and is before the last"


def test_a_call_that_is_late_counts_whole_until_it_is_gone() -> None:
    house = House()
    slow = house.enter(demand(need=30, num_output=20))
    house.now = 50
    assert house.load.peak == 30
    house.enter(demand(need=40, num_output=20))
    assert house.load.peak == 70
    house.leave(slow)
    assert house.load.peak == 40


def test_an_output_grows_from_when_its_prompt_is_there() -> None:
    house = House()
    first = house.enter(demand(need=110, num_output=100))
    house.now = 60
    house.load.filled(first.booking)
    house.enter(demand(need=50, num_output=40))
    assert house.load.peak == 110, "when the second ends, the first has 60 steps to go"
    house.now = 130
    assert house.load.peak == 110 + 50, "the second is late"


def test_an_engine_that_tells_no_steps_books_all_that_calls_may_write() -> None:
    load = Load("e", 200, 9)
    wanted = demand(need=90, num_output=80, prefixes=prefixes(5))
    bookings = [load.book(wanted), load.book(wanted)]
    assert load.peak == load.used == 175
    load.leave(bookings[0])
    assert load.peak == load.used == 90
