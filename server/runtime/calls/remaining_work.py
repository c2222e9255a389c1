"""The engine time that a program's calls still need, from the lengths in its graph.

Text of the program is counted in characters, because most prompts are not encoded yet; an input
that another call writes counts with that call's `max_tokens`. Text at the start of several prompts
is computed once, and counts once.

Invariants: the totals are the sums over the added nodes that were not removed. Reading them takes
constant time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import UNSET

from ...program.ir import GenerateNode, Json, Segment
from ...scheduling.service_time import ServiceTimeEstimator
from .outputs import output_lengths


class CallSize(NamedTuple):
    """The lengths of one call."""

    head: str
    """Identifies the text at the start of the prompt: the text itself, or a name that no other text
    has."""
    num_head_chars: int
    num_chars: int
    """Characters after the head, of text and of values that are known."""
    num_tokens: int
    """Tokens that other calls write into the prompt."""
    num_output: int

    def seconds(self, pace: ServiceTimeEstimator) -> float:
        """Return the engine time of the call alone."""
        num_chars = self.num_head_chars + self.num_chars
        return _seconds(pace, num_chars, self.num_tokens, self.num_output)


class RemainingWork:
    """The calls of one program that have not ended."""

    def __init__(self) -> None:
        self._calls: dict[str, CallSize] = {}
        self._heads: Counter[str] = Counter()
        self._lengths: dict[str, int] = {}
        """Maximum tokens of each variable that a call writes."""
        self._num_chars = 0
        self._num_tokens = 0
        self._num_output = 0

    def add(self, nodes: Iterable[GenerateNode], values: Mapping[str, Json]) -> None:
        """Add calls; a call that is there already stays as it is."""
        new = [node for node in nodes if node.id not in self._calls]
        for node in new:
            self._lengths.update(output_lengths(node))
        for node in new:
            self.add_call(node.id, self._size(node, values))

    def add_call(self, node_id: str, size: CallSize) -> None:
        """Add a call whose lengths are known."""
        self._calls[node_id] = size
        if not self._heads[size.head]:
            self._num_chars += size.num_head_chars
        self._heads[size.head] += 1
        self._num_chars += size.num_chars
        self._num_tokens += size.num_tokens
        self._num_output += size.num_output

    def remove(self, node_id: str) -> None:
        """Remove a call that has ended; safe to repeat."""
        size = self._calls.pop(node_id, None)
        if size is None:
            return
        self._heads[size.head] -= 1
        if not self._heads[size.head]:
            del self._heads[size.head]
            self._num_chars -= size.num_head_chars
        self._num_chars -= size.num_chars
        self._num_tokens -= size.num_tokens
        self._num_output -= size.num_output

    def seconds(self, pace: ServiceTimeEstimator) -> float:
        """Return the engine time of all calls."""
        return _seconds(pace, self._num_chars, self._num_tokens, self._num_output)

    def call_seconds(self, node_id: str, pace: ServiceTimeEstimator) -> float:
        """Return the engine time of one call."""
        return self._calls[node_id].seconds(pace)

    def _size(self, node: GenerateNode, values: Mapping[str, Json]) -> CallSize:
        head: str | None = None
        num_chars = num_tokens = num_output = 0
        for part in _parts(node):
            if isinstance(part, Segment) and part.output is not UNSET:
                num_output += self._lengths[part.output]
                continue
            text: Json = part if isinstance(part, str) else part.text
            is_literal = True
            if isinstance(part, Segment) and isinstance(part.input, str):
                num_tokens += self._lengths.get(part.input, 0)
                text, is_literal = values.get(part.input), False
            if isinstance(text, str):
                if head is None and is_literal:
                    head = text
                num_chars += len(text)
            head = head or ""
        if not isinstance(node.prompt, list):
            num_output = sum(length for _, length in output_lengths(node))
        head = head or ""
        return CallSize(head, len(head), num_chars - len(head), num_tokens, num_output)


def _parts(node: GenerateNode) -> list[str | Segment]:
    """Return the segments of a prompt or of all messages, in order."""
    parts: list[str | Segment] = list(node.prompt) if isinstance(node.prompt, list) else []
    for message in node.messages or ():
        if isinstance(message.content, str):
            parts.append(message.content)
        elif isinstance(message.content, list):
            parts += message.content
    return parts


def _seconds(pace: ServiceTimeEstimator, num_chars: int, num_tokens: int, num_output: int) -> float:
    num_prompt = round(num_chars * pace.tokens_per_char) + num_tokens
    return pace.estimate_work_s(num_prompt, num_output)
