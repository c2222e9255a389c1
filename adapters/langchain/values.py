"""What flows along a chain while it is read, before anything has run.

A chain is read once, with these in place of values: what is known when a program is
submitted, what a client step will return, what a model will answer, and dicts and prompts
made of them. Knows where a value will come from. Refuses to know Runnables.

    Value
    |-- Local        computed here, from the chain's input or from what a client step returned
    |-- Constant     stands in the chain itself
    |-- Text         the text of a model's answer; only the server has it
    |-- Answer       a model's answer as a message; only the server has it
    |-- Record       a dict of values
    |-- Rendered     a prompt: messages whose texts are put together by the server
    |-- Either       one of several values; the server decides which
    `-- Many         a list, with a value for every item of another list

Kept true: what can be computed in Python from one source is computed in Python, by the
same code that LangChain would run, and travels as what it is needed as (a view): so
formatting, slicing and unpacking local values cannot come out differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from conure.server.program.ir import Json

from .bodies import Exit
from .messages import encode, to_wire_list

ViewKind: TypeAlias = Literal["value", "text", "messages"]


@dataclass(eq=False, slots=True)
class Source:
    """Where local values come from: the chain's input, one client step, or an item of a list."""

    hint: str
    """What its variables are named after."""
    views: list[View] = field(default_factory=list)

    def view(self, local: Local, kind: ViewKind, fresh: Callable[[str], str]) -> View:
        """The variable that carries a local value; one that is there already is reused."""
        for view in self.views:
            if view.kind == kind and view.local.path == local.path and local.path is not None:
                if local.is_strict:
                    view.local = local
                return view
        view = View(fresh(local.hint or self.hint), kind, local)
        self.views.append(view)
        return view

    def pack(self, made: Any) -> Json:
        """All that is needed of a value that was made: the one view of it, or all by name."""
        if len(self.views) == 1:
            return self.views[0].encode(made)
        return {view.variable: view.encode(made) for view in self.views}


@dataclass(eq=False, slots=True)
class View:
    """A variable with one local value, in the form in which it is needed."""

    variable: str
    kind: ViewKind
    local: Local

    def encode(self, root: Any) -> Json:
        """The variable's JSON, from what its source turned out to be.

        Raises:
            ProgramError: if the value cannot travel.
        """
        value = self.local.compute(root)
        if self.kind == "messages":
            return to_wire_list(value)
        return encode(value, what=f"the value of {self.variable!r}")


@dataclass(frozen=True, eq=False, slots=True)
class Local:
    """A value that Python computes from its source."""

    source: Source
    compute: Callable[[Any], Any]
    hint: str = ""
    path: tuple[Any, ...] | None = ()
    """What was done to the source: two values with the same path are the same value, where
    both can be computed. None is like no other."""
    is_strict: bool = True
    """Fails on sources that others of the same path may take (a bare value for a dict)."""

    def then(
        self,
        function: Callable[[Any], Any],
        hint: str = "",
        step: Any = None,
        *,
        is_strict: bool = True,
    ) -> Local:
        """The value of `function` on this one.

        Args:
            function: pure.
            hint: what a variable with it is named after, if this one has no name yet.
            step: identifies the function; None if nothing does.
            is_strict: as of the value that is made.
        """
        before = self.compute
        return Local(
            self.source,
            lambda root: function(before(root)),
            self.hint or hint,
            None if step is None or self.path is None else (*self.path, step),
            self.is_strict and is_strict,
        )


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """A value that stands in the chain itself."""

    value: Any


@dataclass(eq=False, slots=True)
class Call:
    """One call to a model."""

    variable: str
    is_message: bool = False
    """Somebody needs the whole message; else its text is enough."""

    def text(self) -> Json:
        """Expression for the text. To be asked only when all of the chain is read."""
        value = {"var": self.variable}
        return {"get": [value, "content"]} if self.is_message else value

    def segment(self) -> dict[str, Json]:
        """A piece of a prompt that is the text; to be asked like `text`."""
        return {"input": self.text() if self.is_message else self.variable}


