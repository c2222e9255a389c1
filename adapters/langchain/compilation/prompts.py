"""Compilation of prompt templates to messages that the server renders.

Responsibility: an f-string template becomes segments, so that its static text stays static. The
client renders any other template (mustache, jinja2, few-shot, images) as a whole, if all of its
variables are client values. The prompt is then a client value, too.

Invariants: a prompt that LangChain would render differently is rejected. A value that exists only
on the server cannot be passed to Python's `str()`: the server prints dicts as Python does, and
printing a message or formatting a server value with a format specification is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import (
    BasePromptTemplate,
    ChatMessagePromptTemplate,
    ChatPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.prompts.chat import (
    AIMessagePromptTemplate,
    BaseChatPromptTemplate,
    HumanMessagePromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.utils.formatting import formatter

from conure.server.program.ir import Json

from ..chat.messages import to_wire
from .chain_graph import ChainGraph, ChainPosition, unsupported
from .traversal import is_opaque
from .values import (
    VALUE_KINDS,
    AnswerTextValue,
    AnswerValue,
    BranchedValue,
    ClientValue,
    Constant,
    MappedValue,
    PromptTurnsValue,
    Record,
    Segment,
    Turn,
    Value,
    segment_expression,
)

Lookup: TypeAlias = Callable[[str, Constant | None], Value]
"""Returns the value of a variable; the second argument is its default."""

_ROLES: dict[type[Any], str] = {
    HumanMessagePromptTemplate: "user",
    AIMessagePromptTemplate: "assistant",
    SystemMessagePromptTemplate: "system",
}


def render(
    graph: ChainGraph, template: BasePromptTemplate[Any], value: Value, position: ChainPosition
) -> Value:
    """Return the symbolic prompt value of a template.

    Raises:
        ProgramError: if the value lacks a variable, or the text would differ from LangChain's.
    """
    if _is_plain(template):
        compiler = _PromptCompiler(graph, position)
        lookup = _variables(template, value, position)
        if isinstance(template, PromptTemplate):
            return PromptTurnsValue(
                (Turn("user", tuple(compiler.text(template, lookup))),), is_text=True
            )
        return PromptTurnsValue(
            tuple(compiler.messages(cast(ChatPromptTemplate, template), lookup))
        )
    if isinstance(value, BranchedValue):
        result = graph.map_bodies(value, lambda each: render(graph, template, each, position))
        return BranchedValue(value.outputs, tuple(result))
    if isinstance(value, Record):
        needed = {
            name: _field(template, value, name, None, position) for name in template.input_variables
        }
        # An input may replace a partial variable or an optional placeholder. A variable of another
        # source than the others cannot be rendered with them, and rarely has such a name.
        has_rest = value.rest is not None and all(
            isinstance(each, ClientValue) and each.source is value.rest.source
            for each in needed.values()
        )
        for name, default in template.partial_variables.items():
            if name not in needed and (name in value.fields or has_rest):
                needed[name] = _field(template, value, name, Constant(default), position)
        local = _combined(graph, template, needed, position)
    elif isinstance(value, ClientValue):
        local = value
    else:
        raise unsupported(
            position,
            f"this {type(template).__name__} is rendered by the client, "
            f"but {VALUE_KINDS[type(value)]} exists only on the server; use an f-string template",
        )
    return local.then(_rendering(template), "messages")


def _rendering(template: BasePromptTemplate[Any]) -> Callable[[Any], PromptValue]:
    """Return the function that renders a template. `invoke` would start a run of LangChain."""
    if is_opaque(template):  # its class may override `invoke`
        return template.invoke
    return lambda given: template.format_prompt(**template._validate_input(given))


def _is_plain(template: BasePromptTemplate[Any]) -> bool:
    """Return whether every part of a template is an f-string, a placeholder or a message."""
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


def _variables(template: BasePromptTemplate[Any], value: Value, position: ChainPosition) -> Lookup:
    """Return the lookup of a template's variables in its input; partial variables are defaults."""
    if isinstance(value, BranchedValue):
        lookups = [_variables(template, each, position) for each in value.values]
        return lambda name, default: _branched(value, [lookup(name, default) for lookup in lookups])

    def find(name: str, default: Constant | None) -> Value:
        if name in template.partial_variables:
            default = Constant(template.partial_variables[name])
        if isinstance(value, ClientValue):
            return _local_variable(template, value, name, default)
        if isinstance(value, Record):
            return _field(template, value, name, default, position)
        if template.input_variables == [name]:
            return value
        if default is not None:
            return default
        raise unsupported(position, f"the prompt variable {name!r} has no value")

    if not isinstance(value, ClientValue | Record) and len(template.input_variables) != 1:
        names = ", ".join(sorted(template.input_variables)) or "none"
        raise unsupported(
            position,
            f"a prompt (variables: {names}) requires a dict, got {VALUE_KINDS[type(value)]}; write "
            "{'name': chain, ...} | prompt",
        )
    return find


