"""Symbolic prompts and their prefix hashes, before any variable has a value.

A symbolic prompt is a sequence of *pieces*: text, values of expressions, multimodal parts.
`concat`, `join`, arrays and `object` are expanded, so that a prompt built by expressions has the
same pieces as one written in place. With `definitions` (the expressions of `expr` nodes) variables
are expanded too, and lists of messages stay symbolic through splice and concatenation.

A *prefix boundary* follows every segment. Its hash covers the model, the tools and all symbolic
content before it, but not how this content was split into segments:

    prompt    boundary i follows segment i; after an output, the generated text is part of the
              prefix
    messages  boundary i follows content segment i of the flattened list; the last boundary
              follows the output as an assistant message. It equals the boundary of a call that
              repeats the messages and adds the output, as a splice or as an assistant message

With `closed`, a splice has one boundary, at its end, even if its messages are known. These are the
boundaries of a rendered prompt.

Out of scope: tokens, chat templates and values.

Invariant: concatenating the text of an expression's pieces gives the text of its value. Exception:
a `concat` whose operands are not known to be lists is treated as string concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate
from operator import and_
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET

from .content import Expression, Json, Message, Output, OutputForm, Segment, encoded_size
from .decoding.typed_json import convert_record
from .errors import ExpressionError
from .expressions.evaluate import evaluate, input_expression, variables
from .expressions.symbolic import (
    FOLDING_FUEL,
    LiteralText,
    VariableDefinitions,
    VariableText,
    expand,
    list_items,
)
from .nodes import GenerateNode

HASH_SIZE = 16
MAX_SPLICES = 10_000
"""Messages that all splices of one call together are expanded to. The rest stay splices."""

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


class MultimodalPart(NamedTuple):
    """Multimodal content, unchanged."""

    part: dict[str, Json]


Piece: TypeAlias = LiteralText | VariableText | MultimodalPart


class ContentSegment(NamedTuple):
    """A content segment of the message with this index in `chat_messages`."""

    message: int
    pieces: tuple[Piece, ...]


class SymbolicSplice(NamedTuple):
    """An expression whose value is one message or a list of messages."""

    message: int
    expression: Expression


def output_form(output: Output | Segment) -> OutputForm:
    """Return the form of an output's value; the default depends on the constraint."""
    if output.form is not None:
        return output.form
    constraint = output.constraint
    if constraint is None or (constraint.type is UNSET and constraint.json_schema is UNSET):
        return "text"
    return "value"


def slot_pieces(
    node: GenerateNode, slot: int, definitions: VariableDefinitions | None = None
) -> tuple[Piece, ...]:
    """Return the pieces between output `slot - 1` and output `slot` of a growing prompt."""
    assert node.prompt is not UNSET, "messages have no slots"
    pieces: list[Piece] = []
    outputs_before = 0
    for segment in node.prompt:
        if segment.output is not UNSET:
            outputs_before += 1
            if outputs_before > slot:
                break
        elif outputs_before == slot:
            pieces += _segment_pieces(segment, definitions)
    return tuple(pieces)


def chat_messages(
    node: GenerateNode, definitions: VariableDefinitions | None = None
) -> tuple[Message | SymbolicSplice, ...]:
    """Return the messages; splices are expanded where their messages are known.

    Without definitions, entry i belongs to `node.messages[i]`.
    """
    return tuple([each for part in _parts(node, definitions) for each in part])


def chat_segments(
    node: GenerateNode, definitions: VariableDefinitions | None = None
) -> tuple[ContentSegment | SymbolicSplice, ...]:
    """Return all content segments in order; a message without content has one empty text."""
    segments: list[ContentSegment | SymbolicSplice] = []
    for index, message in enumerate(chat_messages(node, definitions)):
        if isinstance(message, SymbolicSplice):
            segments.append(message)
        else:
            segments += (
                ContentSegment(index, pieces) for pieces in _contents(message, definitions)
            )
    return tuple(segments)


class PromptPrefixes(NamedTuple):
    """The prefixes of a call, one for each boundary."""

    hashes: tuple[bytes, ...]
    """16 bytes each; equal hashes mean equal symbolic prefixes."""
    constants: tuple[bool, ...]
    """Whether the prefix consists of literal text only."""
    inner: tuple[bytes, ...]
    """The hashes with all boundaries inside splices, also where `hashes` has one per splice."""


def prefixes(
    node: GenerateNode, definitions: VariableDefinitions | None = None, *, closed: bool = False
) -> PromptPrefixes:
    """Return the prefixes of a call."""
    every, with_closed = _walk(node, definitions)
    marks = with_closed if closed else every
    constants = accumulate((mark.is_text for mark in marks), and_)
    return PromptPrefixes(_digests(marks), tuple(constants), _digests(every))


