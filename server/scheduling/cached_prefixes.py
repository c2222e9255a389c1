"""The prefixes that an engine holds as cache, in the order in which it evicts them.

An engine evicts prefixes without expected readers before the others, and the least recently used
ones first; see `engine.kv.radix_tree`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class CachedPrefixes:
    """Prefixes without a running reader, by key, with their tokens beyond the next shorter one."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of all prefixes."""
        self._unexpected: OrderedDict[bytes, int] = OrderedDict()
        self._expected: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._unexpected or key in self._expected

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys, the one that is evicted next first."""
        yield from self._unexpected
        yield from self._expected

    def __len__(self) -> int:
        return len(self._unexpected) + len(self._expected)

    def sizes(self) -> Iterator[int]:
        """Iterate over the tokens of the prefixes, the one that is evicted next first."""
        yield from self._unexpected.values()
        yield from self._expected.values()

    def add(self, key: bytes, num_tokens: int, *, is_expected: bool) -> None:
        """Add a prefix as the most recently used one of its kind."""
        (self._expected if is_expected else self._unexpected)[key] = num_tokens
        self.num_tokens += num_tokens

    def remove(self, key: bytes) -> None:
        """Remove a prefix; a no-op without it."""
        for kind in (self._unexpected, self._expected):
            self.num_tokens -= kind.pop(key, 0)

    def evict(self) -> bytes:
        """Remove the prefix that the engine evicts next, and return its key."""
        key, num_tokens = (self._unexpected or self._expected).popitem(last=False)
        self.num_tokens -= num_tokens
        return key
