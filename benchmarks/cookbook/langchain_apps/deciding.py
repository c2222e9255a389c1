"""Chains that choose, vote, call tools or check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    chain,
)
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from .kit import TEXT, LangChainApp, LangChainKit, lines, most_common, parts_of

HOW_HOT = {"question": "How hot is tea?"}


class People(BaseModel):
    """Names in a text."""

    names: list[str] = Field(max_length=2)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def router(kit: LangChainKit) -> LangChainApp:
    """Choose between two chains by the model's answer."""
    science, other = kit.ask("As a scientist: {question}"), kit.ask("As a friend: {question}")
    return LangChainApp(
        RunnablePassthrough.assign(kind=kit.ask("Kind of question: {question}"))
        | RunnableBranch((lambda x: "e" in x["kind"], science), other),
        HOW_HOT,
    )


def router_function(kit: LangChainKit) -> LangChainApp:
    """Choose between two chains in a function that returns one of them."""
    science, other = kit.ask("As a scientist: {question}"), kit.ask("As a friend: {question}")

    @chain
    def routed(given: dict[str, Any]) -> Runnable[Any, str]:
        return science if "e" in given["kind"] else other

    return LangChainApp(
        RunnablePassthrough.assign(kind=kit.ask("Kind of question: {question}")) | routed, HOW_HOT
    )


def sql(kit: LangChainKit) -> LangChainApp:
    """Let the model write a query, run it, and answer from the rows."""
    return LangChainApp(
        RunnablePassthrough.assign(query=kit.ask("SQL for {question}"))
        | RunnablePassthrough.assign(rows=lambda x: f"{len(x['query'])} rows")
        | kit.ask("{question} {query} {rows}"),
        HOW_HOT,
    )


def self_consistency(kit: LangChainKit) -> LangChainApp:
    """Answer five times with sampling, and explain the most common answer."""
    votes = RunnableParallel(
        {
            f"vote{n}": ChatPromptTemplate.from_template("Solve {question}")
            | kit.llm.bind(temperature=1.0, seed=n)
            | TEXT
            for n in range(5)
        }
    )
    return LangChainApp(votes | most_common | kit.ask("Explain {answer}"), HOW_HOT)


def tree_of_thoughts(kit: LangChainKit) -> LangChainApp:
    """Score three ideas, and work out the best."""
    scored = RunnableParallel(idea=RunnablePassthrough(), score=kit.ask("Score the idea {idea}"))

    def best(rated: list[dict[str, str]]) -> dict[str, str]:
        return max(rated, key=lambda each: each["score"])

    return LangChainApp(
        kit.ask("Three ideas for {question}")
        | lines
        | scored.map()
        | best
        | kit.ask("Work out {idea}, rated {score}"),
        HOW_HOT,
    )


def moderated(kit: LangChainKit) -> LangChainApp:
    """Answer and check the question at the same time."""

    def checked(given: dict[str, str]) -> str:
        return given["answer"] if "unsafe" not in given["verdict"] else "refused"

    return LangChainApp(
        RunnableParallel(answer=kit.ask("{question}"), verdict=kit.ask("Is {question} safe?"))
        | checked,
        HOW_HOT,
    )


def extraction(kit: LangChainKit) -> LangChainApp:
    """Extract records from the parts of a text."""
    extract = PromptTemplate.from_template("Names in {text}") | kit.llm.with_structured_output(
        People
    )
    return LangChainApp(
        RunnableLambda(parts_of)
        | extract.map()
        | (lambda found: sorted({name for each in found for name in each.names}))
        | (lambda names: {"names": ", ".join(names)})
        | kit.ask("Who are {names}?"),
        "Ann met Bob and Carl near the tea house",
    )


def tools(kit: LangChainKit) -> LangChainApp:
    """Let the model call a tool, and answer from its result."""

    def use_tools(given: dict[str, Any]) -> list[BaseMessage]:
        answer: AIMessage = given["answer"]
        done = [
            ToolMessage(str(multiply.invoke(call["args"])), tool_call_id=call["id"] or "")
            for call in answer.tool_calls
        ]
        return [HumanMessage(given["question"]), answer, *done]

    return LangChainApp(
        RunnablePassthrough.assign(
            answer=ChatPromptTemplate.from_template("{question}")
            | kit.llm.bind_tools([multiply], tool_choice="multiply")
        )
        | use_tools
        | kit.llm
        | TEXT,
        HOW_HOT,
    )


def memory(kit: LangChainKit) -> LangChainApp:
    """Answer with the last messages of a conversation."""
    prompt = ChatPromptTemplate.from_messages(
        [
            SystemMessage("You talk about tea."),
            MessagesPlaceholder("history"),
            ("human", "{question}"),
        ]
    )
    return LangChainApp(
        RunnablePassthrough.assign(history=lambda x: x["history"][-2:]) | prompt | kit.llm | TEXT,
        {**HOW_HOT, "history": [HumanMessage(str(n)) for n in range(4)]},
    )


def fallback(kit: LangChainKit) -> LangChainApp:
    """Use a second store if the first is down."""

    def failing(_: Any) -> str:
        raise ValueError("the first store is down")

    spare = RunnableLambda(failing).with_fallbacks([RunnableLambda(lambda _: "spare")])
    counted: Callable[[Any], dict[str, str]] = lambda text: {"count": str(len(text))}  # noqa: E731
    return LangChainApp(
        RunnablePassthrough.assign(context=spare)
        | kit.ask("{context}: {question}")
        | counted
        | kit.ask("Comment on {count} letters"),
        HOW_HOT,
    )


DECIDING_APPS = (
    router,
    router_function,
    sql,
    self_consistency,
    tree_of_thoughts,
    moderated,
    extraction,
    tools,
    memory,
    fallback,
)
