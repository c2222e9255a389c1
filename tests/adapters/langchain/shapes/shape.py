"""The `Shape` record, and parts of shapes."""

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
    """A chain with an input and the expected result of planning."""

    chain: Runnable[Any, Any]
    given: Any
    served: int
    """Number of model calls that are served from the plan."""
    missed: int = 0
    """Number of model calls that are not planned."""
    refused: str = ""
    """Part of the error when it is compiled or run as a program; empty if it succeeds."""


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
