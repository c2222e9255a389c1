"""Shapes that only combine calls: sequences, parallel steps, nesting."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.runnables import RunnableParallel, RunnablePassthrough, RunnablePick

from conure.adapters.langchain import ChatConure

from .shape import TEXT, Shape, ask, say_with, shape


def compositions(llm: ChatConure) -> dict[str, Shape]:
    say = say_with(llm)
    pair: Any = RunnableParallel(a=say_with(llm, "a {x}"), b=say_with(llm, "b {x}"))
    wide: Any = RunnableParallel({f"n{n}": say_with(llm, f"{n} {{x}}") for n in range(12)})
    keys = "".join(f"{{n{n}}}" for n in range(12))
    tea = {"x": "tea"}
    return {
        "model alone": shape(llm, "tea", 1),
        "prompt and model": shape(ask("{x}") | llm, tea, 1),
        "prompt, model, text": shape(say, tea, 1),
        "chain of five": shape(say | say | say | say | say, tea, 5),
        "refine": shape(
            RunnablePassthrough.assign(draft=say_with(llm, "draft {x}"))
            | RunnablePassthrough.assign(critique=say_with(llm, "criticise {draft}"))
            | ask("{x}: improve {draft} by {critique}")
            | llm
            | TEXT,
            tea,
            3,
        ),
        "parallel": shape(pair, tea, 2),
        "parallel and join": shape(pair | ask("{a} {b}") | llm | TEXT, tea, 3),
        "nested parallel": shape(
            RunnableParallel(p=pair | ask("{a}{b}") | llm | TEXT, q=pair | ask("{b}") | llm | TEXT)
            | ask("{p} {q}")
            | llm,
            tea,
            7,
        ),
        "wide and join": shape(wide | ask(keys) | llm | TEXT, tea, 13),
        "skeleton of thought": shape(
            RunnablePassthrough.assign(plan=say_with(llm, "skeleton of {x}"))
            | RunnableParallel(
                one=ask("point 1 of {plan}") | llm | TEXT,
                two=ask("point 2 of {plan}") | llm | TEXT,
            )
            | ask("{one}\n{two}")
            | llm,
            tea,
            4,
        ),
        "assign and pick": shape(
            RunnablePassthrough.assign(y=say) | RunnablePick("y") | ask("{y}!") | llm, tea, 2
        ),
        "pick many": shape(
            RunnablePassthrough.assign(y=say, z=say_with(llm, "z {x}"))
            | RunnablePick(["y", "z"])
            | ask("{y}{z}")
            | llm,
            tea,
            3,
        ),
        "itemgetters": shape(
            {"x": itemgetter("q"), "y": itemgetter("q") | say} | ask("{x} {y}") | llm,
            {"q": "tea"},
            2,
        ),
        "same prompt twice": shape({"a": say, "b": say} | ask("{a}{b}") | llm, tea, 3),
        "dict in a prompt": shape(
            {"d": RunnableParallel(a=say)} | ask("{d}") | llm, {"x": "it's"}, 2
        ),
    }
