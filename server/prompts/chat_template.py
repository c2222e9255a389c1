"""A chat's messages into the pieces of one prompt, by the model's own template.

A template writes text of its own around what people and programs said, and only the former
may yield control tokens. The rendering does not show which is which. So it is done twice:
plain, which is the prompt; and with a mark at each end of each text that is not the
template's own. If the second without its marks is the first, letter for letter, the marks
tell whose each stretch is, and where each segment ends.

Some templates look at a text or change it, and then marks get in the way. Templates that
trim are met by a second try with the marks inside of the outer blanks. Others (that cut the
reasoning out of an old answer, say) leave one opaque run: `prefix_break`, and text in it
that spells a control token is refused, for it could not be told from the template's own.
The same name goes to a template that moves what was said earlier behind what was said later.

Two renderings and their comparison take longer than a small chat's tokenisation, so what a
template writes around contents is remembered, where it is found not to look at them (`frames`).

Marks are also set around strings in tools, tool calls and names if they contain anything
but words and common punctuation. A role is the program's word and must be a plain one.

Knows templates and pieces. Refuses to know programs, variables and token ids. Kept true:
the pieces joined are the template's plain rendering, always.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Protocol

from ..program.errors import PromptError
from ..program.ir import Json
from .chat import ChatMessage, RenderedChat, count_segments, finish
from .frames import Frame, Frames, Place, fill, shape_of
from .template_sandbox import TemplateSandbox
from .tokenizer import Piece
from .unseen import SeenError, Unseen

NUM_SHAPES = 256
_MAX_DEPTH = 64
"""Levels of JSON in a tool or a tool call."""
_ROLE = re.compile(r"\w[\w .-]*", re.ASCII)
_PLAIN_STRING = re.compile(r"[\w\s.,:;!?'\"()/+*=-]*", re.ASCII)
"""Strings that neither are nor complete a control token."""
_CONTROL_SHAPE = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>|\[/?[A-Z_]+\]|<\w+_of_\w+>")
"""What control tokens look like, for a template whose tokenizer is not at hand."""


class _Run(NamedTuple):
    """Consecutive marks that stand around and between the segments of one text."""

    first: int
    specials: tuple[bool, ...]
    """One for each segment: mark `first + i` stands before it, `first + i + 1` behind it."""
    ends_at: int | None
    """Index of its first segment among the chat's content segments; None: not a content."""


class _Marking(NamedTuple):
    """The variables of a rendering with marks in them."""

    messages: list[dict[str, Json]]
    tools: list[Json] | None
    runs: list[_Run]


class _Render(Protocol):
    """Runs the template."""

    def __call__(
        self,
        chat: Sequence[Mapping[str, Any]],
        tools: Sequence[Json] | None,
        strftime: Callable[[str], str] = ...,
    ) -> str: ...


