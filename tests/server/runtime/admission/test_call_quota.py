"""Tests of the call quota: rejection, waiting, and order of admission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.errors import UnavailableError
from conure.server.runtime.admission.call_quota import (
    BACKGROUND_SHARE,
    READER_SHARE,
    CallQuota,
)


class Crowd:
    """Programs with open calls, and the quota that counts them."""

    def __init__(self, max_calls: int) -> None:
        self.quota = CallQuota(max_calls)
        self.programs: dict[str, Any] = {}

    def open(self, program: str, more: int, claimed: int = 0) -> None:
        """Change the number of open and reserved calls."""
        if program not in self.programs:
            self.programs[program] = SimpleNamespace(
                id=program, num_open_calls=0, num_reserved_calls=0
            )
            self.quota.add(self.programs[program])
        self.programs[program].num_open_calls += more
        self.programs[program].num_reserved_calls += claimed
        self.quota.count(self.programs[program])

    def leave(self, program: str) -> None:
        self.quota.remove(self.programs.pop(program))


@dataclass(eq=False)
class Wide:
    """A map with more items than the quota admits."""

    name: str
    crowd: Crowd
    num_items: int = 1000
    num_calls: int = 1
    is_background: bool = True
    is_gone: bool = False
    log: list[tuple[str, int]] = field(default_factory=list)
    on_admit: Callable[[], None] = lambda: None

    @property
    def num_waiting_calls(self) -> int:
        return self.num_items * self.num_calls

    def admit(self, num_items: int) -> bool:
        self.on_admit()
        num_items = min(num_items, self.num_items)
        self.num_items -= num_items
        self.log.append((self.name, num_items))
        self.crowd.open(self.name, num_items * self.num_calls)
        return self.num_items > 0 and not self.is_gone


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_program_is_rejected_only_while_quota_is_full() -> None:
    crowd = Crowd(4)
    crowd.open("p", 3)
    crowd.quota.check(1)
    with pytest.raises(UnavailableError) as refused:
        crowd.quota.check(2)
    assert refused.value.code == "queue.full"
    crowd.open("p", -1)
    crowd.quota.check(2)
    crowd.leave("p")
    assert crowd.quota.num_calls == 0
    crowd.quota.check(4)


def test_removed_program_is_not_counted() -> None:
    crowd = Crowd(4)
    crowd.open("p", 3)
    gone = crowd.programs["p"]
    crowd.leave("p")
    gone.num_open_calls = 2
    crowd.quota.count(gone)
    crowd.quota.remove(gone)
    assert crowd.quota.num_calls == 0


async def test_map_items_leave_quota_for_programs() -> None:
    crowd = Crowd(100)
    crowd.open("others", 40)
    wide = Wide("m", crowd)
    crowd.quota.request(wide)
    await turns()
    assert crowd.quota.num_calls == 100 * BACKGROUND_SHARE
    crowd.quota.check(25)
    crowd.open("others", -30)
    await turns()
    assert crowd.quota.num_calls == 100 * BACKGROUND_SHARE


@pytest.mark.parametrize("is_in_map", [True, False])
async def test_background_calls_leave_quota_for_maps_with_a_reader(is_in_map: bool) -> None:
    crowd = Crowd(160)
    if is_in_map:
        for name in "abc":
            crowd.quota.request(Wide(name, crowd))
    else:
        crowd.open("plain", int(160 * BACKGROUND_SHARE))
    await turns()
    with_reader = Wide("r", crowd, num_items=18, is_background=False)
    crowd.quota.request(with_reader)
    await turns()
    assert with_reader.num_items == 0


async def test_a_map_with_a_late_reader_changes_its_queue() -> None:
    crowd = Crowd(160)
    crowd.open("others", int(160 * BACKGROUND_SHARE))
    waiting = Wide("m", crowd, num_items=18)
    crowd.quota.request(waiting)
    crowd.quota.request(Wide("background", crowd))
    await turns()
    assert waiting.num_items == 18
    waiting.is_background = False
    crowd.open("others", -1)
    await turns()
    assert waiting.num_items == 0


async def test_the_rest_of_a_map_is_admitted_once_it_fits() -> None:
    crowd = Crowd(1_600)
    crowd.open("others", int(1_600 * READER_SHARE))
    short = Wide("short", crowd, num_items=3, is_background=False)
    crowd.quota.request(short)
    await turns()
    crowd.open("others", -2)
    await turns()
    assert short.num_items == 3
    crowd.open("others", -1)
    await turns()
    assert short.num_items == 0


async def test_maps_with_a_reader_go_first() -> None:
    crowd = Crowd(160)
    crowd.open("others", int(160 * READER_SHARE))
    log: list[tuple[str, int]] = []
    crowd.quota.request(Wide("background", crowd, log=log))
    crowd.quota.request(Wide("reader", crowd, num_items=60, is_background=False, log=log))
    for _ in range(5):
        crowd.open("others", -20)
        await turns()
    assert [name for name, _ in log[:-1]] == ["reader"] * (len(log) - 1)
    assert sum(num_items for name, num_items in log if name == "reader") == 60
    assert crowd.quota.num_calls == 160 * BACKGROUND_SHARE


async def test_items_are_admitted_in_batches() -> None:
    crowd = Crowd(400)
    wide = Wide("m", crowd)
    crowd.quota.request(wide)
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
        crowd.quota.request(Wide(name, crowd, log=log))
    for _ in range(9):
        crowd.open("others", -1)
        await turns()
    assert [name for name, _ in log] == list("abcabcabc")


@given(st.integers(2, 4), st.lists(st.integers(1, 12), min_size=1, max_size=12))
async def test_maps_share_calls_that_end_together(num_maps: int, ended: list[int]) -> None:
    crowd = Crowd(16)
    crowd.open("others", 200)
    maps = [Wide(str(index), crowd) for index in range(num_maps)]
    for wide in maps:
        crowd.open(wide.name, 0)
        crowd.quota.request(wide)
    for num_calls in ended:
        for wide in maps:
            crowd.open(wide.name, -crowd.programs[wide.name].num_open_calls)
        crowd.open("others", 12 - num_calls - crowd.programs["others"].num_open_calls)
        await turns()
        admitted = [wide.num_items for wide in maps]
        assert max(admitted) - min(admitted) <= 1


@pytest.mark.parametrize("is_pruned", [False, True])
async def test_a_map_that_is_gone_leaves_its_share_to_all(is_pruned: bool) -> None:
    crowd = Crowd(64)
    crowd.open("others", 48)
    maps = {name: Wide(name, crowd) for name in "abcd"}

    def end_second() -> None:
        maps["b"].is_gone = True
        if is_pruned:
            for number in range(4):
                crowd.open(str(number), 0)
                crowd.leave(str(number))

    maps["a"].on_admit = end_second
    for wide in maps.values():
        crowd.quota.request(wide)
    crowd.open("others", -40)
    await turns()
    admitted = [1_000 - maps[name].num_items for name in "acd"]
    assert sum(admitted) == 40
    assert max(admitted) - min(admitted) <= 1


async def test_first_waiter_is_not_overtaken() -> None:
    crowd = Crowd(16)
    crowd.open("others", 12)
    log: list[tuple[str, int]] = []
    large = Wide("large", crowd, num_items=1, num_calls=4, log=log)
    crowd.quota.request(large)
    crowd.quota.request(Wide("small", crowd, log=log))
    crowd.open("others", -3)
    await turns()
    assert log == []
    crowd.open("others", -1)
    await turns()
    assert log[0] == ("large", 1)


async def test_oversized_item_is_admitted_alone() -> None:
    crowd = Crowd(16)
    crowd.open("others", 1)
    large = Wide("large", crowd, num_items=1, num_calls=40)
    crowd.quota.request(large)
    small = Wide("small", crowd)
    crowd.quota.request(small)
    await turns()
    assert not large.log
    crowd.open("others", -1)
    await turns()
    assert large.log == [("large", 1)]
    assert not small.log


async def test_ended_map_does_not_block_the_queue() -> None:
    crowd = Crowd(16)
    crowd.open("others", 12)
    gone = Wide("gone", crowd, num_calls=9)
    crowd.quota.request(gone)
    wide = Wide("m", crowd)
    crowd.quota.request(wide)
    gone.is_gone = True
    crowd.open("others", -1)
    await turns()
    assert not gone.log
    assert wide.log == [("m", 1)]


async def test_unstarted_expansions_are_reserved() -> None:
    """A map inside an item, or a loop, adds calls later."""
    crowd = Crowd(16)
    crowd.open("nested", 0, claimed=10)
    wide = Wide("m", crowd)
    crowd.quota.request(wide)
    await turns()
    assert crowd.programs["m"].num_open_calls == 2
    assert crowd.quota.num_calls == 2


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=60))
def test_quota_is_exact_and_maps_stay_in_their_share(
    max_calls: int, steps: list[tuple[int, int]]
) -> None:
    async def play() -> None:
        crowd = Crowd(max_calls)
        for number, (kind, size) in enumerate(steps):
            before = crowd.quota.num_calls
            if kind == 0:
                wide = Wide(f"m{number}", crowd, size, size % 3 + 1, is_background=size % 2 == 0)
                crowd.quota.request(wide)
            elif kind == 1 and crowd.programs:
                name = min(crowd.programs)
                crowd.open(name, -min(size, crowd.programs[name].num_open_calls))
            elif kind == 2 and crowd.programs:
                crowd.leave(max(crowd.programs))
            await turns()
            assert crowd.quota.num_calls == sum(
                program.num_open_calls for program in crowd.programs.values()
            )
            largest = max(1, int(max_calls * READER_SHARE))
            assert crowd.quota.num_calls <= max(before, largest, 3)

    asyncio.run(play())


async def test_failing_waiter_does_not_block_others() -> None:
    class Broken(Wide):
        def admit(self, num_items: int) -> bool:
            raise AssertionError("mine")

    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    crowd = Crowd(16)
    crowd.open("other", 12)
    good = Wide("good", crowd, num_items=5)
    crowd.quota.request(Broken("bad", crowd))
    crowd.quota.request(good)
    crowd.open("other", -8)
    await turns()
    assert good.num_items == 0
    assert len(problems) == 1


async def test_removed_programs_leave_the_queue() -> None:
    crowd = Crowd(16)
    crowd.open("other", 12)
    first = Wide("first", crowd)
    crowd.quota.request(first)
    for i in range(100):
        crowd.open(f"p{i}", 0)
        guest = Wide(f"p{i}", crowd)
        crowd.quota.request(guest)
        guest.is_gone = True
        crowd.leave(f"p{i}")
    waiting = crowd.quota._in_background.maps
    assert len(waiting) < 4
    assert waiting[0] is first