def prefix_hash(
    node: GenerateNode, definitions: VariableDefinitions | None = None, *, closed: bool = False
) -> tuple[bytes, ...]:
    """Return only the hashes of `prefixes`."""
    return prefixes(node, definitions, closed=closed).hashes


def boundary_pieces(
    node: GenerateNode, definitions: VariableDefinitions | None = None
) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces between each boundary and the previous one.

    An output of a growing prompt is a `VariableText`, and so is a splice. The boundary after the
    output of `messages` has no pieces.
    """
    if node.prompt is UNSET:
        contents = [
            (VariableText(each.expression),) if isinstance(each, SymbolicSplice) else each.pieces
            for each in chat_segments(node, definitions)
        ]
        return (*contents, ())
    return tuple(
        _segment_pieces(segment, definitions)
        if segment.output is UNSET
        else (VariableText({"var": segment.output}),)
        for segment in node.prompt
    )


def _digests(marks: list[_Boundary]) -> tuple[bytes, ...]:
    return tuple([mark.digest for mark in marks])


def boundary_reads(
    node: GenerateNode, definitions: VariableDefinitions | None = None, *, closed: bool = False
) -> tuple[frozenset[str], ...]:
    """Return the variables between each boundary and the previous one."""
    return tuple(
        frozenset[str]().union(*map(variables, mark.symbols))
        for mark in _boundaries(node, definitions, closed)
    )


class _Boundary(NamedTuple):
    """A boundary, with the content since the previous one."""

    digest: bytes
    is_text: bool
    symbols: tuple[Expression, ...]


def _boundaries(
    node: GenerateNode, definitions: VariableDefinitions | None, closed: bool
) -> list[_Boundary]:
    every, with_closed = _walk(node, definitions)
    return with_closed if closed else every


def _walk(
    node: GenerateNode, definitions: VariableDefinitions | None
) -> tuple[list[_Boundary], list[_Boundary]]:
    """Return the boundaries of a call, and those with one boundary for each splice."""
    hasher = _PrefixHasher(node)
    marks: list[_Boundary] = []
    if node.prompt is not UNSET:
        for segment in node.prompt:
            if segment.output is not UNSET:
                hasher.put_output(segment.output, output_form(segment))
            else:
                hasher.put_segment(segment, definitions)
            marks.append(hasher.mark())
        return marks, marks
    closed: list[_Boundary] = []
    assert node.messages is not UNSET, "a call has a prompt or messages"
    for message, part in zip(node.messages, _parts(node, definitions), strict=True):
        inner = [mark for each in part for mark in _walk_message(hasher, each, definitions)]
        marks += inner
        if message.splice is UNSET:
            closed += inner
            continue
        symbols = tuple([symbol for mark in inner for symbol in mark.symbols])
        # A splice counts as a value even if its text is known.
        closed.append(_Boundary(hasher.mark().digest, False, symbols))
    output = _walk_output(hasher, node)
    return [*marks, output], [*closed, output]


def _walk_message(
    hasher: _PrefixHasher,
    message: Message | SymbolicSplice,
    definitions: VariableDefinitions | None,
) -> list[_Boundary]:
    if isinstance(message, SymbolicSplice):
        hasher.put_splice(message.expression)
        return [hasher.mark()]
    hasher.open_message(message)
    content = message.content
    if not isinstance(content, list) or not content:
        hasher.put_text(content if isinstance(content, str) else "", special=False)
        return [hasher.mark()]
    marks: list[_Boundary] = []
    for segment in content:
        hasher.put_segment(segment, definitions)
        marks.append(hasher.mark())
    return marks


def _walk_output(hasher: _PrefixHasher, node: GenerateNode) -> _Boundary:
    assert node.output is not UNSET, "messages have an output"
    form = output_form(node.output)
    if form == "message":
        hasher.put_splice({"var": node.output.variable})
    else:
        hasher.open_message(Message(role="assistant"))
        hasher.put_output(node.output.variable, form)
    return hasher.mark()


class _PrefixHasher:
    """Hashes symbolic content.

    Text is hashed as UTF-8, other content after a byte 0xff, which UTF-8 never contains. So the
    split of text into segments has no effect, and other content cannot be mistaken for text.
    """

    def __init__(self, node: GenerateNode) -> None:
        form = "messages" if node.prompt is UNSET else "prompt"
        tools = None if node.tools is UNSET else node.tools
        head: list[Json] = [form, node.model, tools]
        if node.prompt_ids is not UNSET:
            head.append(node.prompt_ids)
        if node.template_options:
            head.append(node.template_options)
        self._hash = blake2b(_canonical(head), digest_size=HASH_SIZE)
        self._is_special = False
        self._is_text = True
        self._symbols: list[Expression] = []

    def mark(self) -> _Boundary:
        mark = _Boundary(self._hash.digest(), self._is_text, tuple(self._symbols))
        self._is_text = True
        self._symbols.clear()
        return mark

    def put_segment(self, segment: Segment, definitions: VariableDefinitions | None) -> None:
        """Add a segment that is not an output."""
        if segment.text is not UNSET:
            self.put_text(segment.text, special=segment.special)
            return
        for piece in _segment_pieces(segment, definitions):
            if isinstance(piece, LiteralText):
                self.put_text(piece.text, special=piece.special)
            elif isinstance(piece, VariableText):
                self._put_symbol(b"\xffV", piece.expression)
            else:
                self._put(b"\xffP", piece.part)
                self._is_text = False

    def put_output(self, variable: str, form: OutputForm) -> None:
        """Add generated text. It equals the variable's value only if the form is `text`."""
        self._put_symbol(b"\xffV" if form == "text" else b"\xffG", {"var": variable})

    def put_splice(self, expression: Expression) -> None:
        self._put_symbol(b"\xffS", expression)

    def open_message(self, message: Message) -> None:
        fields = (message.role, message.name, message.tool_call_id, message.tool_calls)
        self._put(b"\xffM", [None if field is UNSET else field for field in fields])

    def put_text(self, text: str, *, special: bool) -> None:
        if not text:
            return
        if special != self._is_special:
            self._is_special = special
            self._hash.update(b"\xff+" if special else b"\xff-")
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def _put_symbol(self, kind: bytes, expression: Expression) -> None:
        self._put(kind, expression)
        self._is_text = False
        self._symbols.append(expression)

    def _put(self, kind: bytes, content: Json) -> None:
        self._hash.update(kind + _canonical(content) + b"\xff.")


