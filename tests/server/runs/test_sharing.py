"""Which contexts of a program are kept, and until when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conure.server.runs.sharing import Held, Sharing, common_prefix_len


def held(context: int, ids: list[int], engine: str = "e") -> Held:
    return Held(engine, context, ids, num_keep=0, num_prompt=len(ids), since=0.0, num_own=len(ids))


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix_is_the_longest_one(a: list[int], b: list[int]) -> None:
    length = common_prefix_len(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


def test_a_prefix_is_held_until_its_last_reader_has_come() -> None:
    sharing = Sharing()
    for node in ("a", "b", "c"):
        sharing.expect(node, (b"p", node.encode()))
    assert sharing.arrive("a") == []
    prefix = held(1, [1, 2, 3])
    assert sharing.hold(b"p", prefix) is None
    assert sharing.find("e", (b"p", b"b")) == [prefix]
    assert sharing.arrive("b") == []
    assert sharing.arrive("c") == [prefix]
    assert sharing.num_held == 0


def test_nothing_is_held_for_readers_who_will_not_come() -> None:
    sharing = Sharing()
    sharing.expect("a", (b"p",))
    assert sharing.arrive("a") == []
    late = held(1, [1])
    assert sharing.hold(b"p", late) is late


def test_what_reaches_further_takes_the_place_of_what_was_held_before() -> None:
    sharing = Sharing()
    sharing.expect("a", (b"p",))
    begun, whole = held(1, [1, 2]), held(2, [1, 2, 3])
    assert sharing.hold(b"p", begun) is None
    for other in (held(3, [1]), held(4, [1, 9, 9]), held(5, [1, 2, 3], "elsewhere")):
        assert sharing.hold(b"p", other) is other
    assert sharing.hold(b"p", whole) is begun
    assert sharing.arrive("a") == [whole]


def test_it_is_known_who_will_read_what_is_held() -> None:
    sharing = Sharing()
    for node in ("a", "b"):
        sharing.expect(node, (b"p", node.encode()))
    prefix = held(1, [1])
    sharing.hold(b"p", prefix)
    assert [(each, list(readers)) for each, readers in sharing.uses()] == [(prefix, ["a", "b"])]
    sharing.arrive("a")
    assert not sharing.is_expected("a")
    assert [list(readers) for _, readers in sharing.uses()] == [["b"]]


def test_a_prompt_shares_the_longest_prefix_that_is_held_for_it() -> None:
    sharing = Sharing()
    for node in ("a", "b"):
        sharing.expect(node, (b"p", b"q"))
    assert sharing.find_longest((b"p", b"q"), [1, 2, 3]) == (None, 0)
    sharing.hold(b"p", held(1, [1]))
    sharing.hold(b"q", held(2, [1, 2, 9]))
    assert sharing.find_longest((b"p", b"q"), [1, 2, 3]) == ("e", 2)
    assert sharing.find_longest((b"p",), [1, 2, 3]) == ("e", 1)


def test_arriving_twice_counts_once() -> None:
    sharing = Sharing()
    sharing.expect("a", (b"p",))
    sharing.expect("b", (b"p",))
    sharing.arrive("a")
    sharing.arrive("a")
    assert sharing.is_coming(b"p") == 1


def test_a_lost_engine_takes_its_contexts_along() -> None:
    sharing = Sharing()
    for node in ("a", "b"):
        sharing.expect(node, (b"p",))
    sharing.hold(b"p", held(1, [1], "dead"))
    sharing.lose_engine("dead")
    assert sharing.find("dead", (b"p",)) == []
    assert sharing.hold(b"p", held(2, [1], "alive")) is None


def test_the_end_of_the_program_releases_everything() -> None:
    sharing = Sharing()
    sharing.expect("a", (b"p",))
    prefix = held(1, [1])
    sharing.hold(b"p", prefix)
    assert sharing.release_all() == [prefix]
    assert sharing.num_held == 0


def test_what_nobody_waits_for_is_given_up_with_the_program_though_it_still_fills() -> None:
    sharing = Sharing()
    released, filled, other = held(1, [1]), held(2, [2]), held(3, [3], "dead")
    for context in (released, filled, other):
        context.is_filled = False
        context.is_released = True
        sharing.fill(context)
    sharing.filled(filled)
    sharing.lose_engine("dead")
    assert sharing.release_all() == [released]
    assert released.is_filled, "free it at once, whatever it cost"
    assert sharing.release_all() == []


def test_a_context_that_failed_is_forked_from_no_more() -> None:
    sharing = Sharing()
    for node in ("a", "b", "c"):
        sharing.expect(node, (b"p", b"q"))
    bad, good = held(1, [1]), held(2, [1, 2])
    sharing.hold(b"p", bad)
    sharing.hold(b"q", good)
    sharing.discard(bad)
    sharing.discard(held(1, [1]))
    assert sharing.find("e", (b"p", b"q")) == [good]
    assert sharing.hold(b"p", held(3, [1])) is None