def _branched(value: BranchedValue, values: list[Value]) -> Value:
    """Return a branched value, or the value itself if it is the same in every branch."""
    if len(values) > 1 and all(each is values[0] for each in values):
        return values[0]
    return BranchedValue(value.outputs, tuple(values))


def _field(
    template: BasePromptTemplate[Any],
    record: Record,
    name: str,
    default: Constant | None,
    position: ChainPosition,
) -> Value:
    if name in record.fields:
        return record.fields[name]
    if record.rest is not None:
        return _local_item(record.rest, name, default)
    if default is not None:
        return default
    raise unsupported(
        position, f"the prompt variable {name!r} has no value; the input has only {record.names()}"
    )


def _local_item(local: ClientValue, name: str, default: Constant | None) -> ClientValue:
    """Return an item of a client value, which must be a dict at run time."""
    if default is None:
        return local.then(lambda variables: variables[name], name, ("item", name))
    return local.then(
        lambda variables: variables[name] if name in variables else _partial_value(default.value),
        name,
    )


def _local_variable(
    template: BasePromptTemplate[Any], local: ClientValue, name: str, default: Constant | None
) -> ClientValue:
    """Return a variable from a client value, which may be a dict or a bare value at run time."""

    def find(value: Any) -> Any:
        if isinstance(value, dict) and name in value:
            return value[name]  # other missing variables fail on their own lookup
        variables = template._validate_input(value)  # LangChain's rules and errors
        if name not in variables and default is not None:
            return _partial_value(default.value)
        return variables[name]

    takes_bare = len(template.input_variables) == 1
    step = ("item", name) if default is None else None
    return local.then(find, name, step, is_strict=not takes_bare)


def _partial_value(value: Any) -> Any:
    return value() if callable(value) else value


def _combined(
    graph: ChainGraph,
    template: BasePromptTemplate[Any],
    values: dict[str, Value],
    position: ChainPosition,
) -> ClientValue:
    """Combine client values of one source into a client value of a dict."""
    computes = {}
    sources = []
    for name, value in values.items():
        if not isinstance(value, ClientValue):
            raise unsupported(
                position,
                f"this {type(template).__name__} is rendered by the client, but its variable "
                f"{name!r} is {VALUE_KINDS[type(value)]}, which exists only on the server; use an "
                "f-string template",
            )
        computes[name] = value.compute
        sources.append(value.source)
    source = sources[0] if sources else graph.root
    if any(other is not source for other in sources):
        raise unsupported(
            position,
            f"the variables of this {type(template).__name__} come from several client "
            "steps; use an f-string template",
        )
    return ClientValue(
        source, lambda root: {name: compute(root) for name, compute in computes.items()}, path=None
    )