def _canonical(content: Json) -> bytes:
    return msgspec.json.encode(content, order="sorted")


def _segment_pieces(segment: Segment, definitions: VariableDefinitions | None) -> tuple[Piece, ...]:
    if segment.text is not UNSET:
        return (LiteralText(segment.text, segment.special),)
    if segment.part is not UNSET:
        return (MultimodalPart(segment.part),)
    name = segment.input
    if isinstance(name, str) and (definitions is None or definitions.get(name) is None):
        return (VariableText({"var": name}),)
    return expand(input_expression(name), definitions)


def _contents(
    message: Message, definitions: VariableDefinitions | None
) -> Iterator[tuple[Piece, ...]]:
    """Iterate over the pieces of each content segment; at least one, possibly empty, text."""
    content = message.content
    if not isinstance(content, list) or not content:
        yield (LiteralText(content if isinstance(content, str) else "", special=False),)
        return
    for segment in content:
        yield _segment_pieces(segment, definitions)


def _parts(
    node: GenerateNode, definitions: VariableDefinitions | None
) -> Iterator[list[Message | SymbolicSplice]]:
    """Iterate over what each message of a call is expanded to."""
    assert node.messages is not UNSET, "a prompt has no messages"
    num_messages = 0
    splices_left = MAX_SPLICES
    for message in node.messages:
        if message.splice is UNSET:
            part: list[Message | SymbolicSplice] = [message]
        else:
            spliced = _spliced(input_expression(message.splice), definitions, splices_left)
            splices_left -= len(spliced)
            part = [
                _literal_message(each, definitions) or SymbolicSplice(index, each)
                for index, each in enumerate(spliced, num_messages)
            ]
        num_messages += len(part)
        yield part


def _spliced(
    expression: Expression, definitions: VariableDefinitions | None, most: int
) -> list[Expression]:
    """Return the parts of a spliced expression in order: operands of `concat`, elements.

    A list that would give more than `most` parts in all, or exceed the steps of the graph, stays
    one part.
    """
    if definitions is None:
        return [expression]
    budget = definitions.budget
    parts: list[Expression] = []
    # An explicit stack: histories are concatenated hundreds of times.
    stack = [expression]
    while stack:
        part = stack.pop()
        num_left = most - len(parts) - len(stack)
        can_expand = num_left > 0 and budget.left > 0
        inner = list_items(part, definitions) if can_expand else None
        if inner is not None:
            budget.left -= 1 + (len(inner) >> 2)
        if inner is not None and len(inner) <= num_left:
            stack += reversed(inner)
        else:
            budget.left -= encoded_size(part) >> 8
            parts.append(part)
    return parts


def _literal_message(
    expression: Expression, definitions: VariableDefinitions | None
) -> Message | None:
    """Return the message that an expression without variables builds, if it is one."""
    if variables(expression):
        return None
    budget = None if definitions is None else definitions.budget
    try:
        value = evaluate(expression, {}, fuel=FOLDING_FUEL, budget=budget)
    except ExpressionError:
        return None
    if not isinstance(value, dict) or not value.keys() <= _MESSAGE_FIELDS:
        return None
    # Only text: lists of parts are flattened with the values of splices.
    if not isinstance(value.get("content"), str | None):
        return None
    try:
        return convert_record(value, Message)
    except msgspec.ValidationError:
        return None
