"""Shapes with functions, parsers, retrievers and generators between calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from langchain_core.output_parsers import CommaSeparatedListOutputParser
from langchain_core.runnables import RunnableGenerator, RunnableLambda, RunnablePassthrough

from conure.adapters.langchain import ChatConure

from .shape import TEXT, Shape, ask, find, halves, join, say_with, shape, shout


def functions(llm: ChatConure) -> dict[str, Shape]:
    say = say_with(llm)
    docs = {"c": RunnableLambda(find) | join, "q": RunnablePassthrough()}
    answer = ask("{c}\n\n{q}") | llm | TEXT

    def upper(chunks: Any) -> Any:
        for chunk in chunks:
            yield chunk.upper()

    async def aupper(chunks: Any) -> AsyncIterator[str]:
        async for chunk in chunks:
            yield chunk.upper()

    return {
        "retrieval": shape(docs | answer, "why", 1),
        "retrieval after rewriting": shape(say | docs | answer, "why", 2),
        "function in the middle": shape(say | shout | say | ask("{z}") | llm, "tea", 3),
        "function at the end": shape(say | shout, "tea", 1),
        "generator at the end": shape(say | RunnableGenerator(upper, aupper), "tea", 1),
        "generator in the middle": shape(say | RunnableGenerator(upper, aupper) | say, "tea", 2),
        "message read by hand": shape(
            ask("{x}") | llm | (lambda message: message.content[::-1]) | say, "tea", 2
        ),
        "two functions between": shape(say | shout | (lambda t: {"x": t}) | say, "tea", 2),
        "tap": shape(say | RunnablePassthrough(cast(Any, shout)) | say, "tea", 2),
        "sql": shape(
            RunnablePassthrough.assign(query=say_with(llm, "SQL for {x}"))
            | RunnablePassthrough.assign(rows=lambda d: [len(d["query"])])
            | ask("{x}: {query} gave {rows}")
            | llm
            | TEXT,
            {"x": "tea"},
            2,
        ),
        "list parser": shape(
            say | CommaSeparatedListOutputParser() | (lambda items: items[0]) | say, "tea", 2
        ),
        "set from a function": shape(
            say | (lambda t: {"x": t, "odd": {1, 2}}) | ask("{x}") | llm, "tea", 2
        ),
        "value that cannot travel": shape(
            say | (lambda t: {t: object()} and [{t}]) | (lambda s: sorted(s[0])[0]) | say, "t", 2
        ),
        "multi-query": shape(
            say
            | halves
            | RunnableLambda(find).map()
            | (lambda found: join([d for each in found for d in each]))
            | say,
            "why",
            2,
        ),
    }
