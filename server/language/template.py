"""Templates: literal text with slots, one growing context.

    {{name}}                                       an input, or an output that was written before
    {{name=Answer, end=<|im_end|>, max_tokens=50}} an output
    {{{{                                           a literal {{

An output ends before its `end` marker, which then follows it in the context; `stop` is a text at
which the output ends and that is not part of the context. The prompts of semantic functions are
templates, too.

Responsibility: finding slots and reading their options. Invariant: text that is inserted into a
slot is never parsed again.
"""

from __future__ import annotations

import ast
import contextlib
import re
from typing import NamedTuple, NoReturn, TypeAlias

from ..program.content import Json
from .errors import Position, SourceArgumentError, SourceSyntaxError
from .options import check_slot_option
from .syntax import constant_fault, without_warnings

TEXT_START = Position(1, 1)
MAX_SLOTS = 1_000
MAX_SLOT_LENGTH = 16_384
MAX_LITERAL_NODES = 1_000

_NAME = re.compile(r"[A-Za-z_]\w*")
_MARKER = re.compile(r"<[^<>,\s]+>")
_IN_SLOT = re.compile(r"""['"\[\](){},]""")
"""Characters that may end a part of a slot, or that open a string or bracket inside it."""
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}|0")
"""The numbers that need no parser."""
_BARE_TYPES = frozenset({"str", "int", "float", "bool", "list", "string"})
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}


class InputSlot(NamedTuple):
    """`{{name}}`."""

    name: str
    position: Position


class OutputSlot(NamedTuple):
    """`{{name=..., ...}}`."""

    name: str
    options: dict[str, Json]
    """The same options as in a call of `gen`."""
    end: str
    """The marker at which the output ends, and that follows it in the context."""
    model: Json
    position: Position

    def options_with(self, given: dict[str, Json]) -> dict[str, Json]:
        """Return the options of the output, with its marker among the texts at which it ends.

        Args:
            given: options of the call, which replace those of the slot.

        Raises:
            SourceArgumentError: `language.argument`.
        """
        options = {**self.options, **given}
        if self.end:
            stop = options.get("stop") or []
            if not isinstance(stop, str | list):
                message = "`stop` is a text or a list of texts: write stop='...' or stop=['...']"
                raise SourceArgumentError("language.argument", message, self.position)
            options["stop"] = [self.end, *([stop] if isinstance(stop, str) else stop)]
        return options


Part: TypeAlias = str | InputSlot | OutputSlot


def parse_template(text: str, start: Position = TEXT_START) -> list[Part]:
    """Split a template into literal texts and slots.

    Raises:
        SourceSyntaxError: `language.template`.
        SourceArgumentError: `language.argument` for an unknown option.
    """
    with without_warnings():
        return _Template(text, start).parts()


