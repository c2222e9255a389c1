"""What shapes are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import coerce_to_runnable
from langchain_core.tools import tool

TEXT = StrOutputParser()


class Shape(NamedTuple):
    """One chain."""

    chain: Runnable[Any, Any]
    given: Any
    served: int
    """Of its model calls, those that come from the plan."""
    missed: int = 0
    """Those that were not foreseen."""
    refused: str = ""
    """What says that it is no program, when it is compiled or when it runs; empty: it is one."""


def shape(chain: Any, given: Any, served: int, missed: int = 0, refused: str = "") -> Shape:
    return Shape(coerce_to_runnable(chain), given, served, missed, refused)


def ask(template: str) -> Any:
    return PromptTemplate.from_template(template)


def say_with(llm: Runnable[Any, Any], template: str = "{x}") -> Any:
    return ask(template) | llm | TEXT


def find(query: str) -> list[Document]:
    return [Document(page_content=f"{query} {n}") for n in range(2)]


def join(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def shout(text: str) -> str:
    return text.upper()


def halves(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
