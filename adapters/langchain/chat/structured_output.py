"""`with_structured_output`: a model whose answers match a schema.

Responsibility: conversion of schemas, and the parsers of answers. The engine enforces the schema
through the model's `response_format` or the schema of a tool.

Invariant: an answer that was cut by its maximum length, or that violates a part of the schema that
is not enforced, is an error, and its text is not repaired. Every other answer matches the JSON
schema. A parser then fails only if a validator of a pydantic class rejects the value or, with
`json_mode`, if a field is missing or invalid. Before such an error, a stream yields the values that
were parsed from the incomplete text.
"""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any, Literal, TypeAlias, cast

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from conure.server.program.ir import Json

from ...cut_answers import cut_message
from .answer_chunks import ALLOW_CUT_ANSWERS, INVALID
from .call_options import check_types, json_schema_of, plain_schema

Method: TypeAlias = Literal["json_schema", "json_mode", "function_calling"]


def structured(
    model: BaseChatModel, schema: Any, method: Method, *, strict: bool | None, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Return a model constrained to a schema, followed by a parser of its answers.

    Args:
        model: accepts `response_format` and `tools`.
        schema: a pydantic class, a TypedDict, a JSON schema, or OpenAI's dict of `name` and
            `schema`.
        method: `json_mode` enforces only that the answer is a JSON object.
        strict: passed to `bind_tools` and to tracers. The engine always enforces the schema. With
            `json_schema`, objects then have only the fields that the schema mentions, as those of
            a class always have.
        include_raw: answer with a dict of `raw`, `parsed` and `parsing_error`.
    """
    if method == "function_calling":
        bound, parser = _tool_call(model, schema, strict=strict)
    else:
        bound, parser = _json_answer(model, schema, method, strict=strict)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _json_answer(
    model: BaseChatModel, schema: Any, method: Method, *, strict: bool | None
) -> tuple[Runnable[LanguageModelInput, Any], BaseOutputParser[Any]]:
    tracing_kwargs: dict[str, Json] = {"method": method}
    if strict is not None:
        tracing_kwargs["strict"] = strict
    response_format: dict[str, Json] = {"type": "json_object"}
    if method == "json_schema":
        json_schema = json_schema_of(schema, strict=bool(strict))
        check_types(json_schema)
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": json_schema.get("title", "answer"), "schema": json_schema},
        }
    bound = model.bind(
        response_format=response_format,
        ls_structured_output_format={"kwargs": tracing_kwargs, "schema": schema},
        **{ALLOW_CUT_ANSWERS: True},
    )
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return bound, CompletePydanticParser(pydantic_object=cast(type[Any], schema))
    return bound, CompleteJsonParser()


def _tool_call(
    model: BaseChatModel, schema: Any, *, strict: bool | None
) -> tuple[Runnable[LanguageModelInput, Any], BaseOutputParser[Any]]:
    tracing = {"kwargs": {"method": "function_calling", "strict": strict}, "schema": schema}
    bound = model.bind_tools(
        [plain_schema(schema)],
        tool_choice="any",
        strict=strict,
        parallel_tool_calls=False,
        ls_structured_output_format=tracing,
        **{ALLOW_CUT_ANSWERS: True},
    )
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return bound, CompleteToolParser(tools=[schema], first_tool_only=True)
    (tool,) = cast(Any, bound).kwargs["tools"]
    key_name = tool["function"]["name"]
    return bound, CompleteToolArgumentsParser(key_name=key_name, first_tool_only=True)


class CompleteJsonParser(JsonOutputParser):
    """Parses JSON that the engine enforced. Raises if the answer was cut."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the value."""
        if not has_ended(result) and partial:
            return super().parse_result(result, partial=True)
        return _parsed(result[0].text)


class CompletePydanticParser(PydanticOutputParser[Any]):
    """Parses JSON of a pydantic class that the engine enforced. Raises if the answer was cut."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the object."""
        if not has_ended(result) and partial:
            return super().parse_result(result, partial=True)
        return self._parse_obj(_parsed(result[0].text))


class CompleteToolParser(PydanticToolsParser):
    """Returns the arguments of a tool call as an object. Raises if the answer was cut."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the object."""
        is_partial = not has_ended(result) and partial
        return super().parse_result(result, partial=is_partial)


class CompleteToolArgumentsParser(JsonOutputKeyToolsParser):
    """Returns the arguments of a tool call. Raises if the answer was cut."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the arguments."""
        is_partial = not has_ended(result) and partial
        return super().parse_result(result, partial=is_partial)


def has_ended(result: list[Generation]) -> bool:
    """Return whether an answer has all of its text; a stream ends with its finish reason.

    Raises:
        OutputParserException: if the answer was cut by its maximum length or violates its schema,
            with the number of tokens or the invalid text, and what to change.
    """
    if not isinstance(result[0], ChatGeneration):
        return True
    message = result[0].message
    reason = message.response_metadata.get("finish_reason")
    if reason == INVALID:
        raise OutputParserException(message.response_metadata["error"], llm_output=message.text)
    if reason == "length":
        usage = getattr(message, "usage_metadata", None) or {}
        raise OutputParserException(
            cut_message(usage.get("output_tokens"), "it was complete"),
            llm_output=message.text,
        )
    return reason is not None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise OutputParserException(
            f"the answer is not JSON: {problem}", llm_output=text
        ) from problem
