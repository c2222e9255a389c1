"""Chains that write in several steps."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import CommaSeparatedListOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough

from .kit import LangChainApp, LangChainKit, lines, text_of

CHAPTERS = {"documents": [Document(page_content=f"chapter {n} of the book") for n in range(4)]}
TOPIC = {"topic": "tea"}


def map_reduce(kit: LangChainKit) -> LangChainApp:
    """Summarise documents, then the summaries."""
    summary: Runnable[Any, str] = RunnableLambda(text_of) | kit.ask("Summarise {text}")
    return LangChainApp(
        itemgetter("documents")
        | summary.map()
        | "\n".join
        | kit.ask("Combine the summaries: {texts}"),
        CHAPTERS,
    )


def refine(kit: LangChainKit) -> LangChainApp:
    """Improve a draft with one document after the other, in a function."""
    step = kit.ask("Improve {draft} with {text}")

    def refined(given: dict[str, Any]) -> str:
        draft = ""
        for document in given["documents"][:3]:
            draft = step.invoke({"draft": draft, "text": document.page_content})
        return draft

    async def arefined(given: dict[str, Any]) -> str:
        draft = ""
        for document in given["documents"][:3]:
            draft = await step.ainvoke({"draft": draft, "text": document.page_content})
        return draft

    return LangChainApp(RunnableLambda(refined, arefined) | kit.ask("Title for {text}"), CHAPTERS)


def chain_of_density(kit: LangChainKit) -> LangChainApp:
    """Make a summary denser three times."""
    density: Runnable[Any, Any] = RunnablePassthrough.assign(draft=kit.ask("Summarise {text}"))
    for _ in range(3):
        density = density.assign(draft=kit.ask("Make {draft} denser, about {text}"))
    return LangChainApp(density | itemgetter("draft"), {"text": "tea in Japan"})


def critique_and_revise(kit: LangChainKit) -> LangChainApp:
    """Write, criticise and write again."""
    return LangChainApp(
        RunnablePassthrough.assign(draft=kit.ask("Write about {topic}"))
        .assign(critique=kit.ask("Criticise {draft}"))
        .assign(final=kit.ask("Rewrite {draft} by {critique}"))
        .pick("final"),
        TOPIC,
    )


def translations(kit: LangChainKit) -> LangChainApp:
    """Translate to three languages, and compare."""
    languages = RunnableParallel(
        {name: kit.ask(f"Translate to {name}: {{text}}") for name in ("French", "German", "Dutch")}
    )
    return LangChainApp(
        languages | kit.ask("Compare {French}, {German} and {Dutch}"), {"text": "good tea"}
    )


def joined(texts: list[str]) -> str:
    """Return texts as paragraphs."""
    return "\n\n".join(texts)


def blog(kit: LangChainKit) -> LangChainApp:
    """Outline, write every section, and edit the whole."""
    sections: Runnable[Any, str] = (
        itemgetter("outline")
        | RunnableLambda(lines)
        | kit.ask("Write the section {heading}").map()
        | RunnableLambda(joined)
    )
    return LangChainApp(
        RunnablePassthrough.assign(outline=kit.ask("Outline {topic}"))
        | RunnablePassthrough.assign(sections=sections)
        | kit.ask("Edit {sections} about {topic}"),
        TOPIC,
    )


def debate(kit: LangChainKit) -> LangChainApp:
    """Let two sides answer each other, and judge."""
    topic = itemgetter("topic")
    sides = RunnableParallel(
        pro=kit.ask("For {topic}"), con=kit.ask("Against {topic}"), topic=topic
    )
    rebuttals = RunnableParallel(
        pro=kit.ask("Answer {con} for {topic}"),
        con=kit.ask("Answer {pro} against {topic}"),
        topic=topic,
    )
    return LangChainApp(sides | rebuttals | kit.ask("Judge {pro} against {con}"), TOPIC)


def minutes(kit: LangChainKit) -> LangChainApp:
    """Read the minutes of a meeting in four respects."""
    read = RunnableParallel(
        summary=kit.ask("Summarise the meeting: {text}"),
        actions=kit.ask("List the actions of: {text}"),
        decisions=kit.ask("List the decisions of: {text}"),
        risks=kit.ask("List the risks of: {text}"),
    )
    return LangChainApp(
        read | kit.ask("Mail with {summary}, {actions}, {decisions} and {risks}"),
        {"text": "we met about tea"},
    )


def poem_and_review(kit: LangChainKit) -> LangChainApp:
    """Write two texts, and two texts about both."""
    return LangChainApp(
        RunnableParallel(poem=kit.ask("Poem on {topic}"), joke=kit.ask("Joke on {topic}"))
        | RunnableParallel(
            best=kit.ask("Better of {poem} and {joke}"), mix=kit.ask("Mix {poem} and {joke}")
        )
        | kit.ask("Publish {best} or {mix}"),
        TOPIC,
    )


def titles(kit: LangChainKit) -> LangChainApp:
    """Choose from a list of the model."""
    return LangChainApp(
        kit.ask("Five titles for {topic}, with commas")
        | CommaSeparatedListOutputParser()
        | (lambda titles: {"titles": " / ".join(titles)})
        | kit.ask("Best of {titles}"),
        TOPIC,
    )


WRITING_APPS = (
    map_reduce,
    refine,
    chain_of_density,
    critique_and_revise,
    translations,
    blog,
    debate,
    minutes,
    poem_and_review,
    titles,
)
