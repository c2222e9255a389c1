"""The KV memory of running calls as a tree: which beginnings of prompts they share, and until when.

A branch is a range of tokens that at least two running calls read. The tree follows from the
reservations of an engine. It is a forecast, like them: a call counts with its maximum length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from ...scheduling.reservations import EngineReservations, Reservation

MAX_TREE_CALLS = 50
"""Running calls that are listed, those that started first."""


class KvCall(Struct, frozen=True, kw_only=True):
    """A running call and the tokens that it shares with no other one."""

    program: str
    node: str
    tokens: int
    """Tokens of the call at its maximum length, without those of the branches that it reads."""
    steps_left: int | None
    """Steps until it ends, at most; null if unknown."""


class KvBranch(Struct, frozen=True, kw_only=True):
    """Tokens that several running calls hold once.

    The first branch contains all others and has no tokens of its own.
    """

    depth: int
    """0 for the first branch; the branches inside of a branch have its depth plus 1."""
    tokens: int
    """Beyond those of the branch that contains it."""
    num_calls: int
    """Running calls that read it."""
    steps_left: int | None
    """Steps until the last of them ends and the branch is free, at most; null if unknown."""
    calls: list[KvCall]
    """Calls that share no more than this branch."""


@dataclass(slots=True)
class _Node:
    """A prefix of some prompts."""

    end: int
    """Tokens from the start of the prompt."""
    readers: list[Reservation] = field(default_factory=list)
    children: dict[bytes, _Node] = field(default_factory=dict)


def kv_tree(reservations: EngineReservations, may_name: Callable[[str], bool]) -> list[KvBranch]:
    """Return the branches of an engine, depth first; empty if no call runs.

    Args:
        reservations: those of the engine.
        may_name: whether the calls of a program may be listed. Calls of others are counted.
    """
    root = _Node(0)
    for reservation in reservations.running:
        node = root
        node.readers.append(reservation)
        for prefix in reservation.request.prefixes:
            node = node.children.setdefault(prefix.key, _Node(prefix.num_tokens))
            node.readers.append(reservation)
    listed = [each for each in reservations.running if may_name(each.request.program)]
    return list(_branches(root, 0, 0, reservations, set(listed[:MAX_TREE_CALLS])))


def _branches(
    node: _Node, begin: int, depth: int, reservations: EngineReservations, listed: set[Reservation]
) -> Iterator[KvBranch]:
    """Yield the branch of a node, and those inside of it."""
    if not node.readers:
        return
    shared = [child for child in node.children.values() if len(child.readers) > 1]
    while depth and len(shared) == 1 and len(shared[0].readers) == len(node.readers):
        node = shared[0]  # the same calls read on to the next boundary
        shared = [child for child in node.children.values() if len(child.readers) > 1]
    deeper = {reader for child in shared for reader in child.readers}
    left = [reservations.num_steps_left(reader) for reader in node.readers]
    known = [steps for steps in left if steps is not None]
    yield KvBranch(
        depth=depth,
        tokens=node.end - begin,
        num_calls=len(node.readers),
        steps_left=max(known) if len(known) == len(left) else None,
        calls=[
            KvCall(
                program=reader.request.program,
                node=reader.request.node,
                tokens=reader.request.num_tokens - node.end,
                steps_left=reservations.num_steps_left(reader),
            )
            for reader in node.readers
            if reader in listed and reader not in deeper
        ],
    )
    for child in shared:
        yield from _branches(child, node.end, depth + 1, reservations, listed)
