"""Values of a chain, made again of the JSON that a program has of them.

Knows what each kind of value is on the wire. Refuses to know where it was made.

Kept true: what is made of a value's own JSON is what the chain would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from langchain_core.messages import convert_to_messages
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue

from conure.server.program.ir import Json

from .messages import decode, from_wire
from .values import Answer, Either, Many, Record, Rendered, Value


def reviver(value: Value, program: str = "") -> Callable[[Json], object]:
    """What makes a value of the chain of the JSON that its expression gave.

    Args:
        value: as the chain was read.
        program: id of the program, kept in the metadata of messages.
    """
    match value:
        case Answer():
            return lambda given: from_wire(given, program=program)
        case Record():
            return _dict_reviver(value, program)
        case Either():
            parts = [reviver(each, program) for each in value.values]
            if is_of_one_form(value.values):
                return parts[0]
            return lambda given: parts[given["of"]](given["value"])
        case Many():
            item = reviver(value.value, program)
            return lambda given: [item(each) for each in given]
        case Rendered():
            kind = StringPromptValue if value.is_text else ChatPromptValue
            return lambda given: _prompt(kind, given)
        case _:
            return decode


def is_of_one_form(values: Sequence[Value]) -> bool:
    """Whether the JSON of any of them is read in the same way."""
    return len({_form(value) for value in values}) == 1


def _form(value: Value) -> Hashable:
    """Equal for values whose JSON is read in the same way."""
    match value:
        case Answer():
            return "message"
        case Record():
            fields = frozenset((key, _form(item)) for key, item in value.fields.items())
            return (fields, value.rest is None)
        case Either():
            forms = tuple(map(_form, value.values))
            return forms[0] if is_of_one_form(value.values) else ("either", forms)
        case Many():
            return ("many", _form(value.value))
        case Rendered():
            return ("prompt", value.is_text)
        case _:
            return "json"


def _dict_reviver(record: Record, program: str) -> Callable[[Json], object]:
    parts = {key: reviver(item, program) for key, item in record.fields.items()}

    def revive(given: Json) -> dict[str, object]:
        rest = {} if record.rest is None else decode(given["rest"])
        fields = given if record.rest is None else given["fields"]
        return {**rest, **{key: part(fields[key]) for key, part in parts.items()}}

    return revive


def _prompt(
    kind: type[StringPromptValue | ChatPromptValue], messages: list[Json]
) -> StringPromptValue | ChatPromptValue:
    if kind is StringPromptValue:
        return StringPromptValue(text=messages[0]["content"])
    return ChatPromptValue(messages=convert_to_messages(messages))
