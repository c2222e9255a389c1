"""Symbolic values: what the Runnables of a chain pass on while the chain is compiled.

    Value
    |-- ClientValue       computed by the client, from the chain's input or a client step's result
    |-- Constant          part of the chain itself
    |-- AnswerTextValue   text of a model's answer; exists only on the server
    |-- AnswerValue       message of a model's answer; exists only on the server
    |-- Record            dict of values
    |-- PromptTurnsValue  prompt whose texts the server concatenates
    |-- BranchedValue     one of several values; the server decides which
    `-- MappedValue       list with one value per item of another list

Invariants: a value that Python can compute from one source is computed by the code that LangChain
would run, and sent in the form in which it is used (a view). Formatting, indexing and unpacking of
client values therefore gives the same results as in LangChain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from conure.server.program.errors import ConureError, ProgramError
from conure.server.program.ir import Json

from ..chat.json_values import encode
from ..chat.messages import to_wire_list
from .bodies import BodyOutputs, GraphBody

_ERROR_ID = re.compile(r"\[error ([0-9a-f]{12})\]")
ViewKind: TypeAlias = Literal["value", "text", "messages", "printed"]
"""`printed`: a value that the server prints as Python does, so it must be plain JSON."""


class DeferredErrors:
    """Errors of values that a body may read, by correlation id.

    Instead of the value, the body gets a text that starts with the id. If the body reads it, the
    program fails with the text (`failure`).
    """

    def __init__(self) -> None:
        self._errors: dict[str, Exception] = {}

    def add(self, variable: str, error: Exception) -> str:
        """Record the error of a variable, and return the text that replaces its value."""
        error_id = uuid4().hex[:12]
        self._errors[error_id] = error
        text = f"[error {error_id}] {variable}: {type(error).__name__}: {error}"
        # The text must not be JSON or fenced JSON, nor longer than the server's quotes.
        return text.replace("`", "'").encode("utf-8", "replace").decode()[:80]

    def cause_of(self, failure: ConureError) -> Exception | None:
        """Return the error that a program failed with, if it is one of these."""
        found = _ERROR_ID.search(failure.message) if failure.code == "expr.json" else None
        return None if found is None else self._errors.get(found[1])


@dataclass(eq=False, slots=True)
class Source:
    """An origin of client values: the chain's input, one client step, or an item of a list."""

    hint: str
    """Prefix of the names of its variables."""
    body: GraphBody | None = None
    """The body that computes the source. If that fails, the readers in this body fail, too. None:
    the source belongs to no body, and any body may read it."""
    views: list[WireView] = field(default_factory=list)

    def view(
        self,
        local: ClientValue,
        kind: ViewKind,
        new_name: Callable[[str], str],
        *,
        is_always_needed: bool = True,
    ) -> WireView:
        """Return the variable that carries a client value; existing variables are reused.

        Args:
            local: the value.
            kind: the form in which the value is used.
            new_name: returns a unique name.
            is_always_needed: whether the value is always needed.
        """
        for view in self.views:
            if view.kind == kind and view.can_carry(local, is_always_needed=is_always_needed):
                if is_always_needed and local.is_strict:
                    view.local = local
                view.is_always_needed |= is_always_needed
                return view
        view = WireView(new_name(local.hint or self.hint), kind, local, is_always_needed)
        self.views.append(view)
        return view

    def encode(self, value: Any, errors: DeferredErrors | None = None) -> Json:
        """Return the JSON of the source's only view, or of all views by name."""
        if len(self.views) == 1:
            return self.views[0].encode(value, errors)
        return {view.variable: view.encode(value, errors) for view in self.views}


