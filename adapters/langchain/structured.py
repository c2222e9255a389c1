"""`with_structured_output`: a model that answers with values of a schema.

Knows LangChain's ways to say a schema and to parse an answer. Refuses to know how an
answer is held to it: the model takes a `response_format`, or tools.

Kept true: under `json_schema` and `json_mode` the engine lets nothing else through, so a
parser fails only on an answer that was cut.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Literal, TypeAlias, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from conure.server.program.ir import Json

Method: TypeAlias = Literal["json_schema", "json_mode"]


def structured(
    model: BaseChatModel, schema: Any, method: Method, *, strict: bool | None, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """A model held to a schema, and what reads its answers.

    Args:
        model: takes `response_format`.
        schema: a pydantic class, a TypedDict, or a JSON schema.
        method: `json_mode` holds it to being a JSON object and leaves the rest to the prompt.
        strict: told to tracers; the engine is strict anyway.
        include_raw: answer with `raw`, `parsed` and `parsing_error` instead.
    """
    told: dict[str, Json] = {"method": method}
    if strict is not None:
        told["strict"] = strict
    form: dict[str, Json] = {"type": "json_object"}
    if method == "json_schema":
        wanted = convert_to_json_schema(schema)
        form = {
            "type": "json_schema",
            "json_schema": {"name": wanted.get("title", "answer"), "schema": wanted},
        }
    bound = model.bind(
        response_format=form, ls_structured_output_format={"kwargs": told, "schema": schema}
    )
    parser: BaseOutputParser[Any] = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser(pydantic_object=cast(type[Any], schema))
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")
