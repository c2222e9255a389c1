"""Shapes with model options: bound arguments, schemas, tools, other models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.runnables import ConfigurableField
from pydantic import BaseModel

from conure.adapters.langchain import ChatConure

from .shape import TEXT, Shape, add, ask, say_with, shape


class City(BaseModel):
    """A city."""

    name: str
    size: int


def models(llm: ChatConure) -> dict[str, Shape]:
    say = say_with(llm)
    other = FakeListChatModel(responses=["fake"])
    choose: Callable[..., Any] = ConfigurableField
    return {
        "bound stop": shape(ask("{x}") | llm.bind(stop=["a"]) | TEXT | say, "tea", 2),
        "bound model": shape(ask("{x}") | llm.bind(model="fake") | TEXT | say, "tea", 2),
        "named": shape(say.with_config(run_name="Say", tags=["t"]) | say, "tea", 2),
        "listener": shape(
            say.with_listeners(on_end=lambda run: None) | say,
            "tea",
            2,
            refused="listeners are not called",
        ),
        "another model between": shape(say | other | TEXT | say, "tea", 2),
        "json": shape(
            ask("city {x}")
            | llm.with_structured_output(City.model_json_schema())
            | ask("{name} has {size}")
            | llm,
            "tea",
            2,
        ),
        "json mode": shape(
            ask("{x}") | llm.bind(constraint={"regex": r"\{\}"}) | JsonOutputParser(), "tea", 1
        ),
        "pydantic": shape(
            ask("city {x}")
            | llm.with_structured_output(City)
            | (lambda city: city.name)
            | ask("{n}")
            | llm,
            "tea",
            2,
        ),
        "include raw": shape(
            ask("city {x}") | llm.with_structured_output(City, include_raw=True),
            "tea",
            1,
        ),
        "tools": shape(
            ask("{x}")
            | llm.bind_tools([add], tool_choice="add")
            | (lambda message: str(message.tool_calls[0]["name"]))
            | say,
            "tea",
            2,
        ),
        "choices": shape(
            ask("{x}") | llm.bind(constraint={"choices": ["yes", "no"]}) | TEXT | say, "tea", 2
        ),
        "configurable": shape(
            ask("{x}") | llm.configurable_fields(temperature=choose(id="t")) | TEXT | say,
            "tea",
            2,
        ),
    }
