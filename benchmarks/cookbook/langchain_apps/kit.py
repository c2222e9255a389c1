"""What the LangChain apps share: prompts of one model, a search, and small functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

TEXT = StrOutputParser()
QUESTION = {"question": "How is green tea made?"}


class LangChainApp(NamedTuple):
    """A chain and its input."""

    chain: Runnable[Any, Any]
    given: Any


class LangChainKit:
    """Prompts of one model."""

    def __init__(self, llm: BaseChatModel) -> None:
        self.llm = llm

    def ask(self, template: str, system: str = "") -> Runnable[Any, str]:
        """Return a prompt, the model and a text parser."""
        messages = ([("system", system)] if system else []) + [("human", template)]
        return ChatPromptTemplate.from_messages(messages) | self.llm | TEXT

    def answer(self) -> Runnable[Any, str]:
        """Return the last step of a search: an answer from `context` to `question`."""
        return self.ask("Context: {context}\nQuestion: {question}", "Answer from the context.")

    def queries(self) -> Runnable[Any, list[str]]:
        """Return three searches for a question."""
        return self.ask("Three searches for: {question}") | lines


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