@dataclass(eq=False, slots=True)
class WireView:
    """A variable that carries one client value in one form."""

    variable: str
    kind: ViewKind
    local: ClientValue
    is_always_needed: bool = True
    """Always needed. Otherwise only bodies need it, which may never run: errors are deferred to the
    body, and the variable is `{"value": ...}` or `{"error": text}`.
    """

    def can_carry(self, local: ClientValue, *, is_always_needed: bool) -> bool:
        """Return whether this variable can also carry `local`.

        The two values must be equal wherever both are needed, and this one must not fail where
        only `local` is needed.
        """
        if local is not self.local and (local.path is None or local.path != self.local.path):
            return False
        if local.is_strict == self.local.is_strict:
            return True
        return self.is_always_needed and (is_always_needed or self.local.is_strict)

    def read_expression(self) -> Json:
        """Return the expression of the value in a body. Call this after compilation."""
        variable: Json = {"var": self.variable}
        if self.is_always_needed:
            return variable
        error: Json = {"get": [variable, "error"]}
        return {
            "if": [{"eq": [error, None]}, {"get": [variable, "value"]}, failing_expression(error)]
        }

    def encode(self, root: Any, errors: DeferredErrors | None = None) -> Json:
        """Return the JSON of the variable.

        Args:
            root: value of the source.
            errors: records the error of a value that only bodies need.

        Raises:
            ProgramError: if JSON cannot carry the value and the value is always needed.
        """
        if self.is_always_needed:
            return self._encoded(root)
        try:
            return {"value": self._encoded(root)}
        except Exception as problem:  # raised where the value is read
            return {"error": (errors or DeferredErrors()).add(self.variable, problem)}

    def _encoded(self, root: Any) -> Json:
        value = self.local.compute(root)
        if self.kind == "messages":
            return _spliced(to_wire_list(value))
        what = f"the value of {self.variable!r}"
        return encode(value, what=what, is_plain=self.kind in ("text", "printed"))


