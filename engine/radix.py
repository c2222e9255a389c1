"""The prefix tree: which block holds the KV of which tokens after which tokens.

A node is one full block. Its key is the exact tuple of its tokens, so two prefixes meet in
a node only if they are equal, whatever Python's hash says; its place under its parent says
what came before, on which KV depends as much as on the tokens themselves. Every salt has a
root of its own: nothing is shared between salts.

The tree names the blocks of live contexts too, from the moment they are *scheduled* to be
computed. That is what makes simultaneous arrivals with one prefix compute it once, even
within one step (RadixAttention, arXiv 2312.07104, inserts after a request has finished).

Knows tokens and block numbers. Refuses to know reference counts: who uses the tree says
when a node is only cached (`is_cached`) and whether it should survive its last holder
(`is_kept`). Kept true, given a user that holds whole paths: ancestors of a kept node are
kept, and a node whose block nobody holds has no child that somebody holds, so the least
recently used cached node can always be found among the leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One full block under its prefix; a root has no block (-1)."""

    block: int
    key: Key
    parent: Node | None
    salt: str
    children: dict[Key, Node] = field(default_factory=dict)
    is_kept: bool = False
    """Somebody asked for it to stay as cache when its last holder leaves."""
    is_cached: bool = False
    """No context holds its block."""
    last_use: int = 0


class RadixTree:
    """Nodes by prefix and by block, and the order in which cached ones are evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.node_of: list[Node | None] = [None] * num_blocks
        """The node of each block. Read by the hot path; changed only here."""
        self._roots: dict[str, Node] = {}
        # Heap of (last_use, tie, leaf). Entries go stale when a node is taken up again or
        # gains a child; they are skipped when popped and swept when they outnumber blocks.
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = 0

    def root(self, salt: str) -> Node:
        """Return the root of a salt; one that is new is stored by the first insert."""
        return self._roots.get(salt) or Node(-1, (), None, salt)

    def insert(self, parent: Node, key: Key, block: int) -> Node:
        """Add a node for `block`, which is in no other node, under `parent`."""
        assert key not in parent.children
        assert self.node_of[block] is None
        if parent.parent is None:
            assert self._roots.setdefault(parent.salt, parent) is parent, "a stale root"
        node = Node(block, key, parent, parent.salt)
        parent.children[key] = node
        self.node_of[block] = node
        return node

    def remove(self, node: Node) -> None:
        """Forget a node without children; a root that becomes empty goes too."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key]
        self.node_of[node.block] = None
        node.is_cached = False
        if parent.children:
            return
        if parent.parent is None:
            self._roots.pop(parent.salt, None)
        elif parent.is_cached:
            self._push(parent)

    def store(self, node: Node) -> None:
        """Mark a node as cached and used just now."""
        self._clock += 1
        node.is_cached = True
        node.last_use = self._clock
        if not node.children:
            self._push(node)

    def revive(self, node: Node) -> None:
        """Mark a cached node as held again."""
        node.is_cached = False

    def evict(self) -> int | None:
        """Remove the least recently used cached leaf; return its block, None without one."""
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if _is_current(*entry):
                self.remove(entry[2])
                return entry[2].block
        return None

    def _push(self, node: Node) -> None:
        if len(self._leaves) > 2 * len(self.node_of) + 64:
            live = {id(entry[2]): entry for entry in self._leaves if _is_current(*entry)}
            self._leaves = list(live.values())
            heapq.heapify(self._leaves)
        self._clock += 1
        heapq.heappush(self._leaves, (node.last_use, self._clock, node))

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self) -> None:
        """Assert the tree's invariants; linear in its size."""
        assert all(root.children for root in self._roots.values()), "an empty root stays"
        seen = 0
        for node in self.nodes():
            seen += 1
            parent = node.parent
            assert parent is not None
            assert self.node_of[node.block] is node, "a block does not name its node"
            assert parent.children[node.key] is node
            if parent.parent is not None:
                assert parent.is_kept or not node.is_kept, "a kept node under one that is not"
                assert node.is_cached or not parent.is_cached, "a held node under a cached one"
            assert node.is_kept or not node.is_cached, "a node nobody asked to keep is cached"
        assert seen == sum(node is not None for node in self.node_of), "a node is detached"
        waiting = {id(entry[2]) for entry in self._leaves if _is_current(*entry)}
        assert all(id(node) in waiting for node in self.nodes() if _is_evictable(node))


def _is_evictable(node: Node) -> bool:
    return node.is_cached and not node.children


def _is_current(last_use: int, tie: int, node: Node) -> bool:
    del tie
    return _is_evictable(node) and node.last_use == last_use
