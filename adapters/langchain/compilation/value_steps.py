"""Steps of a chain that only select from a symbolic value: items, picks and text.

Invariants: a step that LangChain would refuse for such a value is rejected. A step of a client
value starts no run of LangChain, because tracers would report the run.
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import RunnablePick

from .chain_graph import ChainPosition, unsupported
from .values import (
    VALUE_KINDS,
    AnswerTextValue,
    AnswerValue,
    BranchedValue,
    ClientValue,
    Constant,
    Record,
    Value,
)


def item_of(value: Value, key: Any, position: ChainPosition) -> Value:
    """Return the item of a value under a key.

    Raises:
        ProgramError: if the value has no such item.
    """
    if isinstance(value, BranchedValue):
        return value.each(lambda each: item_of(each, key, position))
    if isinstance(value, ClientValue):
        hint = str(key) if isinstance(key, str) else f"item_{key}"
        return value.then(lambda input_value: input_value[key], hint, ("item", key))
    if isinstance(value, Record):
        if key in value.fields:
            return value.fields[key]
        if value.rest is not None:
            return item_of(value.rest, key, position)
        raise unsupported(
            position, f"the input has no item {key!r}; its items are: {value.names()}"
        )
    raise unsupported(position, f"itemgetter({key!r}) requires a dict, got {described(value)}")


def compile_pick(runnable: RunnablePick, value: Value, position: ChainPosition) -> Value:
    """Return the items of a value that a `RunnablePick` selects. It ignores keys that are absent.

    Keys of `Record.rest` are assumed to be present, so that the picked dict has known keys.
    """
    if isinstance(value, BranchedValue):
        return value.each(lambda each: compile_pick(runnable, each, position))
    if isinstance(value, ClientValue):
        hint = runnable.keys if isinstance(runnable.keys, str) else ""
        return value.then(runnable._pick, hint, ("pick", str(runnable.keys)))
    if not isinstance(value, Record):
        raise unsupported(position, f"RunnablePick requires a dict, got {described(value)}")
    keys = [runnable.keys] if isinstance(runnable.keys, str) else runnable.keys
    present = [key for key in keys if key in value.fields or value.rest is not None]
    if not present:
        return Constant(None)
    if not isinstance(runnable.keys, str):
        return Record({key: item_of(value, key, position) for key in present})
    if runnable.keys in value.fields or value.rest is None:
        return item_of(value, runnable.keys, position)
    return compile_pick(runnable, value.rest, position)


def compile_text_parser(parser: StrOutputParser, value: Value, position: ChainPosition) -> Value:
    """Return the text of a message."""
    if isinstance(value, BranchedValue):
        return value.each(lambda each: compile_text_parser(parser, each, position))
    if isinstance(value, AnswerValue):
        return AnswerTextValue(value.call)
    if isinstance(value, AnswerTextValue):
        return value
    if isinstance(value, ClientValue):
        return value.then(lambda made: _parsed(parser, made), step="text")
    raise unsupported(
        position, f"StrOutputParser requires a message or text, got {described(value)}"
    )


def _parsed(parser: StrOutputParser, made: Any) -> str:
    if isinstance(made, BaseMessage):
        return parser.parse_result([ChatGeneration(message=made)])
    return parser.parse_result([Generation(text=made)])


def described(value: Value) -> str:
    """Return what a value is, for an error."""
    return VALUE_KINDS[type(value)]
