r"""The symbolic prompt: what a call will read, before any of it has a value.

A prompt is a rope of *pieces*: text, values of expressions, multimodal parts. What
`concat`, `join`, arrays and `object` build is expanded where it is inserted, so that a
prompt built by expressions has the pieces it would have if it were written in place; with
`definitions` (what `expr` nodes compute) that holds through variables too, and lists of
messages stay symbolic through splice and concatenation.

Knows segments, messages and expressions. Refuses to know tokens, templates and values.

Kept true: whenever an expression has a value, the texts of its pieces' values joined are
the text of that value. One difference in words: where nothing says that the operands of an
inserted `concat` are lists, it is its operands one after the other, as if written in place.

A *boundary* stands after every segment. Its hash covers the model, the tools and all
symbolic content before it, not how that content was cut into segments:

    prompt    boundary i stands after segment i; after an output, its generated text is
              part of the prefix
    messages  boundary i stands after content segment i of the flattened list, and one more
              stands after the output as an assistant's turn: the prefix of a call that
              repeats these messages and splices the output, or has it in a turn

With `closed`, a splice has one boundary, at its end, whatever is known of what it consists of:
these are the boundaries that a rendered prompt has.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate
from operator import and_
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET

from .errors import ExpressionError
from .expression import evaluate, input_expression, variables
from .ir import Expression, Generate, Json, Message, Output, OutputForm, Segment
from .symbols import Definitions, Text, Value, expand, list_items

HASH_SIZE = 16
MAX_SPLICES = 10_000
"""Messages that the splices of one call expand to; beyond, a splice stays whole."""

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


class Part(NamedTuple):
    """Multimodal content, as it is."""

    part: dict[str, Json]


Piece: TypeAlias = Text | Value | Part


class Content(NamedTuple):
    """One content segment of the message with this index in `chat_messages`."""

    message: int
    pieces: tuple[Piece, ...]


class Splice(NamedTuple):
    """An expression whose value is one message or a list of messages."""

    message: int
    expression: Expression


def output_form(output: Output | Segment) -> OutputForm:
    """The form of an output's value, the default filled in."""
    if output.form is not None:
        return output.form
    constraint = output.constraint
    if constraint is None or (constraint.type is UNSET and constraint.json_schema is UNSET):
        return "text"
    return "value"


def slot_pieces(
    node: Generate, slot: int, definitions: Definitions | None = None
) -> tuple[Piece, ...]:
    """What stands between output `slot - 1` and output `slot` of a growing prompt."""
    assert node.prompt is not UNSET, "messages have no slots"
    pieces: list[Piece] = []
    seen = 0
    for segment in node.prompt:
        if segment.output is not UNSET:
            seen += 1
            if seen > slot:
                break
        elif seen == slot:
            pieces += _segment_pieces(segment, definitions)
    return tuple(pieces)


def chat_messages(
    node: Generate, definitions: Definitions | None = None
) -> tuple[Message | Splice, ...]:
    """The messages with the splices that are known expanded; the others as `Splice`.

    Without definitions, entry i belongs to `node.messages[i]`.
    """
    assert node.messages is not UNSET, "a prompt has no messages"
    messages: list[Message | Splice] = []
    for message in node.messages:
        if message.splice is UNSET:
            messages.append(message)
            continue
        for expression in _spliced(input_expression(message.splice), definitions):
            literal = _literal_message(expression)
            messages.append(literal or Splice(len(messages), expression))
    return tuple(messages)


def chat_segments(
    node: Generate, definitions: Definitions | None = None
) -> tuple[Content | Splice, ...]:
    """All content segments of the messages in order; no content is one empty text."""
    segments: list[Content | Splice] = []
    for index, message in enumerate(chat_messages(node, definitions)):
        if isinstance(message, Splice):
            segments.append(message)
        else:
            segments += (Content(index, pieces) for pieces in _contents(message, definitions))
    return tuple(segments)


class Prefixes(NamedTuple):
    """What is known of a call's prompt up to each of its boundaries; all it takes is one walk."""

    hashes: tuple[bytes, ...]
    """16 bytes each; equal bytes mean equal symbolic prefixes."""
    constants: tuple[bool, ...]
    """Whether all before it is text of the program."""


def prefixes(
    node: Generate, definitions: Definitions | None = None, *, closed: bool = False
) -> Prefixes:
    """The prefixes of a call, one for every boundary."""
    marks = list(_boundaries(node, definitions, closed))
    constants = accumulate((mark.is_text for mark in marks), and_)
    return Prefixes(tuple([mark.digest for mark in marks]), tuple(constants))


def prefix_hash(
    node: Generate, definitions: Definitions | None = None, *, closed: bool = False
) -> tuple[bytes, ...]:
    """The hashes of `prefixes` alone."""
    return prefixes(node, definitions, closed=closed).hashes


def boundary_reads(
    node: Generate, definitions: Definitions | None = None, *, closed: bool = False
) -> tuple[frozenset[str], ...]:
    """For every boundary, the variables that stand between it and the one before."""
    return tuple(
        frozenset[str]().union(*map(variables, mark.symbols))
        for mark in _boundaries(node, definitions, closed)
    )


class _Mark(NamedTuple):
    """One boundary, and what stands between it and the one before."""

    digest: bytes
    is_text: bool
    symbols: tuple[Expression, ...]


def _boundaries(node: Generate, definitions: Definitions | None, closed: bool) -> Iterator[_Mark]:
    if node.prompt is not UNSET or not closed:
        return _walk(node, definitions)
    return _walk_closed(node, definitions)


