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

from .bodies import Body, Exit
from .messages import encode, to_wire_list

Lost: TypeAlias = dict[str, Exception]
"""What went wrong with values that a body may need, by the text that stands in their place."""
ViewKind: TypeAlias = Literal["value", "text", "messages"]


@dataclass(eq=False, slots=True)
class Source:
    """Where local values come from: the chain's input, one client step, or an item of a list."""

    hint: str
    """What its variables are named after."""
    home: Body | None = None
    """Where it is made, so that who reads there fails with it. None: everybody reads there."""
    views: list[View] = field(default_factory=list)

    def view(
        self, local: Local, kind: ViewKind, fresh: Callable[[str], str], *, is_sure: bool = True
    ) -> View:
        """The variable that carries a local value; one that is there already is reused.

        Args:
            local: the value.
            kind: the form in which it is needed.
            fresh: makes names.
            is_sure: it is needed in any case.
        """
        for view in self.views:
            if view.kind == kind and view.carries(local, is_sure=is_sure):
                if is_sure and local.is_strict:
                    view.local = local
                view.is_sure |= is_sure
                return view
        view = View(fresh(local.hint or self.hint), kind, local, is_sure)
        self.views.append(view)
        return view

    def pack(self, made: Any, lost: Lost | None = None) -> Json:
        """All that is needed of a value that was made: the one view of it, or all by name."""
        if len(self.views) == 1:
            return self.views[0].encode(made, lost)
        return {view.variable: view.encode(made, lost) for view in self.views}


@dataclass(eq=False, slots=True)
class View:
    """A variable with one local value, in the form in which it is needed."""

    variable: str
    kind: ViewKind
    local: Local
    is_sure: bool = True
    """Needed in any case. Else it is needed only in bodies, which may never run, and what
    goes wrong with it goes wrong there: it travels as `{"value": ..}` or `{"error": text}`."""

    def carries(self, local: Local, *, is_sure: bool) -> bool:
        """Whether this is good for a value, too: it is the same where both are needed, and
        does not fail where only one of them is.
        """
        if local.path is None or local.path != self.local.path:
            return False
        if local.is_strict == self.local.is_strict:
            return True
        return self.is_sure and (is_sure or self.local.is_strict)

    def read(self) -> Json:
        """Expression for the value in a body; to be asked once all of the chain is read."""
        found: Json = {"var": self.variable}
        if self.is_sure:
            return found
        error: Json = {"get": [found, "error"]}
        return {"if": [{"eq": [error, None]}, {"get": [found, "value"]}, failure(error)]}

    def encode(self, root: Any, lost: Lost | None = None) -> Json:
        """The variable's JSON, from what its source turned out to be.

        Args:
            root: what the source turned out to be.
            lost: takes what went wrong, if that is for others to tell.

        Raises:
            ProgramError: if the value cannot travel, and is needed in any case.
        """
        if self.is_sure:
            return self._encoded(root)
        try:
            return {"value": self._encoded(root)}
        except Exception as problem:  # told where the value is read
            told = _told(self.variable, problem)
            if lost is not None:
                lost[told] = problem
            return {"error": told}

    def _encoded(self, root: Any) -> Json:
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

    @property
    def values(self) -> tuple[Value, ...]:
        """One for each body, as of `Either`."""
        return (self.value,)


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


def failure(words: Json) -> Json:
    """Expression that fails with the text that `words` is: `parse_json` quotes what it cannot
    read, and no operator does more.
    """
    return {"parse_json": words}


def _told(variable: str, problem: Exception) -> str:
    """A text for a failure: no JSON, none in a fence, and as long as a server quotes it."""
    text = f"{variable}: {type(problem).__name__}: {problem}".replace("`", "'")
    return text.encode("utf-8", "replace").decode()[:80]
