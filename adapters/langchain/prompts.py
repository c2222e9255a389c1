"""Prompt templates as messages whose texts the server puts together.

Knows LangChain's templates and renders them as LangChain does: f-strings piece by piece,
so that static text stays static; everything else (mustache, jinja2, few-shot, images) in
one piece by the template itself, if all it needs is local. Refuses to know how a program
is written down.

Kept true: a prompt whose text LangChain would render differently is refused. The traps
are `str()` of things that only the server has: a dict is printed by the server as Python
would, a message and a format specification are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

from langchain_core.messages import BaseMessage
from langchain_core.prompts import (
    BasePromptTemplate,
    ChatMessagePromptTemplate,
    ChatPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    StringPromptTemplate,
)
from langchain_core.prompts.chat import (
    AIMessagePromptTemplate,
    BaseChatPromptTemplate,
    HumanMessagePromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.utils.formatting import formatter

from conure.server.program.ir import Json

from .graph import Graph, Place, unsupported
from .messages import to_wire
from .values import (
    KINDS,
    Answer,
    Constant,
    Either,
    Local,
    Many,
    Record,
    Rendered,
    Segment,
    Text,
    Turn,
    Value,
    expression_of,
)

Lookup: TypeAlias = Callable[[str, Constant | None], Value]
"""Finds a variable by name, or gives what is to stand for it."""

_ROLES: dict[type[Any], str] = {
    HumanMessagePromptTemplate: "user",
    AIMessagePromptTemplate: "assistant",
    SystemMessagePromptTemplate: "system",
}


def render(graph: Graph, template: BasePromptTemplate[Any], value: Value, place: Place) -> Value:
    """What a prompt template makes of a value.

    Raises:
        ProgramError: if the value lacks a variable, or the text would differ from LangChain's.
    """
    if _is_plain(template):
        reader = _Reader(graph, place)
        lookup = _variables(template, value, place)
        if isinstance(template, PromptTemplate):
            return Rendered((Turn("user", tuple(reader.text(template, lookup))),), is_text=True)
        return Rendered(tuple(reader.messages(cast(ChatPromptTemplate, template), lookup)))
    if isinstance(value, Either):
        made = graph.each(value, lambda each: render(graph, template, each, place))
        return Either(value.exit, tuple(made))
    if isinstance(value, Record):
        needed = {
            name: _field(template, value, name, None, place) for name in template.input_variables
        }
        local = _joined(graph, template, needed, place)
    elif isinstance(value, Local):
        local = value
    else:
        raise unsupported(
            place,
            f"a {type(template).__name__} of this kind is rendered where the chain is submitted, "
            f"and {KINDS[type(value)]} exists only on the server; use an f-string template",
        )
    prompt = local.then(template.invoke, "messages")
    is_text = isinstance(template, StringPromptTemplate)
    return Rendered(({"splice": graph.view(prompt, "messages")},), is_text=is_text)


def _is_plain(template: BasePromptTemplate[Any]) -> bool:
    """Whether every part of a template is an f-string, a placeholder or a message."""
    if type(template) is PromptTemplate:
        return template.template_format == "f-string"
    if type(template) is not ChatPromptTemplate or template.output_parser is not None:
        return False
    return all(_is_plain_message(message) for message in template.messages)


def _is_plain_message(message: Any) -> bool:
    if isinstance(message, BaseMessage | MessagesPlaceholder):
        return True
    if isinstance(message, BaseChatPromptTemplate):
        return _is_plain(message)
    if type(message) in _ROLES or type(message) is ChatMessagePromptTemplate:
        return not message.additional_kwargs and all(map(_is_f_string, _parts(message)))
    return False


def _is_f_string(part: Any) -> bool:
    return type(part) is PromptTemplate and part.template_format == "f-string"


def _parts(message: Any) -> list[Any]:
    return message.prompt if isinstance(message.prompt, list) else [message.prompt]


def _variables(template: BasePromptTemplate[Any], value: Value, place: Place) -> Lookup:
    """How a template's variables are found in what it is given; its partials come last."""
    if isinstance(value, Either):
        lookups = [_variables(template, each, place) for each in value.values]
        return lambda name, default: _one_or_either(
            value, [lookup(name, default) for lookup in lookups]
        )

    def find(name: str, default: Constant | None) -> Value:
        if name in template.partial_variables:
            default = Constant(template.partial_variables[name])
        if isinstance(value, Local):
            return _local_variable(template, value, name, default)
        if isinstance(value, Record):
            return _field(template, value, name, default, place)
        if template.input_variables == [name]:
            return value
        if default is not None:
            return default
        raise unsupported(place, f"the prompt needs {name!r}, and nothing gives it")

    if not isinstance(value, Local | Record) and len(template.input_variables) != 1:
        names = ", ".join(sorted(template.input_variables)) or "none"
        raise unsupported(
            place,
            f"a prompt (variables: {names}) gets {KINDS[type(value)]}; give it a dict: "
            "{'name': chain, ...} | prompt",
        )
    return find


