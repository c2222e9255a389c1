"""Rendering of a chat by the model's template, into pieces of trusted and untrusted text.

A template writes its own text around the contents of messages, and only its own text may yield
control tokens. A rendering does not show the origin of its parts, so the chat is rendered twice.
The plain rendering is the prompt. The marked rendering has a mark at both ends of each text that is
not the template's own. If the marked rendering without its marks equals the plain one, the marks
show the origin of each part and the end of each segment. A chat with the roles and segments of an
earlier one needs no marked rendering if its plain rendering has the same texts around the contents
(`chat_outline`).

A template that tests or changes contents may behave differently on marked contents. For templates
that trim contents, a second attempt sets the marks inside the outer blanks. For all others (for
example templates that remove the reasoning from earlier answers), the whole text is one opaque
piece: the prompt has a `prefix_break`, and a message that spells a control token is rejected,
because the token could not be distinguished from one of the template. If a template moves an
earlier message after a later one, the prompt has a `prefix_break`, too.

Marks are also set around strings in tools, tool calls and names, if they contain more than words
and common punctuation. A role is trusted and must be a plain word.

Out of scope: programs, variables and token ids.

Invariant: the joined pieces are always the template's plain rendering.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from ..program.errors import PromptError
from ..program.ir import Json
from .chat import RenderedChat, TemplateMessage, build_rendered_chat, count_segments
from .chat_outline import ChatOutlines, ChatShape, shape_of
from .template_sandbox import TemplateSandbox
from .tokenizer import PromptPiece

_MAX_DEPTH = 64
"""Maximum nesting of a tool or a tool call."""
_ROLE = re.compile(r"\w[\w .-]*", re.ASCII)
_PLAIN_STRING = re.compile(r"[\w\s.,:;!?'\"()/+*=-]*", re.ASCII)
"""Strings that cannot be a control token or a part of one."""
_CONTROL_SHAPE = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>|\[/?[A-Z_]+\]|<\w+_of_\w+>")
"""Usual shapes of control tokens, for a template without a tokenizer."""

_Render: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Sequence[Json] | None], str]
"""A function that renders messages and tools."""


class _MarkedText(NamedTuple):
    """A text with consecutive marks before, between and after its segments."""

    first_mark: int
    are_special: tuple[bool, ...]
    """One entry per segment. Segment `i` is between the marks `first_mark + i` and the next."""
    first_segment: int | None
    """Index of its first segment among the segments of all contents; None if the text is a string
    in a tool, a tool call or a name."""


class _MarkedChat(NamedTuple):
    """Messages and tools with marks."""

    messages: list[dict[str, Json]]
    tools: list[Json] | None
    marked_texts: list[_MarkedText]


class ChatTemplate:
    """A model's chat template. Rendering is thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        spells_special: Callable[[str], bool] | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja source; empty for a model without a chat template.
            special_tokens: text of tokens by the names that templates use (`bos_token`, ...).
            spells_special: returns whether a text spells a control token, normally
                `Tokenizer.spells_special`. None checks `special_tokens` and the usual shapes.

        Raises:
            PromptError: `prompt.template` if the source does not compile.
        """
        self._sandbox = TemplateSandbox(source) if source else None
        self._special_tokens = dict(special_tokens)
        self._spells_special = spells_special or self._looks_special
        # Marks consist of digits, a dot and private-use characters, which template filters for
        # letters, blanks and JSON leave unchanged.
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(20))
        self._mark_pattern = re.compile(f"\ue000{self._nonce}\\.([0-9]+)\ue001")
        self._outlines = ChatOutlines()

    @property
    def is_defined(self) -> bool:
        """Return whether the model has a chat template."""
        return self._sandbox is not None

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Json] = MappingProxyType({}),
        now: datetime | None = None,
    ) -> RenderedChat:
        """Return a chat as pieces of text.

        Args:
            messages: in order.
            tools: definitions in the form that the template expects, or None.
            add_generation_prompt: whether to end with the opening of the assistant's turn.
            options: further variables of the template, such as `enable_thinking`. An option cannot
                replace a variable that this method sets, such as `messages`.
            now: current time for templates that write a date; None for the system clock.

        Raises:
            PromptError: `prompt.no_template` if the model has none; `prompt.template` with the
                template's own message if it rejects the chat or fails on it; `prompt.role` if a
                role is not a plain word; `prompt.special_text` if a message spells a control token
                and the template hides the origin of its text.
        """
        if self._sandbox is None:
            raise PromptError(
                "prompt.no_template",
                "The model has no chat template; use `prompt`, or a model with a chat template.",
            )
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise PromptError(
                    "prompt.role",
                    f"The role {message.role!r} is not a plain word such as 'user'.",
                )
        self._check_options(options)
        sandbox, strftime = self._sandbox, (now or datetime.now()).strftime

        def render(chat: Sequence[Mapping[str, Any]], tools: Sequence[Json] | None) -> str:
            variables = {
                **options,
                **self._special_tokens,
                "messages": chat,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            return sandbox.render(variables, strftime=strftime)

        is_plain = tools is None and add_generation_prompt and not options
        return self._render_marked(
            render, messages, tools, shape_of(messages) if is_plain else None
        )

    def _check_options(self, options: Mapping[str, Json]) -> None:
        """Reject options that spell a control token: a template may print them as its own text.

        Raises:
            PromptError: `prompt.special_text`, `prompt.template` if they nest too deep.
        """

        def check(text: str) -> str:
            if self._spells_special(text):
                raise PromptError(
                    "prompt.special_text",
                    f"An option of the chat template spells a control token: {text[:80]!r}.",
                )
            return text

        _map_strings(options, check)

    def _render_marked(
        self,
        render: _Render,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Json] | None,
        shape: ChatShape | None,
    ) -> RenderedChat:
        """Return a chat, by a rendering without marks, and one or two with marks unless the outline
        of a chat with this shape is known and fits.
        """
        text: str | None = None
        outline = None if shape is None else self._outlines.find(shape)
        if outline is not None:
            text = _render_plain(render, messages, tools)
            if (known := outline.fill(messages, text)) is not None:
                return known
        attempts = self._marking_attempts(messages, tools)
        first = next(attempts)  # Before the first rendering: rejects tools that nest too deep.
        if text is None:
            text = _render_plain(render, messages, tools)
        num_segments = count_segments(messages)
        for chat in chain((first,), attempts):
            try:
                rendering = render(chat.messages, chat.tools)
            except PromptError:
                continue  # The template tests contents, and rejects the marks.
            rendered = self._parse_marks(rendering, text, chat.marked_texts, num_segments)
            if rendered is not None:
                if shape is not None and chat is first:
                    self._outlines.learn(shape, messages, text, rendered)
                return rendered
        self._check_opaque(messages, tools)
        return RenderedChat(
            (PromptPiece(text, special=True),), (len(text),) * num_segments, prefix_break=True
        )

    def _marking_attempts(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Json] | None
    ) -> Iterator[_MarkedChat]:
        yield self._set_marks(messages, tools, inside_blanks=False)
        if any(message.text.strip() != message.text for message in messages):
            yield self._set_marks(messages, tools, inside_blanks=True)

    def _set_marks(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Json] | None,
        *,
        inside_blanks: bool,
    ) -> _MarkedChat:
        """Return the chat with marks around all text that is not the template's own.

        Args:
            messages: the chat.
            tools: as in `render`.
            inside_blanks: whether to set the marks of a content inside its outer blanks.

        Raises:
            PromptError: `prompt.template` if a tool or a tool call nests too deep.
        """
        marked_texts: list[_MarkedText] = []
        num_marks = num_segments = 0

        def mark_string(text: str) -> str:
            nonlocal num_marks
            if _PLAIN_STRING.fullmatch(text):
                return text
            marked_texts.append(_MarkedText(num_marks, (False,), None))
            num_marks += 2
            return f"{self._mark(num_marks - 2)}{text}{self._mark(num_marks - 1)}"

        marked_tools = None
        if tools is not None:
            marked_tools = [_map_strings(tool, mark_string) for tool in tools]
        chat = []
        for message in messages:
            content = message.text
            begin, end = _span_without_blanks(content) if inside_blanks else (0, len(content))
            if begin < end:
                are_special = tuple(piece.special for piece in message.content)
                marked_texts.append(_MarkedText(num_marks, are_special, num_segments))
                content = self._mark_content(message, num_marks, begin, end)
                num_marks += len(are_special) + 1
            num_segments += len(message.content)
            chat.append(_fields(message, content, mark_string))
        return _MarkedChat(chat, marked_tools, marked_texts)

    def _mark_content(self, message: TemplateMessage, first_mark: int, begin: int, end: int) -> str:
        """Return a content with a mark at each boundary of its segments, from begin to end."""
        text = message.text
        boundaries = [begin]
        offset = 0
        for piece in message.content:
            offset += len(piece.text)
            boundaries.append(min(max(offset, begin), end))
        boundaries[-1] = end
        parts = [text[:begin], self._mark(first_mark)]
        for number, (start, stop) in enumerate(pairwise(boundaries), first_mark + 1):
            parts += [text[start:stop], self._mark(number)]
        parts.append(text[end:])
        return "".join(parts)

    def _mark(self, number: int) -> str:
        return f"\ue000{self._nonce}.{number}\ue001"

    def _parse_marks(
        self, rendering: str, text: str, marked_texts: Sequence[_MarkedText], num_segments: int
    ) -> RenderedChat | None:
        """Return the chat's pieces from the marks of a rendering; None if they are unusable.

        Args:
            rendering: the rendering with marks.
            text: the rendering without marks.
            marked_texts: the marks that were set.
            num_segments: number of content segments of the chat.
        """
        parts = self._mark_pattern.split(rendering)
        if "".join(parts[::2]) != text:
            return None
        by_first_mark = {marked.first_mark: marked for marked in marked_texts}
        ends: dict[int, int] = {}
        pieces = [PromptPiece(parts[0], special=True)]
        offset = len(parts[0])
        current: _MarkedText | None = None
        index = 0
        for number, part in zip(map(int, parts[1::2]), parts[2::2], strict=True):
            if current is None:
                # Outside of a marked text, the next mark must be the first mark of a text.
                current, index = by_first_mark.get(number), 0
                if current is None:
                    return None
            else:
                index += 1
                if number != current.first_mark + index:
                    return None
                if current.first_segment is not None:
                    ends.setdefault(current.first_segment + index - 1, offset)
                if index == len(current.are_special):
                    current = None
            is_special = True if current is None else current.are_special[index]
            pieces.append(PromptPiece(part, is_special))
            offset += len(part)
        if current is not None:
            return None
        return build_rendered_chat(pieces, ends, num_segments)

    def _check_opaque(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Json] | None
    ) -> None:
        """Reject a chat with a text that spells a control token.

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
                    "A message spells a control token of the model. The model's chat template"
                    " rewrites messages, so the text cannot be distinguished from a control token;"
                    " remove it from the message.",
                )

    def _looks_special(self, text: str) -> bool:
        return bool(_CONTROL_SHAPE.search(text)) or any(
            token and token in text for token in self._special_tokens.values()
        )