class _PromptCompiler:
    """Converts plain templates to turns."""

    def __init__(self, graph: ChainGraph, position: ChainPosition) -> None:
        self._graph = graph
        self._position = position

    def messages(
        self, template: ChatPromptTemplate, lookup: Lookup
    ) -> Iterable[Turn | dict[str, Json]]:
        """Yield the messages of a chat template."""
        for message in template.messages:
            if isinstance(message, BaseMessage):
                yield to_wire(message)
            elif isinstance(message, MessagesPlaceholder):
                yield from self._placeholder(message, lookup)
            elif isinstance(message, ChatPromptTemplate):
                yield from self.messages(message, _nested_lookup(message, lookup))
            else:
                role = _ROLES.get(type(message)) or cast(ChatMessagePromptTemplate, message).role
                segments = [s for part in _parts(message) for s in self.text(part, lookup)]
                yield Turn(role, tuple(segments))

    def text(self, template: PromptTemplate, lookup: Lookup) -> Iterable[Segment]:
        """Yield the segments of an f-string template."""
        lookup = _nested_lookup(template, lookup)
        for literal, name, spec, conversion in formatter.parse(template.template):
            if literal:
                yield literal
            if name is not None:
                yield self._replacement_field(
                    name, conversion or "", spec or "", lookup(name, None)
                )

    def _replacement_field(self, name: str, conversion: str, spec: str, value: Value) -> Segment:
        # The text of the replacement field, for LangChain's formatter.
        slot = "{" + name + (conversion and f"!{conversion}") + (spec and f":{spec}") + "}"
        if "{" in spec:
            raise unsupported(self._position, f"{slot} reads its format from a variable")
        value = self._computed_at_run(name, value)
        if isinstance(value, Constant):
            return formatter.format(slot, **{name: value.value})
        if isinstance(value, BranchedValue):
            slots = self._graph.map_bodies(
                value, lambda each: self._replacement_field(name, conversion, spec, each)
            )
            text_of_either = value.outputs.export([segment_expression(each) for each in slots])
            return lambda: {"input": text_of_either}
        if isinstance(value, ClientValue):
            step = ("format", conversion, spec)
            text = value.then(lambda v: formatter.format(slot, **{name: v}), name, step)
            variable = self._graph.view_variable(text, "text")
            return lambda: {"input": variable}
        if conversion or spec:
            raise unsupported(
                self._position,
                f"{slot} formats {VALUE_KINDS[type(value)]}, which exists only on the server; "
                f"write {{{name}}}",
            )
        if isinstance(value, AnswerTextValue):
            return value.call.segment
        if isinstance(value, Record | MappedValue):
            printed = self._graph.expression(value, self._position, is_printed=True)
            return lambda: {"input": {"pyrepr": [printed()]}}
        if isinstance(value, AnswerValue):
            raise unsupported(
                self._position,
                f"{slot} would print a message object, not its text; add `| StrOutputParser()` "
                "after the model",
            )
        raise unsupported(self._position, f"{slot} would print {VALUE_KINDS[type(value)]} object")

    def _computed_at_run(self, name: str, value: Value) -> Value:
        """Return a client value for a partial variable that is a function, which runs per call."""
        if not (isinstance(value, Constant) and callable(value.value)):
            return value
        function = value.value
        return ClientValue(self._graph.root, lambda root: function(), name, path=None)

    def _placeholder(
        self, placeholder: MessagesPlaceholder, lookup: Lookup
    ) -> Iterable[dict[str, Json]]:
        name = placeholder.variable_name
        value = lookup(name, Constant([]) if placeholder.optional else None)
        value = self._computed_at_run(name, value)
        if isinstance(value, Constant):
            variables = {name: value.value}
            yield from (to_wire(message) for message in placeholder.format_messages(**variables))
        elif isinstance(value, ClientValue):
            messages = value.then(
                lambda v: placeholder.format_messages(**{name: v}),
                name,
                ("messages", placeholder.n_messages),
            )
            yield {"splice": self._graph.view_variable(messages, "messages")}
        else:
            raise unsupported(
                self._position,
                f"the placeholder {name!r} requires a list of messages, got "
                f"{VALUE_KINDS[type(value)]}",
            )


def _nested_lookup(template: BasePromptTemplate[Any], lookup: Lookup) -> Lookup:
    """Return the lookup of a nested template.

    A partial variable of the nested template applies only if neither the input nor an outer
    template has the name.
    """
    partials = template.partial_variables

    def find(name: str, default: Constant | None) -> Value:
        return lookup(name, Constant(partials[name]) if name in partials else default)

    return find