@dataclass(frozen=True, eq=False, slots=True)
class Text:
    """The text of a model's answer."""

    call: Call


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """A model's answer as a message."""

    call: Call


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """A dict: `fields`, over the items of `rest` if there is one."""

    fields: Mapping[str, Value]
    rest: Local | None = None

    def names(self) -> str:
        """Its keys, for a message."""
        return ", ".join(map(repr, self.fields)) + (", ..." if self.rest else "")


Segment: TypeAlias = str | Callable[[], dict[str, Json]]
"""Static text, or a segment that is built once all of the chain is read."""


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """One message of a prompt."""

    role: str
    segments: tuple[Segment, ...]

    def wire(self) -> dict[str, Json]:
        """The message, for a program."""
        merged: list[dict[str, Json]] = []
        for segment in self.segments:
            piece = {"text": segment} if isinstance(segment, str) else segment()
            if "text" in piece and merged and "text" in merged[-1]:
                merged[-1] = {"text": merged[-1]["text"] + piece["text"]}
            elif piece.get("text") != "":
                merged.append(piece)
        if not merged:
            return {"role": self.role, "content": ""}
        if len(merged) == 1 and "text" in merged[0]:
            return {"role": self.role, "content": merged[0]["text"]}
        return {"role": self.role, "content": merged}


@dataclass(frozen=True, eq=False, slots=True)
class Rendered:
    """A prompt value: turns, whole messages, and variables that hold lists of messages."""

    messages: tuple[Turn | dict[str, Json], ...]

    is_text: bool = False
    """The template makes one text, not a chat."""

    def wire(self) -> list[dict[str, Json]]:
        """The messages, for a program. To be asked only when all of the chain is read."""
        return [turn.wire() if isinstance(turn, Turn) else turn for turn in self.messages]

    def expression(self) -> Json:
        """Expression for the list of messages; to be asked like `wire`."""
        lists: list[Json] = []
        for message in self.wire():
            if "splice" in message:
                lists.append({"var": message["splice"]})
            elif isinstance(message["content"], list):
                pieces = [_piece(segment) for segment in message["content"]]
                fields = {key: {"lit": value} for key, value in message.items()}
                lists.append([{"object": {**fields, "content": {"concat": pieces}}}])
            else:
                lists.append([{"lit": message}])
        return {"concat": lists} if lists else []


def expression_of(segment: Segment) -> Callable[[], Json]:
    """What makes the expression for a segment, once all of the chain is read."""
    if isinstance(segment, str):
        return lambda: segment
    return lambda: _piece(segment())


def _piece(segment: dict[str, Json]) -> Json:
    """Expression for a segment of a prompt; a bare name is a variable there."""
    if "text" in segment:
        return segment["text"]
    read = segment["input"]
    return {"var": read} if isinstance(read, str) else read


@dataclass(frozen=True, eq=False, slots=True)
class Either:
    """One of several values, each made in a body of its own."""

    exit: Exit
    values: tuple[Value, ...]
    """One for each body, in their order."""

    def each(self, of: Callable[[Value], Value]) -> Either:
        """What a function makes of the value, whichever it is."""
        return Either(self.exit, tuple(map(of, self.values)))


@dataclass(frozen=True, eq=False, slots=True)
class Many:
    """A list of values, each made by an instance of one body."""

    exit: Exit
    value: Value
    """What the body makes."""


Value: TypeAlias = Local | Constant | Text | Answer | Record | Rendered | Either | Many

KINDS: dict[type[Any], str] = {
    Local: "a value",
    Constant: "a constant",
    Text: "a model's text",
    Answer: "a model's message",
    Record: "a dict",
    Rendered: "a prompt",
    Either: "what one of several parts makes",
    Many: "a list that is made on the server",
}
"""What each value is called in a message."""