def _spliced(messages: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return messages that can be spliced into a prompt, which are text only."""
    for message in messages:
        if isinstance(message["content"], list):
            raise ProgramError(
                "langchain.not_json", "a message has content other than text, such as an image"
            )
    return messages


@dataclass(frozen=True, eq=False, slots=True)
class ClientValue:
    """A value that Python computes from its source."""

    source: Source
    compute: Callable[[Any], Any]
    hint: str = ""
    path: tuple[Any, ...] | None = ()
    """Operations on the source. Two values with the same path are equal wherever both can be
    computed. A value with path None differs from all others.
    """
    is_strict: bool = True
    """Whether it fails if the source is a bare value instead of a dict. A value with the same path
    that is not strict accepts both."""

    def then(
        self,
        function: Callable[[Any], Any],
        hint: str = "",
        step: Any = None,
        *,
        is_strict: bool = True,
    ) -> ClientValue:
        """Return the value of `function` applied to this one.

        Args:
            function: pure.
            hint: prefix of variable names, if this value has none.
            step: identifies the function in the path; None if it cannot be identified.
            is_strict: `is_strict` of the returned value.
        """
        before = self.compute
        return ClientValue(
            self.source,
            lambda root: function(before(root)),
            self.hint or hint,
            None if step is None or self.path is None else (*self.path, step),
            self.is_strict and is_strict,
        )


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """A value in the chain itself."""

    value: Any


@dataclass(eq=False, slots=True)
class CallValue:
    """One call to a model."""

    variable: str
    is_message: bool = False
    """The whole message is needed, not only its text."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the call, by which its answer is checked."""

    def text(self) -> Json:
        """Return the expression of the text. Call this after compilation."""
        value = {"var": self.variable}
        return {"get": [value, "content"]} if self.is_message else value

    def segment(self) -> dict[str, Json]:
        """Return the prompt segment of the text. Call this after compilation."""
        return {"input": self.text() if self.is_message else self.variable}


@dataclass(frozen=True, eq=False, slots=True)
class AnswerTextValue:
    """The text of a model's answer."""

    call: CallValue

    @property
    def is_sent_as_message(self) -> bool:
        """Whether its JSON is the message, by which the client finds a cut tool call."""
        return bool(self.call.arguments.get("tools"))


@dataclass(frozen=True, eq=False, slots=True)
class AnswerValue:
    """A model's answer as a message."""

    call: CallValue


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """A dict: `fields` override the items of `rest`."""

    fields: Mapping[str, Value]
    rest: ClientValue | None = None

    def names(self) -> str:
        """Return the keys, for an error message."""
        return ", ".join(map(repr, self.fields)) + (", ..." if self.rest else "")


Segment: TypeAlias = str | Callable[[], dict[str, Json]]
"""Static text, or a segment that is built after compilation."""


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """One message of a prompt."""

    role: str
    segments: tuple[Segment, ...]

    def wire(self) -> dict[str, Json]:
        """Return the message for a node."""
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
class PromptTurnsValue:
    """A prompt value: turns, complete messages, and variables of message lists."""

    messages: tuple[Turn | dict[str, Json], ...]

    is_text: bool = False
    """The template makes a text, not a chat."""

    @property
    def is_text_only(self) -> bool:
        """Whether no message has content other than text, such as an image."""
        contents = [each.get("content") for each in self.messages if isinstance(each, dict)]
        lists = [content for content in contents if isinstance(content, list)]
        return not any("part" in segment for content in lists for segment in content)

    def wire(self) -> list[dict[str, Json]]:
        """Return the messages for a node. Call this after compilation."""
        return [turn.wire() if isinstance(turn, Turn) else turn for turn in self.messages]

    def expression(self) -> Json:
        """Return the expression of the message list. Call this after compilation.

        The messages are text (`is_text_only`).
        """
        lists: list[Json] = []
        for message in self.wire():
            if "splice" in message:
                lists.append({"var": message["splice"]})
            elif isinstance(message["content"], list):
                pieces = [_part_expression(segment) for segment in message["content"]]
                fields = {key: {"lit": value} for key, value in message.items()}
                lists.append([{"object": {**fields, "content": {"concat": pieces}}}])
            else:
                lists.append([{"lit": message}])
        return {"concat": lists} if lists else []


def segment_expression(segment: Segment) -> Callable[[], Json]:
    """Return a function that builds the expression of a segment after compilation."""
    if isinstance(segment, str):
        return lambda: segment
    return lambda: _part_expression(segment())


def _part_expression(segment: dict[str, Json]) -> Json:
    """Return the expression of a segment, in which a bare name is a variable."""
    if "text" in segment:
        return segment["text"]
    read = segment["input"]
    return {"var": read} if isinstance(read, str) else read


@dataclass(frozen=True, eq=False, slots=True)
class BranchedValue:
    """One of several values, each produced in its own body."""

    outputs: BodyOutputs
    values: tuple[Value, ...]
    """One per body, in the order of the bodies."""

    def each(self, of: Callable[[Value], Value]) -> BranchedValue:
        """Apply a function to each of the values."""
        return BranchedValue(self.outputs, tuple(map(of, self.values)))


@dataclass(frozen=True, eq=False, slots=True)
class MappedValue:
    """A list of values, each produced by an instance of one body."""

    outputs: BodyOutputs
    value: Value
    """The output of the body."""

    @property
    def values(self) -> tuple[Value, ...]:
        """One per body, as in `BranchedValue`."""
        return (self.value,)


Value: TypeAlias = (
    ClientValue
    | Constant
    | AnswerTextValue
    | AnswerValue
    | Record
    | PromptTurnsValue
    | BranchedValue
    | MappedValue
)

VALUE_KINDS: dict[type[Any], str] = {
    ClientValue: "a value",
    Constant: "a constant",
    AnswerTextValue: "a model's text",
    AnswerValue: "a model's message",
    Record: "a dict",
    PromptTurnsValue: "a prompt",
    BranchedValue: "the output of one of several branches",
    MappedValue: "a list computed on the server",
}
"""Descriptions of values in error messages."""


def failing_expression(words: Json) -> Json:
    """Return an expression that fails with a text; `parse_json` quotes its invalid input."""
    return {"parse_json": words}