def _one_or_either(value: Either, found: list[Value]) -> Value:
    """What was found in each of several values; once, if no body made it."""
    if len(found) > 1 and all(each is found[0] for each in found):
        return found[0]
    return Either(value.exit, tuple(found))


def _field(
    template: BasePromptTemplate[Any],
    record: Record,
    name: str,
    default: Constant | None,
    place: Place,
) -> Value:
    if name in record.fields:
        return record.fields[name]
    if record.rest is not None:
        return _local_item(record.rest, name, default)
    if default is not None:
        return default
    raise unsupported(
        place, f"the prompt needs {name!r}, and what comes before gives only {record.names()}"
    )


def _local_item(local: Local, name: str, default: Constant | None) -> Local:
    """One item of what only the run of the chain will know to be a dict."""
    if default is None:
        return local.then(lambda given: given[name], name, ("item", name))
    return local.then(
        lambda given: given[name] if name in given else _partial_value(default.value), name
    )


def _local_variable(
    template: BasePromptTemplate[Any], local: Local, name: str, default: Constant | None
) -> Local:
    """One variable of what only the run of the chain will know: a dict or a bare value."""

    def find(value: Any) -> Any:
        if isinstance(value, dict) and name in value:
            return value[name]  # what else is missing fails by itself
        given = template._validate_input(value)  # LangChain's own rules and errors
        if name not in given and default is not None:
            return _partial_value(default.value)
        return given[name]

    takes_bare = len(template.input_variables) == 1
    step = ("item", name) if default is None else None
    return local.then(find, name, step, is_strict=not takes_bare)


def _partial_value(value: Any) -> Any:
    return value() if callable(value) else value


def _joined(
    graph: Graph, template: BasePromptTemplate[Any], values: dict[str, Value], place: Place
) -> Local:
    """Several local values of one source as one dict."""
    computes = {}
    sources = []
    for name, value in values.items():
        if not isinstance(value, Local):
            raise unsupported(
                place,
                f"a {type(template).__name__} of this kind is rendered where the chain is "
                f"submitted, and its variable {name!r} is {KINDS[type(value)]}, which exists only "
                "on the server; use an f-string template",
            )
        computes[name] = value.compute
        sources.append(value.source)
    source = sources[0] if sources else graph.root
    if any(other is not source for other in sources):
        raise unsupported(
            place,
            f"the variables of a {type(template).__name__} of this kind come from several client "
            "steps; use an f-string template",
        )
    return Local(
        source, lambda root: {name: compute(root) for name, compute in computes.items()}, path=None
    )


