"""Chains that search before they answer."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from pydantic import BaseModel, Field

from .kit import (
    QUESTION,
    TEXT,
    LangChainApp,
    LangChainKit,
    as_text,
    fused,
    search,
    text_of,
    unique,
    with_context,
)

RETRIEVER: Runnable[str, list[Document]] = RunnableLambda(search)


class Query(BaseModel):
    """A search."""

    topic: str = Field(max_length=8)
    year: int = Field(ge=2000, le=2030)


def rag(kit: LangChainKit) -> LangChainApp:
    """Search with the question, and answer."""
    return LangChainApp(
        {"context": RETRIEVER | as_text, "question": RunnablePassthrough()} | kit.answer(),
        "How is tea made?",
    )


def rag_with_sources(kit: LangChainKit) -> LangChainApp:
    """Return the documents together with the answer."""
    answer = RunnablePassthrough.assign(context=lambda x: as_text(x["context"])) | kit.answer()
    return LangChainApp(
        RunnableParallel(context=RETRIEVER, question=RunnablePassthrough()).assign(answer=answer),
        "How is tea made?",
    )


def conversational_rag(kit: LangChainKit) -> LangChainApp:
    """Rewrite a question of a conversation, and search with it."""
    condense = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("history"), ("human", "{question}"), ("human", "Ask it alone.")]
    )
    return LangChainApp(
        RunnablePassthrough.assign(question=condense | kit.llm | TEXT)
        | RunnablePassthrough.assign(context=itemgetter("question") | RETRIEVER | as_text)
        | kit.answer(),
        {
            "question": "How is it made?",
            "history": [HumanMessage("What is oolong?"), AIMessage("A tea.")],
        },
    )


def multi_query(kit: LangChainKit) -> LangChainApp:
    """Search with several questions of the model."""
    found = kit.queries() | RETRIEVER.map() | unique | as_text
    return LangChainApp(RunnablePassthrough.assign(context=found) | kit.answer(), QUESTION)


def rag_fusion(kit: LangChainKit) -> LangChainApp:
    """Rank the results of several searches together."""
    found = kit.queries() | RETRIEVER.map() | fused | as_text
    return LangChainApp(
        {"context": found, "question": itemgetter("question")} | kit.answer(), QUESTION
    )


def hyde(kit: LangChainKit) -> LangChainApp:
    """Search with an answer that the model made up."""
    found = kit.ask("Write a passage that answers: {question}") | RETRIEVER | as_text
    return LangChainApp(RunnablePassthrough.assign(context=found) | kit.answer(), QUESTION)


def step_back(kit: LangChainKit) -> LangChainApp:
    """Search with the question and with a more general one."""
    examples = FewShotChatMessagePromptTemplate(
        examples=[{"input": "Was tea taxed in Boston?", "output": "What taxes did Boston have?"}],
        example_prompt=ChatPromptTemplate.from_messages([("human", "{input}"), ("ai", "{output}")]),
    )
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Step back."), examples, ("human", "{question}")]
    )
    return LangChainApp(
        {
            "normal": itemgetter("question") | RETRIEVER | as_text,
            "general": prompt | kit.llm | TEXT | RETRIEVER | as_text,
            "question": itemgetter("question"),
        }
        | kit.ask("{normal}\n{general}\nAnswer: {question}"),
        QUESTION,
    )


def joined(texts: list[str]) -> str:
    """Return texts as lines."""
    return "\n".join(texts)


def decomposition(kit: LangChainKit) -> LangChainApp:
    """Answer the parts of a question, then the whole."""
    parts: Runnable[Any, str] = (
        itemgetter("parts")
        | RunnableLambda(with_context).pipe(kit.answer()).map()
        | RunnableLambda(joined)
    )
    return LangChainApp(
        RunnablePassthrough.assign(parts=kit.queries())
        | RunnablePassthrough.assign(context=parts)
        | kit.answer(),
        QUESTION,
    )


def self_query(kit: LangChainKit) -> LangChainApp:
    """Let the model write the search as a record."""
    found = (
        PromptTemplate.from_template("Filter for {question}")
        | kit.llm.with_structured_output(Query)
        | (lambda query: as_text(search(f"{query.topic} {query.year}")))
    )
    return LangChainApp(RunnablePassthrough.assign(context=found) | kit.answer(), QUESTION)


def rerank(kit: LangChainKit) -> LangChainApp:
    """Let the model rate every document, and answer from the best."""
    rate = RunnableLambda(text_of).pipe(kit.ask("Rate {text}")).map()

    def best(x: dict[str, Any]) -> str:
        pairs = zip(x["scores"], x["documents"], strict=True)
        _, text = max((str(score), str(doc.page_content)) for score, doc in pairs)
        return text

    return LangChainApp(
        RunnablePassthrough.assign(documents=itemgetter("question") | RETRIEVER)
        | RunnablePassthrough.assign(scores=itemgetter("documents") | rate)
        | RunnablePassthrough.assign(context=best)
        | kit.answer(),
        QUESTION,
    )


RETRIEVAL_APPS = (
    rag,
    rag_with_sources,
    conversational_rag,
    multi_query,
    rag_fusion,
    hyde,
    step_back,
    decomposition,
    self_query,
    rerank,
)
