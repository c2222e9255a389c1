"""Prompts as pieces with token counts, and the prefixes that calls share.

Out of scope: what engines still have in their cache from other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import UNSET

from ..content import Json
from ..errors import ExpressionError
from ..expressions.evaluate import evaluate, variables
from ..expressions.symbolic import LiteralText, VariableDefinitions
from ..expressions.values import text_of
from ..nodes import GenerateNode
from ..prompt_prefix import MultimodalPart, Piece, boundary_pieces, prefix_hash
from .records import KnownTokens, SharedSpan

CountTokens = Callable[[str], int]
MIN_SPAN_TOKENS = 1


class PieceTokens(NamedTuple):
    """One piece of a prompt."""

    key: object
    """Equal for equal pieces."""
    label: str
    tokens: int
    values: frozenset[str]
    """Variables whose values are not known, so that `tokens` is 0."""


class CallPrompt(NamedTuple):
    """The prompt of one call."""

    node: GenerateNode
    times: int
    """How often the call runs at most."""
    segments: tuple[tuple[PieceTokens, ...], ...]
    """The pieces between prefix boundaries."""
    hashes: tuple[bytes, ...]
    varying: frozenset[str]
    """Names whose values differ from one run of the call to the next."""


class PromptReader:
    """Counts the tokens of prompts; each text once."""

    def __init__(
        self,
        inputs: Mapping[str, Json],
        definitions: VariableDefinitions,
        count_tokens: CountTokens,
    ) -> None:
        self._inputs = inputs
        self._definitions = definitions
        self._count = count_tokens
        self._known: dict[str, int] = {}

    def read(self, node: GenerateNode, times: int, varying: frozenset[str]) -> CallPrompt:
        """Return the prompt of a call."""
        segments = tuple(
            tuple(self._piece(piece) for piece in pieces)
            for pieces in boundary_pieces(node, self._definitions)
        )
        hashes = prefix_hash(node, self._definitions)
        return CallPrompt(node, times, segments, hashes, varying)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text by itself."""
        if text not in self._known:
            self._known[text] = self._count(text)
        return self._known[text]

    def _piece(self, piece: Piece) -> PieceTokens:
        if isinstance(piece, LiteralText):
            return PieceTokens(piece, repr(_shortened(piece.text)), self.count(piece.text), _NONE)
        if isinstance(piece, MultimodalPart):
            return PieceTokens(repr(piece), "a part", 0, _NONE)
        reads = variables(piece.expression)
        label = ", ".join(f"`{name}`" for name in sorted(reads)) or "an expression"
        if reads <= self._inputs.keys():
            try:
                text = text_of(evaluate(piece.expression, self._inputs))
            except ExpressionError:
                return PieceTokens(repr(piece), label, 0, reads)
            return PieceTokens(repr(piece), label, self.count(text), _NONE)
        return PieceTokens(repr(piece), label, 0, reads)


_NONE: frozenset[str] = frozenset()


def known_tokens(segments: Iterable[Iterable[PieceTokens]]) -> KnownTokens:
    """Return the tokens of pieces, and the variables that are not known."""
    pieces = [piece for segment in segments for piece in segment]
    values = {name for piece in pieces for name in piece.values}
    return KnownTokens(tokens=sum(piece.tokens for piece in pieces), values=sorted(values))


def prompt_tokens(prompt: CallPrompt) -> KnownTokens:
    """Return the tokens of the last prompt of a call: everything before its last output."""
    if prompt.node.prompt is UNSET:
        return known_tokens(prompt.segments)
    outputs = [i for i, segment in enumerate(prompt.node.prompt) if segment.output is not UNSET]
    return known_tokens(prompt.segments[: outputs[-1]])


class _CallPrefix(NamedTuple):
    """The beginning of a prompt, up to a boundary."""

    prompt: CallPrompt
    boundary: int
    times: int
    """How many runs of the call have it."""
    length: tuple[int, int]
    """Its tokens, and the number of variables that are not known."""


def shared_spans(prompts: Iterable[CallPrompt]) -> list[SharedSpan]:
    """Return the longest prefixes that each set of calls has in common, largest saving first.

    A call in a body that runs several times shares with itself what does not change.
    """
    readers: dict[bytes, list[_CallPrefix]] = {}
    for prompt in prompts:
        for digest, prefix in zip(_prefixes_of(prompt), _call_prefixes(prompt), strict=False):
            readers.setdefault(digest, []).append(prefix)
    longest: dict[tuple[str, ...], list[_CallPrefix]] = {}
    for found in readers.values():
        tokens, num_values = found[0].length
        if sum(each.times for each in found) < 2 or (tokens < MIN_SPAN_TOKENS and not num_values):
            continue
        calls = tuple(each.prompt.node.id for each in found)
        before = longest.get(calls)
        if before is None or found[0].length > before[0].length:
            longest[calls] = found
    return sorted(map(_span, longest.values()), key=lambda span: -span.saved_tokens)


def _call_prefixes(prompt: CallPrompt) -> Iterator[_CallPrefix]:
    """Iterate over the prefixes of a prompt; in time linear in the prompt."""
    tokens = 0
    values: set[str] = set()
    times = prompt.times
    for boundary, segment in enumerate(prompt.segments):
        for piece in segment:
            tokens += piece.tokens
            values |= piece.values
            if piece.values & prompt.varying:
                times = 1
        yield _CallPrefix(prompt, boundary, times, (tokens, len(values)))


def _span(found: list[_CallPrefix]) -> SharedSpan:
    """Return the span of the calls that have a prefix in common."""
    first = found[0]
    times = sum(each.times for each in found)
    prefix = known_tokens(first.prompt.segments[: first.boundary + 1])
    return SharedSpan(
        calls=[each.prompt.node.id for each in found],
        times=times,
        prefix=prefix,
        saved_tokens=prefix.tokens * (times - 1),
    )


def _prefixes_of(prompt: CallPrompt) -> list[bytes]:
    """Return the hashes of the prefixes that end before the last output."""
    hashes = list(prompt.hashes[: len(prompt.segments)])
    if prompt.node.prompt is UNSET:
        return hashes[:-1]
    outputs = [i for i, each in enumerate(prompt.node.prompt) if each.output is not UNSET]
    return hashes[: outputs[-1]]


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
