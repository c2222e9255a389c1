"""Reservations of an engine, compared with a model that counts single tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conure.server.scheduling.request import ResourceRequest, hash_prefixes
from conure.server.scheduling.reservations import EngineReservations, Reservation

from .scheduler_harness import prefixes, resource_request


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Return ids and boundaries, such that many prompts start alike."""
    runs = draw(st.lists(st.integers(0, 1), max_size=4))
    ids = [run for run in runs for _ in range(16)]
    return ids + [9] * draw(st.integers(0, 5)), [16 * (i + 1) for i in range(len(runs))]


def demand_of(ids: list[int], boundaries: list[int], num_output: int) -> ResourceRequest:
    return ResourceRequest(
        program="p",
        num_prompt=len(ids),
        num_output=num_output,
        prefixes=hash_prefixes(ids, [(cut, True) for cut in boundaries], "salt"),
    )


@given(st.lists(st.tuples(prompts(), st.integers(0, 9), st.booleans()), max_size=12), st.data())
def test_shared_tokens_count_once_under_any_sequence(
    calls: list[tuple[tuple[list[int], list[int]], int, bool]], data: st.DataObject
) -> None:
    engine = EngineReservations("e", capacity=200, max_calls=99)
    running: list[tuple[Reservation, set[object]]] = []
    for i, ((ids, boundaries), num_output, leaves) in enumerate(calls):
        request = demand_of(ids, boundaries, num_output)
        last = boundaries[-1] if boundaries else 0
        own: set[object] = {tuple(ids[: n + 1]) for n in range(last)}
        own |= {(i, "own", n) for n in range(len(ids) - last + num_output)}
        held = set[object]().union(*(tokens for _, tokens in running))
        assert engine.num_new_tokens(request) == len(own - held)
        running.append((engine.reserve(request), own))
        if leaves:
            gone, _ = running.pop(data.draw(st.integers(0, len(running) - 1)))
            engine.release(gone)
        assert (
            engine.reserved_tokens
            == engine.peak
            == len(set[object]().union(*(tokens for _, tokens in running)))
        )
        assert engine.num_calls == len(running)
        assert (
            engine.num_cached_tokens
            == sum(engine.cached_prefixes.values())
            <= max(engine.capacity - engine.reserved_tokens, 0)
        )
        assert not engine.cached_prefixes.keys() & engine.active_prefixes.keys()
    for reservation, _ in running:
        engine.release(reservation)
    assert (engine.reserved_tokens, engine.num_calls, engine.active_prefixes) == (0, 0, {})


def test_cache_evicts_end_of_prompt_first() -> None:
    engine = EngineReservations("e", capacity=100, max_calls=9)
    first = resource_request(need=60, prefixes=prefixes(20, 40, 60, stays=True))
    assert engine.release(engine.reserve(first)) == []
    assert engine.reserve(resource_request(need=50)).evicted == [b"x60"]
    assert engine.num_shared_tokens(first) == 40
    assert engine.num_new_tokens(first) == 60, "a cached prefix without readers is reserved again"


def test_prefix_without_expected_readers_ends_with_last_reader() -> None:
    engine = EngineReservations("e", capacity=100, max_calls=9)
    reader = resource_request(need=60, prefixes=prefixes(20))
    reservations = [engine.reserve(reader), engine.reserve(reader)]
    assert engine.release(reservations[0]) == []
    assert engine.release(reservations[1]) == [b"x20"]


def test_call_reserves_a_partially_filled_last_block() -> None:
    engine = EngineReservations("e", capacity=100, max_calls=9, block_size=16)
    reader = resource_request(need=60, prefixes=prefixes(32))
    first = engine.reserve(reader)
    assert engine.reserved_tokens == engine.peak == 60 + 15
    assert engine.num_new_tokens(reader) == 28 + 15
    second = engine.reserve(reader)
    assert engine.reserved_tokens == engine.peak == 32 + 2 * (28 + 15)
    for reservation in (first, second):
        engine.release(reservation)
    assert engine.reserved_tokens == engine.peak == 0


def test_prefix_keys_depend_on_tokens_and_salt_only() -> None:
    ids = list(range(40))
    boundaries = [(16, True), (20, True), (32, False)]
    found = hash_prefixes(ids, boundaries, "t")
    assert [(p.num_tokens, p.is_expected) for p in found] == [(16, True), (32, False)]
    assert found == hash_prefixes([*ids, 7], [(16, True), (32, False)], "t")
    assert found[0].key == hash_prefixes(ids[:16], [(16, True)], "t")[0].key
    others = [hash_prefixes(ids, boundaries, "u"), hash_prefixes([8, *ids[1:]], boundaries, "t")]
    assert all(a.key != b.key for other in others for a, b in zip(found, other, strict=True))


def test_first_and_last_boundaries_are_selected() -> None:
    found = hash_prefixes(list(range(1_600)), [(16 * i, True) for i in range(1, 101)], "t")
    assert [p.num_tokens for p in found] == [16, 32, 48, 64, 1552, 1568, 1584, 1600]