class ChatTemplate:
    """A model's chat template, safe to render in any number of threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        spells_special: Callable[[str], bool] | None = None,
        num_shapes: int = NUM_SHAPES,
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja source; empty for a model without a chat template.
            special_tokens: names that the template may use (`bos_token`, ...) to their text.
            spells_special: tells whether a text spells a control token, normally
                `Tokenizer.spells_special`. None: `special_tokens` and the usual shapes.
            num_shapes: shapes of chats whose frames are remembered.

        Raises:
            PromptError: `prompt.template` if the source does not compile.
        """
        self._sandbox = TemplateSandbox(source) if source else None
        self._special_tokens = dict(special_tokens)
        self._spells_special = spells_special or self._looks_special
        # Digits and private characters: no filter for letters, blanks or JSON changes them.
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(20))
        self._mark = re.compile(f"\ue000{self._nonce}\\.([0-9]+)\ue001")
        self._frames = {opens: Frames(num_shapes) for opens in (False, True)}
        """By whether the answer's turn is opened."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> RenderedChat:
        """Return a chat as pieces of text.

        Args:
            messages: in order.
            tools: definitions as the template expects them, or None.
            add_generation_prompt: True ends with the opening of the answer's turn.
            now: what templates that write a date take it from; None: the clock.

        Raises:
            PromptError: `prompt.no_template` if the model has none; `prompt.template` with
                the template's own message if it refuses the chat or fails on it;
                `prompt.role` if a role is not a plain word; `prompt.special_text` if text
                spells a control token where the template hides whose it is.
        """
        if self._sandbox is None:
            raise PromptError(
                "prompt.no_template",
                "The model has no chat template; use `prompt`, or a model that has one.",
            )
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise PromptError(
                    "prompt.role",
                    f"The role {message.role!r} is not a plain word such as 'user'.",
                )
        frames = self._frames[add_generation_prompt]
        is_plain = tools is None and not self._sandbox.rereads
        shape = shape_of(messages) if is_plain else None
        if shape is not None and (frame := frames.find(shape)) is not None:
            return fill(frame, messages)
        sandbox, strftime = self._sandbox, (now or datetime.now()).strftime

        def render(
            chat: Sequence[Mapping[str, Any]],
            tools: Sequence[Json] | None,
            strftime: Callable[[str], str] = strftime,
        ) -> str:
            variables = {
                **self._special_tokens,
                "messages": chat,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            return sandbox.render(variables, strftime=strftime)

        rendered = self._render_twice(render, messages, tools)
        if shape is not None and frames.is_due(shape):
            frame = self._make_frame(render, messages)
            # Another way to the same prompt, or none.
            is_right = frame is not None and fill(frame, messages) == rendered
            frames.keep(shape, frame if is_right else None)
        return rendered

    def _render_twice(
        self, render: _Render, messages: Sequence[ChatMessage], tools: Sequence[Json] | None
    ) -> RenderedChat:
        """Return a chat by a rendering without marks and one with them."""
        outer = self._set_marks(messages, tools, inside=False)
        text = render([_plain(message) for message in messages], tools)
        for marking in self._tries(outer, messages, tools):
            try:
                marked = render(marking.messages, marking.tools)
            except PromptError:
                # It took the plain chat and stumbles over the marks: it looks at the text.
                continue
            found = self._read(marked, text, marking.runs, count_segments(messages))
            if found is not None:
                return found
        self._check_opaque(messages, tools)
        return RenderedChat(
            (Piece(text, special=True),), (len(text),) * count_segments(messages), True
        )

    def _make_frame(self, render: _Render, messages: Sequence[ChatMessage]) -> Frame | None:
        """Return what the template writes around contents; None if it looks at them."""
        chat = [
            {"role": message.role, "content": self._unseen(index) if message.text else ""}
            for index, message in enumerate(messages)
        ]
        try:
            parts = self._mark.split(render(chat, None, _no_date))
        except (PromptError, SeenError):
            return None
        return tuple(
            [
                Place(int(part) // 2, is_stripped=int(part) % 2 == 1) if index % 2 else part
                for index, part in enumerate(parts)
            ]
        )

    def _unseen(self, message: int) -> Unseen:
        return Unseen(self._spell(2 * message), self._spell(2 * message + 1))

    def _tries(
        self, outer: _Marking, messages: Sequence[ChatMessage], tools: Sequence[Json] | None
    ) -> Iterator[_Marking]:
        yield outer
        if any(map(_has_outer_blanks, messages)):
            yield self._set_marks(messages, tools, inside=True)

    def _set_marks(
        self, messages: Sequence[ChatMessage], tools: Sequence[Json] | None, *, inside: bool
    ) -> _Marking:
        """Return what a template is given, with marks around all text that is not its own.

        Args:
            messages: the chat.
            tools: as in `render`.
            inside: True sets the marks of a content inside of its outer blanks.

        Raises:
            PromptError: `prompt.template` if a tool or a tool call nests too deep.
        """
        runs: list[_Run] = []
        num_marks = num_before = 0

        def mark_leaf(text: str) -> str:
            nonlocal num_marks
            if _PLAIN_STRING.fullmatch(text):
                return text
            runs.append(_Run(num_marks, (False,), None))
            num_marks += 2
            return f"{self._spell(num_marks - 2)}{text}{self._spell(num_marks - 1)}"

        marked_tools = None if tools is None else [_map_strings(tool, mark_leaf) for tool in tools]
        chat = []
        for message in messages:
            content = message.text
            low, high = _core(content) if inside else (0, len(content))
            if low < high:
                specials = tuple(piece.special for piece in message.content)
                runs.append(_Run(num_marks, specials, num_before))
                content = self._mark_content(message, num_marks, low, high)
                num_marks += len(specials) + 1
            num_before += len(message.content)
            chat.append(_fields(message, content, mark_leaf))
        return _Marking(chat, marked_tools, runs)

    def _mark_content(self, message: ChatMessage, first: int, low: int, high: int) -> str:
        """Return a content with a mark at each boundary of its segments, from low to high."""
        text = message.text
        borders = [low]
        at = 0
        for piece in message.content:
            at += len(piece.text)
            borders.append(min(max(at, low), high))
        borders[-1] = high
        parts = [text[:low], self._spell(first)]
        for number, (start, end) in enumerate(pairwise(borders), first + 1):
            parts += [text[start:end], self._spell(number)]
        parts.append(text[high:])
        return "".join(parts)

    def _spell(self, number: int) -> str:
        return f"\ue000{self._nonce}.{number}\ue001"

    def _read(
        self, marked: str, text: str, runs: Sequence[_Run], num_segments: int
    ) -> RenderedChat | None:
        """Return what the marks of a rendering tell, or None where they tell nothing.

        Args:
            marked: the rendering with marks.
            text: the rendering without.
            runs: the marks that were set.
            num_segments: content segments of the chat.
        """
        parts = self._mark.split(marked)
        if "".join(parts[::2]) != text:
            return None
        starts = {run.first: run for run in runs}
        ends: dict[int, int] = {}
        pieces = [Piece(parts[0], special=True)]
        offset = len(parts[0])
        inside: _Run | None = None
        index = 0
        for number, part in zip(map(int, parts[1::2]), parts[2::2], strict=True):
            if inside is None:
                # Outside of a run only the first mark of one can stand.
                inside, index = starts.get(number), 0
                if inside is None:
                    return None
            else:
                index += 1
                if number != inside.first + index:
                    return None
                if inside.ends_at is not None:
                    ends.setdefault(inside.ends_at + index - 1, offset)
                if index == len(inside.specials):
                    inside = None
            pieces.append(Piece(part, True if inside is None else inside.specials[index]))
            offset += len(part)
        if inside is not None:
            return None
        return finish(pieces, ends, num_segments)

    def _check_opaque(self, messages: Sequence[ChatMessage], tools: Sequence[Json] | None) -> None:
        """Refuse a chat with text that could pose as the template's own.

        Raises:
            PromptError: `prompt.special_text`.
        """
        strings = [
            "".join([piece.text for piece in message.content if not piece.special])
            for message in messages
        ]

        def collect(text: str) -> str:
            strings.append(text)
            return text

        for tool in tools or ():
            _map_strings(tool, collect)
        for message in messages:
            _fields(message, "", collect)
        for string in strings:
            if self._spells_special(string):
                raise PromptError(
                    "prompt.special_text",
                    "A message spells a control token of the model, and the model's chat"
                    " template rewrites messages, so that it could not be told from a real"
                    " one; take it out of the message.",
                )

    def _looks_special(self, text: str) -> bool:
        return bool(_CONTROL_SHAPE.search(text)) or any(
            token and token in text for token in self._special_tokens.values()
        )


def _no_date(_: str) -> NoReturn:
    raise SeenError  # a frame would keep the date


def _core(text: str) -> tuple[int, int]:
    """Return where a text without its outer blanks begins and ends."""
    low = len(text) - len(text.lstrip())
    return low, low + len(text.strip())


def _has_outer_blanks(message: ChatMessage) -> bool:
    text = message.text
    return text.strip() != text


def _plain(message: ChatMessage) -> dict[str, Json]:
    return _fields(message, message.text, None)


def _fields(
    message: ChatMessage, content: str, change: Callable[[str], str] | None
) -> dict[str, Json]:
    """Return a message as a template reads it; `change` applies to its other strings."""
    fields: dict[str, Json] = {"role": message.role, "content": content}
    for key in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, key)
        if value is not None:
            fields[key] = value if change is None else _map_strings(value, change)
    return fields


def _map_strings(value: Json, change: Callable[[str], str], depth: int = 0) -> Any:
    """Return JSON with every string in it changed, keys included.

    Raises:
        PromptError: `prompt.template` if it nests too deep.
    """
    if depth > _MAX_DEPTH:
        raise PromptError(
            "prompt.template", f"A tool or a tool call nests deeper than {_MAX_DEPTH} levels."
        )
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(each, change, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(each, change, depth + 1) for each in value]
    return value
