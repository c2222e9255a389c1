"""A LangChain RAG chain with a history: rewrite the question, look it up, answer.

The chain is ordinary LangChain. Looking up is a function of this process, so the program on
the server waits for it between its two calls, and goes on as soon as it has the passages.

Start a server first: `conure serve`. Needs `pip install conure[langchain]`.
"""

from __future__ import annotations

import argparse
import re
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from conure.adapters.langchain import ChatConure, accelerate
from conure.server.program.errors import ConureError

TEXT = Path(__file__).parent / "texts" / "tell_tale_heart.txt"
QUESTIONS = ("What does the narrator hear under the floor?", "Do the officers hear it too?")
NUM_PASSAGES = 2


class Shelf:
    """A text, cut into paragraphs that are found by the words they share with a question."""

    def __init__(self, text: str) -> None:
        self._passages = [part.strip() for part in text.split("\n\n") if part.strip()]

    def find(self, question: str) -> str:
        """The passages that share most words with the question."""
        words = set(re.findall(r"[a-z]{4,}", question.lower()))

        def common(passage: str) -> int:
            return len(words & set(re.findall(r"[a-z]{4,}", passage.lower())))

        return "\n\n".join(sorted(self._passages, key=common, reverse=True)[:NUM_PASSAGES])


def build_chain(llm: ChatConure, shelf: Shelf) -> Runnable[Any, str]:
    """The chain: {"question": ..., "history": [...]} in, the answer out."""
    rewrite = ChatPromptTemplate.from_messages(
        [
            ("system", "Say the last question so that it can be understood without the talk."),
            MessagesPlaceholder("history"),
            ("human", "{question}"),
        ]
    )
    answer = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer from these passages alone:\n\n{passages}"),
            MessagesPlaceholder("history"),
            ("human", "{question}"),
        ]
    )
    alone = rewrite | llm | StrOutputParser()
    return (
        RunnablePassthrough.assign(alone=alone)
        | RunnablePassthrough.assign(passages=itemgetter("alone") | RunnableLambda(shelf.find))
        | answer
        | llm
        | StrOutputParser()
    )


def run(url: str | None, max_tokens: int) -> None:
    """Asks the questions one after the other and prints what came of it."""
    llm = ChatConure(base_url=url, temperature=0, max_tokens=max_tokens)
    chain = accelerate(build_chain(llm, Shelf(TEXT.read_text(encoding="utf-8"))))
    history: list[BaseMessage] = []
    for question in QUESTIONS:
        answer = chain.invoke({"question": question, "history": history})
        print(f"question  {question}\nanswer    {' '.join(answer.split())}\n")
        history += [HumanMessage(question), AIMessage(answer)]
    print(chain.explain())


def main() -> int:
    """Reads the arguments and runs the example."""
    parser = argparse.ArgumentParser(description="LangChain RAG with a history")
    parser.add_argument("--url", help="of the server (CONURE_URL, else http://127.0.0.1:8400)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer")
    arguments = parser.parse_args()
    try:
        run(arguments.url, arguments.max_tokens)
    except ConureError as problem:
        print(f"langchain_rag: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
