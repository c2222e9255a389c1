"""Shapes with control flow: branches, routers, maps, fallbacks, retries."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableBranch, RunnableLambda, RunnablePassthrough
from langchain_core.runnables.router import RouterRunnable

from conure.adapters.langchain import ChatConure

from .shape import TEXT, Shape, ask, halves, say_with, shape, shout


def called(llm: ChatConure) -> Callable[[str], Any]:
    def call(text: str) -> Any:
        return llm.invoke(text).content

    return call


def broken_json(message: AIMessage) -> Any:
    return json.loads(f"{{{message.content}")


def decisions(llm: ChatConure) -> dict[str, Shape]:
    say = say_with(llm)
    long = say_with(llm, "long {x}") | ask("{y}") | llm | TEXT
    branch: Any = RunnableBranch((lambda d: len(d["x"]) > 3, long), say_with(llm, "short {x}"))
    router = RouterRunnable({"tea": say, "sea": say_with(llm, "sea {x}")})
    fails = ask("{x}") | llm | broken_json
    return {
        "branch taken": shape(branch, {"x": "coffee"}, 2),
        "branch not taken": shape(branch | ask("{z}") | llm, {"x": "tea"}, 2),
        "branch on an answer": shape(
            RunnablePassthrough.assign(kind=say)
            | RunnableBranch(
                (lambda d: "a" in d["kind"], say_with(llm, "A {kind}") | ask("{y}") | llm), say
            ),
            {"x": "tea"},
            3,
        ),
        "map": shape((lambda d: [d, d + "!", d * 2]) | say.map(), "tea", 3),
        "map and reduce": shape(halves | say.map() | ", ".join | say, "lemonade", 3),
        "map of a chain with a function": shape(
            halves | (say | shout | say).map() | ", ".join | say, "lemonade", 5
        ),
        "map of messages": shape(RunnableLambda(halves) | (ask("{x}") | llm).map(), "lemonade", 2),
        "fallback not needed": shape(
            (say | ask("{y}") | llm).with_fallbacks([say_with(llm, "other {x}")]) | TEXT | say,
            "tea",
            3,
        ),
        "fallback": shape(
            fails.with_fallbacks([say_with(llm, "other {x}")]) | say, {"x": "tea"}, 3
        ),
        "retry": shape((say | shout).with_retry(stop_after_attempt=2) | say, "tea", 2),
        "router": shape(router | say, {"key": "sea", "input": "x"}, 2),
        "chain made in a function": shape(
            RunnableLambda(lambda x: (say | say) if x else llm) | say,
            "tea",
            3,
        ),
        "model called in a function": shape(RunnableLambda(called(llm)) | say, "tea", 1, 1),
        "skip": shape(RunnablePassthrough() | say, "tea", 1),
    }
