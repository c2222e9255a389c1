"""The tree of an engine's running calls."""

from __future__ import annotations

from conure.server.runtime.reporting.kv_tree import MAX_TREE_CALLS, KvBranch, KvCall, kv_tree
from conure.server.scheduling.request import PromptPrefix, ResourceRequest
from conure.server.scheduling.reservations import EngineReservations


def request(node: str, *prefixes: tuple[str, int], program: str = "p") -> ResourceRequest:
    """Return a call with 20 tokens after its last prefix, and 10 tokens of output."""
    keys = tuple(PromptPrefix(key.encode(), end) for key, end in prefixes)
    begin = prefixes[-1][1] if prefixes else 0
    return ResourceRequest(
        program=program, node=node, num_prompt=begin + 20, num_output=10, prefixes=keys
    )


def tree(
    *requests: ResourceRequest, named: str = "p", steps: list[int] | None = None
) -> list[KvBranch]:
    now = steps if steps is not None else [0]
    reservations = EngineReservations("e", 10_000, 1_000, steps=lambda: now[0])
    for each in requests:
        reservations.on_prefill_done(reservations.reserve(each))
    return kv_tree(reservations, lambda program: program == named)


def call(node: str, tokens: int = 30) -> KvCall:
    return KvCall(program="p", node=node, tokens=tokens, steps_left=10)


def branch(depth: int, tokens: int, num_calls: int, *calls: KvCall) -> KvBranch:
    return KvBranch(
        depth=depth, tokens=tokens, num_calls=num_calls, steps_left=10, calls=list(calls)
    )


def test_an_idle_engine_has_no_tree() -> None:
    assert tree() == []


def test_calls_with_a_common_beginning_are_in_its_branch() -> None:
    shared, longer = ("P1", 100), ("P2", 150)
    found = tree(request("a", shared, longer), request("b", shared, longer), request("c", shared))
    assert found == [
        branch(0, 0, 3),
        branch(1, 100, 3, call("c")),
        branch(2, 50, 2, call("a"), call("b")),
    ]


def test_a_prefix_with_one_reader_belongs_to_its_call() -> None:
    found = tree(request("a", ("P1", 100)), request("b", ("P2", 50)))
    assert found == [branch(0, 0, 2, call("a", 130), call("b", 80))]


def test_boundaries_that_the_same_calls_read_are_one_branch() -> None:
    prefixes = (("P1", 40), ("P2", 100))
    found = tree(request("a", *prefixes), request("b", *prefixes))
    assert found == [branch(0, 0, 2), branch(1, 100, 2, call("a"), call("b"))]


def test_calls_of_others_are_counted_and_not_named() -> None:
    found = tree(request("a"), request("b", program="q"))
    assert found == [branch(0, 0, 2, call("a"))]


def test_the_list_of_calls_is_bounded() -> None:
    (all_calls,) = tree(*(request(f"n{number}") for number in range(MAX_TREE_CALLS + 5)))
    assert all_calls.num_calls == MAX_TREE_CALLS + 5
    assert [each.node for each in all_calls.calls] == [f"n{n}" for n in range(MAX_TREE_CALLS)]


def test_an_ended_call_leaves_the_tree() -> None:
    reservations = EngineReservations("e", 10_000, 1_000, steps=lambda: 0)
    first = reservations.reserve(request("a"))
    reservations.reserve(request("b"))
    reservations.release(first)
    (left,) = kv_tree(reservations, lambda _: True)
    assert [each.node for each in left.calls] == ["b"]
