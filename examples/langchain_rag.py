"""A LangChain RAG chain with a history: find the topic, retrieve a report, answer.

Only the first question names the place. Before each answer, the model reads the conversation for
the place, and a function retrieves the report about it. Retrieval runs in this process: the
program on the server waits for it between its two calls, and resumes as soon as it has the report.

Start a server first: `conure serve`. Needs `pip install '.[langchain]'`.
"""

from __future__ import annotations

import re
import sys
from operator import itemgetter
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from conure import Client
from conure.adapters.langchain import ChatConure, accelerate
from show import cost, run_example

CORPUS = (
    "The inspector was Mira Dolan. Nobody was hurt. The place was Kolvar. The road was closed.",
    "The guard was Tessa Brook. The accident hurt Jonas Wenk. It happened in Tarnby.",
    "The guard was Lena Moritz. Nobody was hurt. It happened in Malbury. The train was late.",
)
QUESTIONS = ("It happened in Tarnby. Who was the guard?", "Was anyone hurt?", "Who was hurt?")


def retrieve(place: str) -> str:
    """Return the report that shares most words with the place."""
    words = set(re.findall(r"\w+", place.lower()))
    return max(CORPUS, key=lambda report: len(words & set(re.findall(r"\w+", report.lower()))))


def build_chain(llm: ChatConure) -> Runnable[Any, dict[str, Any]]:
    """Return the chain from {"question": ..., "history": [...]} to place, report and answer."""
    history = MessagesPlaceholder("history")
    placing = ChatPromptTemplate.from_messages(
        [history, ("human", "{question}\n\nName the place.")]
    )
    answering = ChatPromptTemplate.from_messages([history, ("human", "{report}\n\n{question}")])
    return (
        RunnablePassthrough.assign(place=placing | llm | StrOutputParser())
        | RunnablePassthrough.assign(report=itemgetter("place") | RunnableLambda(retrieve))
        | RunnablePassthrough.assign(answer=answering | llm | StrOutputParser())
    )


def converse(client: Client) -> None:
    """Ask the questions in turn and print the results."""
    chain = accelerate(build_chain(ChatConure(client=client, temperature=0, max_tokens=48)))
    history: list[BaseMessage] = []
    for question in QUESTIONS:
        result = chain.invoke({"question": question, "history": history})
        print(f"question  {question}\nplace     {result['place']}\nfound     {result['report']}")
        print(f"answer    {result['answer']}\n")
        history += [HumanMessage(question), AIMessage(result["answer"])]
    for run in chain.explain().runs:
        receipt = client.attach(run.program).receipt()
        print(f"server    {run.num_served} served from the plan; {cost(receipt)}")


if __name__ == "__main__":
    sys.exit(run_example("langchain_rag", converse))
