"""Conversion of a program's JSON to the values of a chain.

Invariants: deserializing the JSON of a value gives the value that the chain would have produced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, convert_to_messages
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue

from conure.server.program.ir import Json

from ..chat.answer_chunks import check_message, completeness_check
from ..chat.json_values import decode
from ..chat.messages import from_wire
from .values import (
    AnswerTextValue,
    AnswerValue,
    BranchedValue,
    MappedValue,
    PromptTurnsValue,
    Record,
    Value,
)


def deserializer(value: Value, program: str = "") -> Callable[[Json], object]:
    """Return the function that converts the JSON of a value's expression to the value.

    Args:
        value: the symbolic value.
        program: id of the program, for the metadata of messages.
    """
    match value:
        case AnswerValue():
            return _answer_deserializer(value.call.arguments, program)
        case AnswerTextValue() if value.is_sent_as_message:
            answer = _answer_deserializer(value.call.arguments, program)
            return lambda json: str(answer(json).text)
        case Record():
            return _dict_deserializer(value, program)
        case BranchedValue():
            parts = [deserializer(each, program) for each in value.values]
            if have_same_form(value.values):
                return parts[0]
            return lambda json: parts[json["of"]](json["value"])
        case MappedValue():
            item = deserializer(value.value, program)
            return lambda json: [item(each) for each in json]
        case PromptTurnsValue():
            kind = StringPromptValue if value.is_text else ChatPromptValue
            return lambda json: _prompt(kind, json)
        case _:
            return decode


def have_same_form(values: Sequence[Value]) -> bool:
    """Return whether all values have the same JSON form and the same deserializer."""
    return len({_form(value) for value in values}) == 1


def _form(value: Value) -> Hashable:
    """Return a key that is equal for values with the same JSON form and deserializer."""
    match value:
        case AnswerValue():
            return ("message", completeness_check(value.call.arguments))
        case AnswerTextValue() if value.is_sent_as_message:
            return ("text of message", completeness_check(value.call.arguments))
        case Record():
            fields = frozenset((key, _form(item)) for key, item in value.fields.items())
            return (fields, value.rest is None)
        case BranchedValue():
            forms = tuple(map(_form, value.values))
            return forms[0] if have_same_form(value.values) else ("either", forms)
        case MappedValue():
            return ("many", _form(value.value))
        case PromptTurnsValue():
            return ("prompt", value.is_text)
        case _:
            return "json"


def _answer_deserializer(arguments: Mapping[str, Any], program: str) -> Callable[[Json], AIMessage]:
    def deserialize(json: Json) -> AIMessage:
        message = from_wire(json, program=program)
        check_message(message, arguments)
        return message

    return deserialize


def _dict_deserializer(record: Record, program: str) -> Callable[[Json], object]:
    parts = {key: deserializer(item, program) for key, item in record.fields.items()}

    def deserialize(json: Json) -> dict[str, object]:
        rest = {} if record.rest is None else decode(json["rest"])
        fields = json if record.rest is None else json["fields"]
        return {**rest, **{key: part(fields[key]) for key, part in parts.items()}}

    return deserialize


def _prompt(
    kind: type[StringPromptValue | ChatPromptValue], messages: list[Json]
) -> StringPromptValue | ChatPromptValue:
    if kind is StringPromptValue:
        return StringPromptValue(text=messages[0]["content"])
    return ChatPromptValue(messages=convert_to_messages(messages))
