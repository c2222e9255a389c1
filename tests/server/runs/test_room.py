"""Room for calls: who is refused, who waits, and who comes next."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conure.server.program.errors import UnavailableError
from conure.server.runs.room import MAPS_PART, Room


class Crowd:
    """Programs that say what they have open, and the room that counts it."""

    def __init__(self, max_calls: int) -> None:
        self.room = Room(max_calls)
        self.programs: dict[str, Any] = {}

    def open(self, program: str, more: int, claimed: int = 0) -> None:
        """So many more calls are open, or fewer."""
        if program not in self.programs:
            self.programs[program] = SimpleNamespace(
                id=program, num_open_calls=0, num_claimed_calls=0
            )
            self.room.enter(self.programs[program])
        self.programs[program].num_open_calls += more
        self.programs[program].num_claimed_calls += claimed
        self.room.count(self.programs[program])

    def leave(self, program: str) -> None:
        self.room.leave(self.programs.pop(program))


@dataclass(eq=False)
class Wide:
    """A map with more items than there is room for."""

    name: str
    crowd: Crowd
    num_items: int = 1000
    num_calls: int = 1
    is_gone: bool = False
    log: list[tuple[str, int]] = field(default_factory=list)

    def admit(self, num_items: int) -> bool:
        num_items = min(num_items, self.num_items)
        self.num_items -= num_items
        self.log.append((self.name, num_items))
        self.crowd.open(self.name, num_items * self.num_calls)
        return self.num_items > 0 and not self.is_gone


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_program_is_refused_for_as_long_as_calls_are_open_and_no_longer() -> None:
    crowd = Crowd(4)
    crowd.open("p", 3)
    crowd.room.check(1)
    with pytest.raises(UnavailableError) as refused:
        crowd.room.check(2)
    assert refused.value.code == "queue.full"
    crowd.open("p", -1)
    crowd.room.check(2)
    crowd.leave("p")
    assert crowd.room.num_calls == 0
    crowd.room.check(4)


def test_a_program_that_is_gone_counts_no_more_whatever_ends_in_it() -> None:
    crowd = Crowd(4)
    crowd.open("p", 3)
    gone = crowd.programs["p"]
    crowd.leave("p")
    gone.num_open_calls = 2
    crowd.room.count(gone)
    crowd.room.leave(gone)
    assert crowd.room.num_calls == 0


async def test_items_of_a_map_leave_room_for_programs_and_come_as_others_end() -> None:
    crowd = Crowd(100)
    crowd.open("others", 40)
    wide = Wide("m", crowd)
    crowd.room.ask(wide)
    await turns()
    assert crowd.room.num_calls == 100 * MAPS_PART
    crowd.room.check(25)
    crowd.open("others", -30)
    await turns()
    assert crowd.room.num_calls == 100 * MAPS_PART


async def test_items_do_not_come_one_by_one_as_calls_end() -> None:
    crowd = Crowd(400)
    wide = Wide("m", crowd)
    crowd.room.ask(wide)
    await turns()
    wide.log.clear()
    for _ in range(60):
        crowd.open("m", -1)
        await turns()
    assert 2 <= len(wide.log) <= 4
    assert all(num_items >= 10 for _, num_items in wide.log)


async def test_maps_that_wait_take_turns() -> None:
    crowd = Crowd(16)
    crowd.open("others", 12)
    log: list[tuple[str, int]] = []
    for name in "abc":
        crowd.room.ask(Wide(name, crowd, log=log))
    for _ in range(9):
        crowd.open("others", -1)
        await turns()
    assert [name for name, _ in log] == list("abcabcabc")


async def test_nobody_takes_the_room_that_the_first_in_line_waits_for() -> None:
    crowd = Crowd(16)
    crowd.open("others", 12)
    log: list[tuple[str, int]] = []
    large = Wide("large", crowd, num_items=1, num_calls=4, log=log)
    crowd.room.ask(large)
    crowd.room.ask(Wide("small", crowd, log=log))
    crowd.open("others", -3)
    await turns()
    assert log == []
    crowd.open("others", -1)
    await turns()
    assert log[0] == ("large", 1)


async def test_an_item_larger_than_all_room_comes_when_it_is_alone() -> None:
    crowd = Crowd(16)
    crowd.open("others", 1)
    large = Wide("large", crowd, num_items=1, num_calls=40)
    crowd.room.ask(large)
    small = Wide("small", crowd)
    crowd.room.ask(small)
    await turns()
    assert not large.log
    crowd.open("others", -1)
    await turns()
    assert large.log == [("large", 1)]
    assert not small.log


async def test_a_map_that_is_gone_keeps_nobody_waiting() -> None:
    crowd = Crowd(16)
    crowd.open("others", 12)
    gone = Wide("gone", crowd, num_calls=9)
    crowd.room.ask(gone)
    wide = Wide("m", crowd)
    crowd.room.ask(wide)
    gone.is_gone = True
    crowd.open("others", -1)
    await turns()
    assert not gone.log
    assert wide.log == [("m", 1)]


async def test_what_has_not_begun_keeps_its_place() -> None:
    """A map inside of an item, or a loop, will have calls of its own."""
    crowd = Crowd(16)
    crowd.open("nested", 0, claimed=10)
    wide = Wide("m", crowd)
    crowd.room.ask(wide)
    await turns()
    assert crowd.programs["m"].num_open_calls == 2
    assert crowd.room.num_calls == 2


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=60))
def test_the_room_counts_right_and_maps_never_fill_more_than_their_part(
    max_calls: int, steps: list[tuple[int, int]]
) -> None:
    async def play() -> None:
        crowd = Crowd(max_calls)
        for number, (kind, size) in enumerate(steps):
            if kind == 0:
                crowd.room.ask(Wide(f"m{number}", crowd, size, size % 3 + 1))
            elif kind == 1 and crowd.programs:
                name = min(crowd.programs)
                crowd.open(name, -min(size, crowd.programs[name].num_open_calls))
            elif kind == 2 and crowd.programs:
                crowd.leave(max(crowd.programs))
            before = crowd.room.num_calls
            await turns()
            assert crowd.room.num_calls == sum(
                program.num_open_calls for program in crowd.programs.values()
            )
            largest = max(1, int(max_calls * MAPS_PART))
            assert crowd.room.num_calls <= max(before, largest, 3)

    asyncio.run(play())


async def test_a_guest_that_breaks_holds_up_nobody() -> None:
    class Broken(Wide):
        def admit(self, num_items: int) -> bool:
            raise AssertionError("mine")

    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    crowd = Crowd(16)
    crowd.open("other", 12)
    good = Wide("good", crowd, num_items=5)
    crowd.room.ask(Broken("bad", crowd))
    crowd.room.ask(good)
    crowd.open("other", -8)
    await turns()
    assert good.num_items == 0
    assert len(problems) == 1


async def test_programs_that_are_gone_leave_the_line_behind_one_that_waits() -> None:
    crowd = Crowd(16)
    crowd.open("other", 12)
    first = Wide("first", crowd)
    crowd.room.ask(first)
    for i in range(100):
        crowd.open(f"p{i}", 0)
        guest = Wide(f"p{i}", crowd)
        crowd.room.ask(guest)
        guest.is_gone = True
        crowd.leave(f"p{i}")
    assert len(crowd.room._line) < 4
    assert crowd.room._line[0] is first