class _Template:
    """The parsing of one template."""

    def __init__(self, text: str, start: Position) -> None:
        self._text = text
        self._start = start
        self._line_start = self._line = self._counted = 0
        """Where the line of the last position starts, its number, and the offset."""

    def parts(self) -> list[Part]:
        parts: list[Part] = []
        literal: list[str] = []
        here = num_slots = 0
        text = self._text
        while (opening := text.find("{{", here)) >= 0:
            literal.append(text[here:opening])
            if text.startswith("{{{{", opening):
                literal.append("{{")
                here = opening + 4
                continue
            num_slots += 1
            if num_slots > MAX_SLOTS:
                self._refuse(f"a template can have at most {MAX_SLOTS:,} slots", opening)
            slot, here = self._slot(opening)
            parts += [each for each in ("".join(literal), slot) if each]
            literal = [slot.end] if isinstance(slot, OutputSlot) else []
        literal.append(text[here:])
        rest = "".join(literal)
        return [*parts, rest] if rest else parts

    def _slot(self, opening: int) -> tuple[InputSlot | OutputSlot, int]:
        """Return the slot that opens at an offset, and the offset after it."""
        position = self._position(opening)
        items, closing = self._items(opening)
        if len(items) == 1 and not _KEY.match(items[0][1]):
            name = items[0][1].strip()
            if not _NAME.fullmatch(name):
                self._refuse(
                    f"{name[:40]!r} is not a name: write {{{{name}}}} for an input, "
                    "{{name=output, max_tokens=50}} for an output, or {{{{ for the characters",
                    opening,
                )
            return InputSlot(name, position), closing
        fields: dict[str, Json] = {}
        for offset, item in items:
            match = _KEY.match(item)
            if match is None:
                self._refuse(f"{item.strip()[:40]!r} must have the form key=value", offset)
            if match[1] in fields:
                self._refuse(f"`{match[1]}` is given twice", offset)
            fields[match[1]] = self._value(match[1], item[match.end() :].strip(), offset)
        return self._output(fields, position), closing

    def _output(self, fields: dict[str, Json], position: Position) -> OutputSlot:
        name = fields.pop("name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = "an output needs a name: write {{name=answer}}"
            raise SourceSyntaxError("language.template", message, position)
        end, model = fields.pop("end", ""), fields.pop("model", None)
        if not isinstance(end, str):
            message = "`end` is one marker: write end='...', and other texts as stop=['...']"
            raise SourceArgumentError("language.argument", message, position)
        for option in fields:
            check_slot_option(option, position)
        return OutputSlot(name, fields, end, model, position)

    def _items(self, opening: int) -> tuple[list[tuple[int, str]], int]:
        """Return the parts of a slot between commas, with offsets, and the offset after it."""
        text = self._text
        items: list[tuple[int, str]] = []
        start = here = opening + 2
        depth = 0
        while (found := _IN_SLOT.search(text, here)) is not None:
            here = found.start()
            if here - opening > MAX_SLOT_LENGTH:
                break
            character = text[here]
            if character in "'\"":
                here = self._string_end(here)
                continue
            if not depth and text.startswith("}}", here):
                items.append((start, text[start:here]))
                return items, here + 2
            if character in "[{(":
                depth += 1
            elif character in "]})":
                depth -= 1
            elif character == "," and not depth:
                items.append((start, text[start:here]))
                start = here + 1
            here += 1
        message = "the slot is not closed: write }} at its end, or {{{{ for {{"
        raise SourceSyntaxError("language.template", message, self._position(opening))

    def _string_end(self, start: int) -> int:
        """Return the offset after a quoted string."""
        text, quote = self._text, self._text[start]
        here = start + 1
        while here < len(text) and text[here] != quote:
            here += 2 if text[here] == "\\" else 1
        return here + 1

    def _value(self, key: str, text: str, offset: int) -> Json:
        if _MARKER.fullmatch(text) or (key in ("name", "model") and _NAME.fullmatch(text)):
            return text
        if text in _BARE_TYPES:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _NUMBER.fullmatch(text):
            return int(text)
        # A docstring may contain a line break where its author wrote '\\n' in quotes.
        for spelling in (text, text.replace("\n", "\\n")):
            with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
                value = ast.parse(spelling, mode="eval").body
                if (fault := _constant_fault(value)) is not None:
                    self._refuse(f"`{key}` is invalid: {fault}", offset)
                return _literal(value)
        message = (
            f"`{key}` has the value {text[:40]!r}, which is not a literal: write a text in quotes, "
            "a number, a list or a marker as <|end|>"
        )
        raise SourceSyntaxError("language.template", message, self._position(offset))

    def _position(self, offset: int) -> Position:
        """Return the position of an offset; offsets ascend from call to call.

        Counting from the last offset keeps the cost linear in the text, however many slots it has.
        """
        self._line += self._text.count("\n", self._counted, offset)
        self._line_start = max(self._line_start, self._text.rfind("\n", self._counted, offset) + 1)
        self._counted = offset
        first_line, first_column = self._start
        column = offset - self._line_start
        return Position(first_line + self._line, column + (1 if self._line else first_column))

    def _refuse(self, message: str, offset: int) -> NoReturn:
        raise SourceSyntaxError("language.template", message, self._position(offset))


def _constant_fault(node: ast.expr) -> str | None:
    """Return why a constant in an expression is not a value of the language; None if all are."""
    constants = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    return next(filter(None, map(constant_fault, constants)), None)


def _literal(node: ast.expr) -> Json:
    """Return the value of a literal whose constants are values of the language.

    Raises:
        ValueError: for any other expression.
    """
    remaining = MAX_LITERAL_NODES

    def convert(node: ast.expr) -> Json:
        nonlocal remaining
        remaining -= 1
        match node:
            case _ if remaining < 0:
                raise ValueError
            case ast.Constant():
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Name(id=name) if name in _WORDS:
                return _WORDS[name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [convert(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {_key(key): convert(value) for key, value in pairs}
            case _:
                raise ValueError

    return convert(node)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError
