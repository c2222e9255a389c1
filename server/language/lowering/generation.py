"""Lowering of LLM calls: `llm_chat(model, messages, ...)` and `gen(prompt, ...)`.

Responsibility: the options of a call, and the structure of its prompt. Lists of messages that the
text writes out become messages and segments; any other list is spliced.
"""

from __future__ import annotations

import ast
from typing import Any, Final

from msgspec import UNSET

from ...program.content import Constraint, Expression, Json, Message, Output, Segment
from ...program.ir import GenerateNode
from ..errors import Place, SourceArgumentError
from ..options import (
    TOOL_FIELDS,
    TYPE_OPTIONS,
    CallOptions,
    Kind,
    check_option,
    check_option_value,
    read_options,
)
from .interfaces import Lowerer
from .scope import NameScope
from .values import Value, text_of, var

_MESSAGE_FIELDS: Final = frozenset({"role", "content", "name", "tool_call_id"})
_TYPE_NAMES: Final = frozenset({"str", "int", "float", "bool", "list"})
_SCALARS: Final = frozenset({"array", "boolean", "integer", "null", "number", "string"})
"""The types of a JSON schema whose values have no fields."""
_SPECIAL_STARTS = ("<", "[")
"""Characters that control tokens start with."""


def _options_of(lowerer: Lowerer, node: ast.Call, scope: NameScope, *known: str) -> dict[str, Json]:
    """Return the keyword arguments of a call, except `known` ones, as constants."""
    options: dict[str, Json] = {}
    for keyword in node.keywords:
        name = keyword.arg
        if name is None:
            message = "`**` is not supported: write the options"
            raise SourceArgumentError("language.argument", message, keyword.value)
        if name in known:
            continue
        check_option(name, keyword.value)
        options[name] = option_value(lowerer, name, keyword.value, scope)
    return options


def option_value(lowerer: Lowerer, name: str, node: ast.expr, scope: NameScope) -> Json:
    """Return the value of an option, which must be a constant or, as `type=int`, a type.

    Raises:
        SourceArgumentError: `language.constant`, or `language.argument` for a wrong value.
    """
    if name in TYPE_OPTIONS and type(node) is ast.Name and node.id in _TYPE_NAMES:
        return node.id
    value = lowerer.constant(node, scope, f"`{name}`")
    check_option_value(name, value, node)
    return value


# --- calls ------------------------------------------------------------------------------------


def lower_llm_chat(
    lowerer: Lowerer,
    node: ast.Call,
    scope: NameScope,
    hint: str | None,
    *,
    is_text: bool = False,
) -> Value:
    """Lower `llm_chat(model, messages, ...)` or `llm_chat(messages, ...)`.

    Args:
        lowerer: lowerer of the text.
        node: the call.
        scope: the names it can read.
        hint: the variable for its value.
        is_text: the value is the text of the answer, not the message.
    """
    by_name = {each.arg: each.value for each in node.keywords if each.arg is not None}
    arguments = list(node.args)
    messages = by_name.get("messages") or (arguments.pop() if arguments else None)
    model = by_name.get("model") or (arguments.pop() if arguments else None)
    if messages is None or arguments:
        message = "write `llm_chat(model, messages)` or `llm_chat(messages)`"
        raise SourceArgumentError("language.argument", message, node)
    options = _options_of(lowerer, node, scope, "model", "messages")
    read = read_options(options, node)
    given = lowerer.lower(messages, scope)
    emitter = lowerer.emitter
    is_message = (read.kind == "any" and not read.is_stream) and "constraint" not in read.output
    is_message = "tools" in read.node or (is_message and not is_text)
    # The text of a message is the value of another node, which has the given name.
    variable = (None if is_message and is_text else hint) or emitter.unique("answer")
    output: dict[str, Any] = {**read.output, "variable": variable}
    if is_message:
        output["form"] = "message"
    emitter.add(
        GenerateNode(
            id=variable,
            messages=messages_of(lowerer, given, messages),
            output=Output(**output),
            **_model(lowerer, model, scope),
            **(emitter.common() | read.node),
        )
    )
    kind = _value_kind(read, is_message=is_message)
    if kind == "any" and "constraint" not in read.output:
        kind = "text"
    is_json = not is_message and kind not in ("text", "stream")
    return Value({"var": variable}, kind, is_answer=is_json and not _may_have_content(read))


def _may_have_content(options: CallOptions) -> bool:
    """Whether a schema allows a field `content` or `context`; True if that is not certain."""
    constraint = options.output.get("constraint")
    schema = constraint.json_schema if isinstance(constraint, Constraint) else UNSET
    if schema is UNSET or _has_no_fields(schema):
        return False
    fields = schema.get("properties") if isinstance(schema, dict) else None
    return not isinstance(fields, dict) or not fields.keys().isdisjoint(("content", "context"))


def _has_no_fields(schema: Json) -> bool:
    """Whether a schema has a type, or several, whose values have no fields."""
    types = schema.get("type") if isinstance(schema, dict) else None
    names = types if isinstance(types, list) else [types]
    return bool(names) and all(isinstance(each, str) and each in _SCALARS for each in names)


def _value_kind(options: CallOptions, *, is_message: bool) -> Kind:
    if is_message:
        return "message"
    if options.is_stream:
        return "stream"
    return options.kind


def lower_gen(lowerer: Lowerer, node: ast.Call, scope: NameScope, hint: str | None) -> Value:
    """Lower `gen(prompt, ...)`: a text that continues a prompt, without a chat template."""
    by_name = {each.arg: each.value for each in node.keywords if each.arg is not None}
    arguments = list(node.args)
    prompt = by_name.get("prompt") or (arguments.pop(0) if arguments else None)
    if prompt is None or arguments:
        message = "write `gen(prompt, max_tokens=..., ...)`"
        raise SourceArgumentError("language.argument", message, node)
    read = read_options(_options_of(lowerer, node, scope, "prompt", "model"), node)
    if TOOL_FIELDS & read.node.keys():
        message = "tools need a chat template: use `llm_chat`"
        raise SourceArgumentError("language.argument", message, node)
    segments = prompt_segments(lowerer.text(prompt, scope))
    variable = hint or lowerer.emitter.unique("text")
    segments.append(Segment(output=variable, **read.output))
    lowerer.emitter.add(
        GenerateNode(
            id=variable,
            prompt=segments,
            **_model(lowerer, by_name.get("model"), scope),
            **(lowerer.emitter.common() | read.node),
        )
    )
    if read.is_stream:
        return var(variable, "stream")
    return var(variable, read.output_kind)


def _model(lowerer: Lowerer, node: ast.expr | None, scope: NameScope) -> dict[str, Any]:
    if node is None:
        return {}
    model = lowerer.constant(node, scope, "the model")
    is_name = isinstance(model, str) and model
    is_list = isinstance(model, list) and model and all(isinstance(each, str) for each in model)
    if not is_name and not is_list:
        message = "a model is a name, or a list of names of which any will do"
        raise SourceArgumentError("language.argument", message, node)
    return {} if model == "default" else {"model": model}


# --- prompts ----------------------------------------------------------------------------------


def prompt_segments(expression: Expression) -> list[Segment]:
    """Return the segments of a text outside of a chat template.

    Only the literal text of the program can yield control tokens.
    """
    segments = []
    for operand in _text_operands(expression):
        if isinstance(operand, str):
            is_special = any(start in operand for start in _SPECIAL_STARTS)
            segments.append(Segment(text=operand, special=is_special))
        else:
            segments.append(_input(operand))
    return segments


def messages_of(lowerer: Lowerer, value: Value, place: Place) -> list[Message]:
    """Return the messages of a call.

    Raises:
        SourceArgumentError: `language.type` for a value that cannot be a list of messages.
    """
    if value.kind in ("text", "stream"):
        return [_message({"role": "user", "content": text_of(value).expression}, lowerer)]
    if value.kind not in ("list", "any"):
        message = f"messages must be a list, got {value.kind}: write [user('...')]"
        raise SourceArgumentError("language.type", message, place)
    messages = []
    for part in _list_parts(value.expression):
        if isinstance(part, dict) and "object" in part and _is_plain(part["object"]):
            messages.append(_message(part["object"], lowerer))
        elif isinstance(part, dict):
            name = part.get("var") or lowerer.emitter.expr(part, "messages")
            messages.append(Message(splice=name))
        else:
            message = "an element of a list of messages must be a message: write user('...')"
            raise SourceArgumentError("language.type", message, place)
    return messages


def _list_parts(expression: Expression) -> list[Expression]:
    """Return the elements of a list, or the lists that it concatenates."""
    if isinstance(expression, list):
        return expression
    if isinstance(expression, dict) and "concat" in expression:
        return [part for operand in expression["concat"] for part in _list_parts(operand)]
    return [expression]


def _is_plain(fields: dict[str, Expression]) -> bool:
    """Whether a dict is a message whose fields other than its content are literals."""
    return fields.keys() <= _MESSAGE_FIELDS and all(
        isinstance(fields[name], str) for name in fields if name != "content"
    )


def _message(fields: dict[str, Expression], lowerer: Lowerer) -> Message:
    known: dict[str, Any] = {name: each for name, each in fields.items() if name != "content"}
    if "content" not in fields:
        return Message(**known)
    content = fields["content"]
    if content is None:
        return Message(content=None, **known)
    operands = _text_operands(content)
    if all(isinstance(each, str) for each in operands):
        return Message(content="".join(operands), **known)
    segments = [Segment(text=each) if isinstance(each, str) else _input(each) for each in operands]
    return Message(content=segments, **known)


def _text_operands(expression: Expression) -> list[Expression]:
    """Return the parts of a text, with adjacent literals joined."""
    operands: list[Expression] = [expression]
    if isinstance(expression, dict):
        if "concat" in expression:
            operands = list(expression["concat"])
        elif "join" in expression and expression["join"][1] == "":
            items = expression["join"][0]
            operands = list(items) if isinstance(items, list) else operands
    joined: list[Expression] = []
    for operand in operands:
        if isinstance(operand, str) and joined and isinstance(joined[-1], str):
            joined[-1] += operand
        elif operand != "" or len(operands) == 1:
            joined.append(operand)
    return joined


def _input(expression: Expression) -> Segment:
    if isinstance(expression, dict) and "var" in expression:
        return Segment(input=expression["var"])
    return Segment(input=expression)