def _render_plain(
    render: _Render, messages: Sequence[TemplateMessage], tools: Sequence[Json] | None
) -> str:
    """Return the rendering without marks."""
    return render([_fields(message, message.text, None) for message in messages], tools)


def _span_without_blanks(text: str) -> tuple[int, int]:
    """Return where a text begins and ends without its outer blanks."""
    begin = len(text) - len(text.lstrip())
    return begin, begin + len(text.strip())


def _fields(
    message: TemplateMessage, content: str, transform: Callable[[str], str] | None
) -> dict[str, Json]:
    """Return a message in the form of templates, with `transform` applied to its other strings."""
    fields: dict[str, Json] = {"role": message.role, "content": content}
    for key in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, key)
        if value is not None:
            fields[key] = value if transform is None else _map_strings(value, transform)
    return fields


def _map_strings(value: Json, transform: Callable[[str], str], depth: int = 0) -> Any:
    """Return JSON with `transform` applied to every string, including keys.

    Raises:
        PromptError: `prompt.template` if the value nests too deep.
    """
    if depth > _MAX_DEPTH:
        raise PromptError(
            "prompt.template", f"A tool or a tool call nests deeper than {_MAX_DEPTH} levels."
        )
    if isinstance(value, str):
        return transform(value)
    if isinstance(value, Mapping):
        return {
            transform(key): _map_strings(each, transform, depth + 1) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(each, transform, depth + 1) for each in value]
    return value