def _walk(node: Generate, definitions: Definitions | None) -> Iterator[_Mark]:
    stream = _Stream(node)
    if node.prompt is not UNSET:
        for segment in node.prompt:
            if segment.output is not UNSET:
                stream.put_output(segment.output, output_form(segment))
            else:
                stream.put_pieces(_segment_pieces(segment, definitions))
            yield stream.mark()
        return
    for message in chat_messages(node, definitions):
        yield from _walk_message(stream, message, definitions)
    yield _walk_answer(stream, node)


def _walk_closed(node: Generate, definitions: Definitions | None) -> Iterator[_Mark]:
    stream = _Stream(node)
    assert node.messages is not UNSET, "a prompt has no splices"
    for message in node.messages:
        if message.splice is UNSET:
            yield from _walk_message(stream, message, definitions)
            continue
        alone = msgspec.structs.replace(node, messages=[message])
        inner = [
            mark
            for each in chat_messages(alone, definitions)
            for mark in _walk_message(stream, each, definitions)
        ]
        symbols = tuple([symbol for mark in inner for symbol in mark.symbols])
        # What is spliced counts as a value even where its text is known.
        yield _Mark(stream.mark().digest, False, symbols)
    yield _walk_answer(stream, node)


def _walk_message(
    stream: _Stream, message: Message | Splice, definitions: Definitions | None
) -> Iterator[_Mark]:
    if isinstance(message, Splice):
        stream.put_splice(message.expression)
        yield stream.mark()
        return
    stream.open_message(message)
    for pieces in _contents(message, definitions):
        stream.put_pieces(pieces)
        yield stream.mark()


def _walk_answer(stream: _Stream, node: Generate) -> _Mark:
    assert node.output is not UNSET, "messages have an output"
    form = output_form(node.output)
    if form == "message":
        stream.put_splice({"var": node.output.variable})
    else:
        stream.open_message(Message(role="assistant"))
        stream.put_output(node.output.variable, form)
    return stream.mark()


class _Stream:
    """Symbolic content as bytes into a hash.

    Text goes in as UTF-8, everything else behind a byte 0xff, which UTF-8 never contains:
    so where text was cut does not show, and nothing can be mistaken for text.
    """

    def __init__(self, node: Generate) -> None:
        form = "messages" if node.prompt is UNSET else "prompt"
        tools = None if node.tools is UNSET else node.tools
        self._hash = blake2b(_canonical([form, node.model, tools]), digest_size=HASH_SIZE)
        self._is_special = False
        self._is_text = True
        self._symbols: list[Expression] = []

    def mark(self) -> _Mark:
        mark = _Mark(self._hash.copy().digest(), self._is_text, tuple(self._symbols))
        self._is_text = True
        self._symbols.clear()
        return mark

    def put_pieces(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            if isinstance(piece, Text):
                self._put_text(piece)
            elif isinstance(piece, Value):
                self._put_symbol(b"\xffV", piece.expression)
            else:
                self._put(b"\xffP", piece.part)
                self._is_text = False

    def put_output(self, variable: str, form: OutputForm) -> None:
        """Generated text. It is the variable's value only where the value is that text."""
        self._put_symbol(b"\xffV" if form == "text" else b"\xffG", {"var": variable})

    def put_splice(self, expression: Expression) -> None:
        self._put_symbol(b"\xffS", expression)

    def open_message(self, message: Message) -> None:
        fields = (message.role, message.name, message.tool_call_id, message.tool_calls)
        self._put(b"\xffM", [None if field is UNSET else field for field in fields])

    def _put_text(self, text: Text) -> None:
        if not text.text:
            return
        if text.special != self._is_special:
            self._is_special = text.special
            self._hash.update(b"\xff+" if text.special else b"\xff-")
        self._hash.update(text.text.encode("utf-8", "surrogatepass"))

    def _put_symbol(self, kind: bytes, expression: Expression) -> None:
        self._put(kind, expression)
        self._is_text = False
        self._symbols.append(expression)

    def _put(self, kind: bytes, content: Json) -> None:
        self._hash.update(kind + _canonical(content) + b"\xff.")


def _canonical(content: Json) -> bytes:
    return msgspec.json.encode(content, order="sorted")


def _segment_pieces(segment: Segment, definitions: Definitions | None) -> tuple[Piece, ...]:
    if segment.text is not UNSET:
        return (Text(segment.text, segment.special),)
    if segment.part is not UNSET:
        return (Part(segment.part),)
    return expand(input_expression(segment.input), definitions)


def _contents(message: Message, definitions: Definitions | None) -> Iterator[tuple[Piece, ...]]:
    """The pieces of each content segment of a message: at least one, maybe empty, text."""
    content = message.content
    if not isinstance(content, list) or not content:
        yield (Text(content if isinstance(content, str) else "", special=False),)
        return
    for segment in content:
        yield _segment_pieces(segment, definitions)


def _spliced(expression: Expression, definitions: Definitions | None) -> list[Expression]:
    """What a spliced expression consists of, in order: parts of a concatenation, elements."""
    if definitions is None:
        return [expression]
    parts: list[Expression] = []
    # A stack and no recursion: histories are concatenated by the hundred.
    stack = [expression]
    while stack and len(parts) + len(stack) <= MAX_SPLICES:
        part = stack.pop()
        inside = list_items(part, definitions)
        if inside is None:
            parts.append(part)
        else:
            stack += reversed(inside)
    return parts + stack[::-1]


def _literal_message(expression: Expression) -> Message | None:
    """The message that an expression without variables builds, None if it is none."""
    if variables(expression):
        return None
    try:
        value = evaluate(expression, {})
    except ExpressionError:
        return None
    if not isinstance(value, dict) or not value.keys() <= _MESSAGE_FIELDS:
        return None
    # Only text: how a list of parts is written in a message is the flattening's business.
    if not isinstance(value.get("content"), str | None):
        return None
    try:
        return msgspec.convert(value, Message)
    except msgspec.ValidationError:
        return None