class _Reader:
    """Turns plain templates into turns."""

    def __init__(self, graph: Graph, place: Place) -> None:
        self._graph = graph
        self._place = place

    def messages(
        self, template: ChatPromptTemplate, lookup: Lookup
    ) -> Iterable[Turn | dict[str, Json]]:
        """The messages of a chat template."""
        for message in template.messages:
            if isinstance(message, BaseMessage):
                yield to_wire(message)
            elif isinstance(message, MessagesPlaceholder):
                yield from self._placeholder(message, lookup)
            elif isinstance(message, ChatPromptTemplate):
                yield from self.messages(message, _inner(message, lookup))
            else:
                role = _ROLES.get(type(message)) or cast(ChatMessagePromptTemplate, message).role
                segments = [s for part in _parts(message) for s in self.text(part, lookup)]
                yield Turn(role, tuple(segments))

    def text(self, template: PromptTemplate, lookup: Lookup) -> Iterable[Segment]:
        """The segments of an f-string template."""
        lookup = _inner(template, lookup)
        for literal, name, spec, conversion in formatter.parse(template.template):
            if literal:
                yield literal
            if name is not None:
                yield self._slot(name, conversion or "", spec or "", lookup(name, None))

    def _slot(self, name: str, conversion: str, spec: str, value: Value) -> Segment:
        # What stood in the template, to be formatted by LangChain's own formatter.
        slot = "{" + name + (conversion and f"!{conversion}") + (spec and f":{spec}") + "}"
        if "{" in spec:
            raise unsupported(self._place, f"{slot} takes its format from a variable")
        if isinstance(value, Constant) and not callable(value.value):
            return formatter.format(slot, **{name: value.value})
        if isinstance(value, Constant):
            made = value.value
            value = Local(self._graph.root, lambda root: made(), name, path=None)
        if isinstance(value, Either):
            slots = self._graph.each(value, lambda each: self._slot(name, conversion, spec, each))
            text_of_either = value.exit.give([expression_of(each) for each in slots])
            return lambda: {"input": text_of_either}
        if isinstance(value, Local):
            step = ("format", conversion, spec)
            text = value.then(lambda v: formatter.format(slot, **{name: v}), name, step)
            variable = self._graph.view(text, "text")
            return lambda: {"input": variable}
        if conversion or spec:
            raise unsupported(
                self._place,
                f"{slot} formats {KINDS[type(value)]}, which exists only on the server; write "
                f"{{{name}}}",
            )
        if isinstance(value, Text):
            return value.call.segment
        if isinstance(value, Record | Many):
            printed = self._graph.expression(value, self._place, is_printed=True)
            return lambda: {"input": {"pyrepr": [printed()]}}
        if isinstance(value, Answer):
            raise unsupported(
                self._place,
                f"{slot} would print a message object, not its text; put `| StrOutputParser()` "
                "behind the model",
            )
        raise unsupported(self._place, f"{slot} would print {KINDS[type(value)]} object")

    def _placeholder(
        self, placeholder: MessagesPlaceholder, lookup: Lookup
    ) -> Iterable[dict[str, Json]]:
        name = placeholder.variable_name
        value = lookup(name, Constant([]) if placeholder.optional else None)
        if isinstance(value, Constant):
            given = {name: _partial_value(value.value)}
            yield from (to_wire(message) for message in placeholder.format_messages(**given))
        elif isinstance(value, Local):
            messages = value.then(
                lambda v: placeholder.format_messages(**{name: v}),
                name,
                ("messages", placeholder.n_messages),
            )
            yield {"splice": self._graph.view(messages, "messages")}
        else:
            raise unsupported(
                self._place,
                f"the placeholder {name!r} takes a list of messages and gets {KINDS[type(value)]}",
            )


def _inner(template: BasePromptTemplate[Any], lookup: Lookup) -> Lookup:
    """Variables of a template inside another one: its own partials are the last resort."""
    own = template.partial_variables

    def find(name: str, default: Constant | None) -> Value:
        return lookup(name, Constant(own[name]) if name in own else default)

    return find
