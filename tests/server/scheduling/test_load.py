"""The books of an engine, against a model that counts tokens one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conure.server.scheduling.demand import Demand, prefixes_of
from conure.server.scheduling.load import Booking, Load

from .desks import demand, prefixes


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Ids and cuts, so chosen that many prompts start alike."""
    runs = draw(st.lists(st.integers(0, 1), max_size=4))
    ids = [run for run in runs for _ in range(16)]
    return ids + [9] * draw(st.integers(0, 5)), [16 * (i + 1) for i in range(len(runs))]


def demand_of(ids: list[int], cuts: list[int], num_output: int) -> Demand:
    return Demand(
        program="p",
        num_prompt=len(ids),
        num_output=num_output,
        prefixes=prefixes_of(ids, [(cut, True) for cut in cuts], "salt"),
    )


@given(st.lists(st.tuples(prompts(), st.integers(0, 9), st.booleans()), max_size=12), st.data())
def test_shared_tokens_count_once_whoever_comes_and_goes(
    calls: list[tuple[tuple[list[int], list[int]], int, bool]], data: st.DataObject
) -> None:
    load = Load("e", capacity=200, max_calls=99)
    running: list[tuple[Booking, set[object]]] = []
    for i, ((ids, cuts), num_output, leaves) in enumerate(calls):
        wanted = demand_of(ids, cuts, num_output)
        last = cuts[-1] if cuts else 0
        own: set[object] = {tuple(ids[: n + 1]) for n in range(last)}
        own |= {(i, "own", n) for n in range(len(ids) - last + num_output)}
        held = set[object]().union(*(tokens for _, tokens in running))
        assert load.num_added(wanted) == len(own - held)
        running.append((load.book(wanted), own))
        if leaves:
            gone, _ = running.pop(data.draw(st.integers(0, len(running) - 1)))
            load.leave(gone)
        assert (
            load.used == load.peak == len(set[object]().union(*(tokens for _, tokens in running)))
        )
        assert load.num_calls == len(running)
        assert load.num_cached == sum(load.cached.values()) <= max(load.capacity - load.used, 0)
        assert not load.cached.keys() & load.held.keys()
    for booking, _ in running:
        load.leave(booking)
    assert (load.used, load.num_calls, load.held) == (0, 0, {})
    assert not load.programs


def test_of_one_prompt_the_cache_gives_up_the_end_first() -> None:
    load = Load("e", capacity=100, max_calls=9)
    first = demand(need=60, prefixes=prefixes(20, 40, 60, stays=True))
    assert load.leave(load.book(first)) == []
    assert load.book(demand(need=50)).evicted == [b"x60"]
    assert load.num_shared(first) == 40
    assert load.num_added(first) == 60, "what nobody reads has to be taken up again"


def test_what_does_not_stay_is_gone_with_its_last_reader() -> None:
    load = Load("e", capacity=100, max_calls=9)
    reader = demand(need=60, prefixes=prefixes(20))
    bookings = [load.book(reader), load.book(reader)]
    assert load.leave(bookings[0]) == []
    assert load.leave(bookings[1]) == [b"x20"]


def test_a_call_counts_for_a_last_block_that_may_hold_a_single_token() -> None:
    load = Load("e", capacity=100, max_calls=9, block_size=16)
    reader = demand(need=60, prefixes=prefixes(32))
    first = load.book(reader)
    assert load.used == load.peak == 60 + 15
    assert load.num_added(reader) == 28 + 15
    second = load.book(reader)
    assert load.used == load.peak == 32 + 2 * (28 + 15)
    for booking in (first, second):
        load.leave(booking)
    assert load.used == load.peak == 0


def test_keys_name_the_tokens_and_the_salt_and_nothing_else() -> None:
    ids = list(range(40))
    cuts = [(16, True), (20, True), (32, False)]
    found = prefixes_of(ids, cuts, "t")
    assert [(p.num_tokens, p.stays) for p in found] == [(16, True), (32, False)]
    assert found == prefixes_of([*ids, 7], [(16, True), (32, False)], "t")
    assert found[0].key == prefixes_of(ids[:16], [(16, True)], "t")[0].key
    others = [prefixes_of(ids, cuts, "u"), prefixes_of([8, *ids[1:]], cuts, "t")]
    assert all(a.key != b.key for other in others for a, b in zip(found, other, strict=True))


def test_of_many_boundaries_the_first_and_the_last_are_looked_at() -> None:
    found = prefixes_of(list(range(1_600)), [(16 * i, True) for i in range(1, 101)], "t")
    assert [p.num_tokens for p in found] == [16, 32, 48, 64, 1552, 1568, 1584, 1600]
