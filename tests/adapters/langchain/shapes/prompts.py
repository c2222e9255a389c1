"""Shapes with prompts: histories, examples, partials, template languages."""

from __future__ import annotations

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import RunnablePassthrough

from conure.adapters.langchain import ChatConure

from .shape import TEXT, Shape, ask, shape


def prompts(llm: ChatConure) -> dict[str, Shape]:
    chat = ChatPromptTemplate.from_messages(
        [("system", "You {mood}."), MessagesPlaceholder("history"), ("human", "{x}")]
    )
    few = FewShotPromptTemplate(
        examples=[{"q": "1", "a": "2"}],
        example_prompt=ask("{q}:{a}"),
        prefix="Go",
        suffix="{x}:",
        input_variables=["x"],
    )
    history = [HumanMessage("hi"), AIMessage("ho")]
    given = {"x": "tea", "history": history, "mood": "sing"}
    return {
        "history": shape(chat | llm | TEXT, given, 1),
        "history and rewriting": shape(
            RunnablePassthrough.assign(x=chat | llm | TEXT) | chat | llm | TEXT, given, 2
        ),
        "partial": shape(chat.partial(mood="hum") | llm, {"x": "a", "history": []}, 1),
        "few-shot": shape(few | llm | TEXT | ask("{y}") | llm, {"x": "3"}, 2),
        "mustache": shape(
            PromptTemplate.from_template("{{x}}", template_format="mustache") | llm | TEXT,
            {"x": "tea"},
            1,
        ),
        "bare value": shape(ask("{x}") | llm | TEXT | ask("again {y}") | llm, "tea", 2),
        "messages by hand": shape(
            (lambda x: [SystemMessage("s"), HumanMessage(x)]) | llm | TEXT, "tea", 1
        ),
    }
