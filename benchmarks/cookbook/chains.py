"""Thirty LangChain apps in the patterns of public cookbooks, in code of our own.

`cookbook(llm)` returns each as a chain with an input. All code beside the model is deterministic,
so a chain has the same result however it is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    StrOutputParser,
)
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    chain,
)
from langchain_core.runnables.base import coerce_to_runnable
from langchain_core.tools import tool
from pydantic import BaseModel, Field

TEXT = StrOutputParser()


class App(NamedTuple):
    """A chain and its input."""

    chain: Runnable[Any, Any]
    given: Any


class Query(BaseModel):
    """A search."""

    topic: str = Field(max_length=8)
    year: int = Field(ge=2000, le=2030)


class People(BaseModel):
    """Names in a text."""

    names: list[str] = Field(max_length=2)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def search(query: str) -> list[Document]:
    """Stand in for a vector store."""
    words = query.split()[:2] or ["empty"]
    return [
        Document(page_content=f"about {w}", metadata={"source": i}) for i, w in enumerate(words)
    ]


def as_text(documents: Sequence[Document]) -> str:
    """Join the texts of documents."""
    return "\n\n".join(document.page_content for document in documents)


def text_of(document: Document) -> dict[str, str]:
    """Return the variables of a prompt about a document."""
    return {"text": document.page_content}


def parts_of(text: str) -> list[dict[str, str]]:
    """Return the variables of prompts about the parts of a text."""
    return [{"text": part} for part in lines(text)]


def with_context(part: str) -> dict[str, str]:
    """Return the variables of an answer to a part of a question."""
    return {"context": as_text(search(part)), "question": part}


def lines(text: str) -> list[str]:
    """Split a text into three parts, as lines of an answer."""
    words = text.split()
    return [" ".join(words[i::3]) or "nothing" for i in range(3)]


def unique(found: list[list[Document]]) -> list[Document]:
    """Return the documents of several searches once."""
    return list({doc.page_content: doc for docs in found for doc in docs}.values())


def fused(found: list[list[Document]]) -> list[Document]:
    """Rank the documents of several searches by reciprocal ranks."""
    scores: Counter[str] = Counter()
    by_text = {doc.page_content: doc for docs in found for doc in docs}
    for docs in found:
        for rank, doc in enumerate(docs):
            scores[doc.page_content] += 1000 // (rank + 60)
    return [by_text[text] for text, _ in sorted(scores.items(), key=lambda x: (-x[1], x[0]))][:3]


def most_common(answers: dict[str, str]) -> str:
    """Return the answer that most branches gave."""
    return Counter(sorted(answers.values())).most_common(1)[0][0]


class Kit:
    """Prompts of one model."""

    def __init__(self, llm: BaseChatModel) -> None:
        self.llm = llm

    def ask(self, template: str, system: str = "") -> Runnable[Any, str]:
        """Return a prompt, the model and a text parser."""
        messages = ([("system", system)] if system else []) + [("human", template)]
        return ChatPromptTemplate.from_messages(messages) | self.llm | TEXT


def retrieval_apps(kit: Kit) -> dict[str, App]:
    """Return apps that search before they answer."""
    ask, retriever = kit.ask, RunnableLambda(search)
    answer = ask("Context: {context}\nQuestion: {question}", "Answer from the context.")
    condense = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("history"), ("human", "{question}"), ("human", "Ask it alone.")]
    )
    queries = ask("Three searches for: {question}") | lines
    examples = FewShotChatMessagePromptTemplate(
        examples=[{"input": "Was tea taxed in Boston?", "output": "What taxes did Boston have?"}],
        example_prompt=ChatPromptTemplate.from_messages([("human", "{input}"), ("ai", "{output}")]),
    )
    step_back = (
        ChatPromptTemplate.from_messages(
            [("system", "Step back."), examples, ("human", "{question}")]
        )
        | kit.llm
        | TEXT
    )
    history = [HumanMessage("What is oolong?"), AIMessage("A tea.")]
    structured = kit.llm.with_structured_output(Query)
    question = {"question": "How is green tea made?"}
    return {
        "rag": App(
            {"context": retriever | as_text, "question": RunnablePassthrough()} | answer,
            "How is tea made?",
        ),
        "rag_with_sources": App(
            RunnableParallel(context=retriever, question=RunnablePassthrough()).assign(
                answer=RunnablePassthrough.assign(context=lambda x: as_text(x["context"])) | answer
            ),
            "How is tea made?",
        ),
        "conversational_rag": App(
            RunnablePassthrough.assign(question=condense | kit.llm | TEXT)
            | RunnablePassthrough.assign(context=itemgetter("question") | retriever | as_text)
            | answer,
            {"question": "How is it made?", "history": history},
        ),
        "multi_query": App(
            RunnablePassthrough.assign(context=queries | retriever.map() | unique | as_text)
            | answer,
            question,
        ),
        "rag_fusion": App(
            {
                "context": queries | retriever.map() | fused | as_text,
                "question": itemgetter("question"),
            }
            | answer,
            question,
        ),
        "hyde": App(
            RunnablePassthrough.assign(
                context=ask("Write a passage that answers: {question}") | retriever | as_text
            )
            | answer,
            question,
        ),
        "step_back": App(
            {
                "normal": itemgetter("question") | retriever | as_text,
                "general": step_back | retriever | as_text,
                "question": itemgetter("question"),
            }
            | ask("{normal}\n{general}\nAnswer: {question}"),
            question,
        ),
        "decomposition": App(
            RunnablePassthrough.assign(parts=queries)
            | RunnablePassthrough.assign(
                context=itemgetter("parts")
                | RunnableLambda(with_context).pipe(answer).map()
                | "\n".join
            )
            | answer,
            question,
        ),
        "self_query": App(
            RunnablePassthrough.assign(
                context=PromptTemplate.from_template("Filter for {question}")
                | structured
                | (lambda query: as_text(search(f"{query.topic} {query.year}")))
            )
            | answer,
            question,
        ),
        "rerank": App(
            RunnablePassthrough.assign(documents=itemgetter("question") | retriever)
            | RunnablePassthrough.assign(
                scores=itemgetter("documents")
                | RunnableLambda(text_of).pipe(ask("Rate {text}")).map()
            )
            | RunnablePassthrough.assign(
                context=lambda x: max(
                    (score, doc.page_content)
                    for score, doc in zip(x["scores"], x["documents"], strict=True)
                )[1]
            )
            | answer,
            question,
        ),
    }


def writing_apps(kit: Kit) -> dict[str, App]:
    """Return apps that write in several steps."""
    ask = kit.ask
    documents = [Document(page_content=f"chapter {n} of the book") for n in range(4)]
    summary: Runnable[Any, str] = RunnableLambda(text_of) | ask("Summarise {text}")

    def refine(given: dict[str, Any]) -> str:
        step = ask("Improve {draft} with {text}")
        draft = ""
        for document in given["documents"][:3]:
            draft = step.invoke({"draft": draft, "text": document.page_content})
        return draft

    async def arefine(given: dict[str, Any]) -> str:
        step = ask("Improve {draft} with {text}")
        draft = ""
        for document in given["documents"][:3]:
            draft = await step.ainvoke({"draft": draft, "text": document.page_content})
        return draft

    languages = RunnableParallel(
        {name: ask(f"Translate to {name}: {{text}}") for name in ("French", "German", "Dutch")}
    )
    minutes = RunnableParallel(
        summary=ask("Summarise the meeting: {text}"),
        actions=ask("List the actions of: {text}"),
        decisions=ask("List the decisions of: {text}"),
        risks=ask("List the risks of: {text}"),
    )
    density: Runnable[Any, Any] = RunnablePassthrough.assign(draft=ask("Summarise {text}"))
    for _ in range(3):
        density = density.assign(draft=ask("Make {draft} denser, about {text}"))
    rebuttals = RunnableParallel(
        pro=ask("Answer {con} for {topic}"),
        con=ask("Answer {pro} against {topic}"),
        topic=itemgetter("topic"),
    )
    sides = RunnableParallel(
        pro=ask("For {topic}"), con=ask("Against {topic}"), topic=itemgetter("topic")
    )
    return {
        "map_reduce": App(
            itemgetter("documents")
            | summary.map()
            | "\n".join
            | ask("Combine the summaries: {texts}"),
            {"documents": documents},
        ),
        "refine": App(
            RunnableLambda(refine, arefine) | ask("Title for {text}"), {"documents": documents}
        ),
        "chain_of_density": App(density | itemgetter("draft"), {"text": "tea in Japan"}),
        "critique_and_revise": App(
            RunnablePassthrough.assign(draft=ask("Write about {topic}"))
            .assign(critique=ask("Criticise {draft}"))
            .assign(final=ask("Rewrite {draft} by {critique}"))
            .pick("final"),
            {"topic": "tea"},
        ),
        "translations": App(
            languages | ask("Compare {French}, {German} and {Dutch}"), {"text": "good tea"}
        ),
        "blog": App(
            RunnablePassthrough.assign(outline=ask("Outline {topic}"))
            | RunnablePassthrough.assign(
                sections=itemgetter("outline")
                | RunnableLambda(lines)
                | ask("Write the section {heading}").map()
                | "\n\n".join
            )
            | ask("Edit {sections} about {topic}"),
            {"topic": "tea"},
        ),
        "debate": App(sides | rebuttals | ask("Judge {pro} against {con}"), {"topic": "tea"}),
        "minutes": App(
            minutes | ask("Mail with {summary}, {actions}, {decisions} and {risks}"),
            {"text": "we met about tea"},
        ),
        "poem_and_review": App(
            RunnableParallel(poem=ask("Poem on {topic}"), joke=ask("Joke on {topic}"))
            | RunnableParallel(
                best=ask("Better of {poem} and {joke}"), mix=ask("Mix {poem} and {joke}")
            )
            | ask("Publish {best} or {mix}"),
            {"topic": "tea"},
        ),
        "titles": App(
            ask("Five titles for {topic}, with commas")
            | CommaSeparatedListOutputParser()
            | (lambda titles: {"titles": " / ".join(titles)})
            | ask("Best of {titles}"),
            {"topic": "tea"},
        ),
    }


def deciding_apps(kit: Kit) -> dict[str, App]:
    """Return apps that choose, vote, call tools or check."""
    ask, llm = kit.ask, kit.llm
    science, other = ask("As a scientist: {question}"), ask("As a friend: {question}")

    @chain
    def routed(given: dict[str, Any]) -> Runnable[Any, str]:
        return science if "e" in given["kind"] else other

    votes = RunnableParallel(
        {
            f"vote{n}": ChatPromptTemplate.from_template("Solve {question}")
            | llm.bind(temperature=1.0, seed=n)
            | TEXT
            for n in range(5)
        }
    )
    ideas = ask("Three ideas for {question}") | lines
    scored = RunnableParallel(idea=RunnablePassthrough(), score=ask("Score the idea {idea}"))

    def best(rated: list[dict[str, str]]) -> dict[str, str]:
        return max(rated, key=lambda each: each["score"])

    def use_tools(given: dict[str, Any]) -> list[BaseMessage]:
        answer: AIMessage = given["answer"]
        done = [
            ToolMessage(str(multiply.invoke(call["args"])), tool_call_id=call["id"] or "")
            for call in answer.tool_calls
        ]
        return [HumanMessage(given["question"]), answer, *done]

    def checked(given: dict[str, str]) -> str:
        return given["answer"] if "unsafe" not in given["verdict"] else "refused"

    def failing(_: Any) -> str:
        raise ValueError("the first store is down")

    extract = PromptTemplate.from_template("Names in {text}") | llm.with_structured_output(People)
    question = {"question": "How hot is tea?"}
    system = SystemMessage("You talk about tea.")
    chat = ChatPromptTemplate.from_messages(
        [system, MessagesPlaceholder("history"), ("human", "{question}")]
    )
    counted: Callable[[Any], dict[str, str]] = lambda text: {"count": str(len(text))}  # noqa: E731
    return {
        "router": App(
            RunnablePassthrough.assign(kind=ask("Kind of question: {question}"))
            | RunnableBranch((lambda x: "e" in x["kind"], science), other),
            question,
        ),
        "router_function": App(
            RunnablePassthrough.assign(kind=ask("Kind of question: {question}")) | routed, question
        ),
        "sql": App(
            RunnablePassthrough.assign(query=ask("SQL for {question}"))
            | RunnablePassthrough.assign(rows=lambda x: f"{len(x['query'])} rows")
            | ask("{question} {query} {rows}"),
            question,
        ),
        "self_consistency": App(votes | most_common | ask("Explain {answer}"), question),
        "tree_of_thoughts": App(
            ideas | scored.map() | best | ask("Work out {idea}, rated {score}"), question
        ),
        "moderated": App(
            RunnableParallel(answer=ask("{question}"), verdict=ask("Is {question} safe?"))
            | checked,
            question,
        ),
        "extraction": App(
            RunnableLambda(parts_of)
            | extract.map()
            | (lambda found: sorted({name for each in found for name in each.names}))
            | (lambda names: {"names": ", ".join(names)})
            | ask("Who are {names}?"),
            "Ann met Bob and Carl near the tea house",
        ),
        "tools": App(
            RunnablePassthrough.assign(
                answer=ChatPromptTemplate.from_template("{question}")
                | llm.bind_tools([multiply], tool_choice="multiply")
            )
            | use_tools
            | llm
            | TEXT,
            question,
        ),
        "memory": App(
            RunnablePassthrough.assign(history=lambda x: x["history"][-2:]) | chat | llm | TEXT,
            {**question, "history": [HumanMessage(str(n)) for n in range(4)]},
        ),
        "fallback": App(
            RunnablePassthrough.assign(
                context=RunnableLambda(failing).with_fallbacks([RunnableLambda(lambda _: "spare")])
            )
            | ask("{context}: {question}")
            | counted
            | ask("Comment on {count} letters"),
            question,
        ),
    }


def cookbook(llm: BaseChatModel) -> dict[str, App]:
    """Return all apps by name."""
    kit = Kit(llm)
    apps = {**retrieval_apps(kit), **writing_apps(kit), **deciding_apps(kit)}
    return {name: App(coerce_to_runnable(app.chain), app.given) for name, app in apps.items()}
