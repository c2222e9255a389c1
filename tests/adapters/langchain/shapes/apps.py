"""Combined patterns of apps."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import JsonOutputToolsParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import (
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)

from conure.adapters.langchain import ChatConure

from .shape import TEXT, Shape, add, ask, find, join, say_with, shape


def steps(text: str) -> list[dict[str, str]]:
    return [{"step": word} for word in text.split()[:3]]


def drafts(text: str) -> list[dict[str, Any]]:
    return [{"text": text}, {"text": text * 2}]


def apps(llm: ChatConure) -> dict[str, Shape]:
    say = say_with(llm)
    turn = ChatPromptTemplate.from_messages(
        [("system", "Use:\n{context}"), MessagesPlaceholder("history"), ("human", "{input}")]
    )
    standalone = RunnableBranch(
        (lambda d: not d["history"], RunnableLambda(itemgetter("input"))),
        say_with(llm, "{history} {input} alone"),
    )
    rated = RunnablePassthrough.assign(
        score=say_with(llm.bind(constraint={"regex": "[0-9]"}), "Rate {text}") | RunnableLambda(int)
    )
    tried = RunnableParallel(
        {f"try{n}": ask("{x}") | llm.bind(temperature=1.0, seed=n) | TEXT for n in range(3)}
    )
    return {
        "answers that vote": shape(
            tried | (lambda d: max(sorted(d.values()), key=list(d.values()).count)) | say, "tea", 4
        ),
        "retrieval with a memory": shape(
            RunnablePassthrough.assign(context=standalone | find | join) | turn | llm | TEXT,
            {"input": "why", "history": [HumanMessage("hi"), AIMessage("ho")]},
            2,
        ),
        "retrieval with an empty memory": shape(
            RunnablePassthrough.assign(context=standalone | find | join) | turn | llm | TEXT,
            {"input": "why", "history": []},
            1,
        ),
        "plan and execute": shape(
            RunnablePassthrough.assign(steps=say_with(llm, "plan {x}") | steps)
            | RunnablePassthrough.assign(
                done=itemgetter("steps") | say_with(llm, "do {step}").map() | ", ".join
            )
            | ask("{x}: {done}")
            | llm,
            {"x": "tea"},
            4,
        ),
        "map and rank": shape(
            RunnableLambda(drafts)
            | rated.map()
            | (lambda found: max(found, key=lambda each: each["score"])["text"])
            | say,
            "tea",
            3,
        ),
        "guard in parallel": shape(
            RunnableParallel(
                answer=say,
                safe=ask("Safe? {x}") | llm.bind(constraint={"choices": ["yes", "no"]}) | TEXT,
            )
            | RunnableBranch((lambda d: d["safe"] == "yes", itemgetter("answer")), lambda d: "?")
            | say,
            {"x": "tea"},
            3,
        ),
        "tools and their results": shape(
            ask("{x}")
            | llm.bind_tools([add], tool_choice="add")
            | JsonOutputToolsParser(first_tool_only=True)
            | itemgetter("args")
            | str
            | say,
            "tea",
            2,
        ),
    }
