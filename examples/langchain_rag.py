"""A LangChain RAG chain with a history: what is spoken of, look it up, answer.

Only the first question of the talk says where it happened. Before each answer the model reads
the talk for the place, and a function finds the report on it. Looking up is done in this
process, so the program on the server waits for it between its two calls, and goes on as soon
as it has the report.

Start a server first: `conure serve`. Needs `pip install conure[langchain]`.
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

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from show import cost, run_example

SHELF = (
    "The inspector was Mira Dolan. Nobody was hurt. The place was Kolvar. The road was closed.",
    "The guard was Tessa Brook. The accident hurt Jonas Wenk. It happened in Tarnby.",
    "The guard was Lena Moritz. Nobody was hurt. It happened in Malbury. The train was late.",
)
QUESTIONS = ("It happened in Tarnby. Who was the guard?", "Was anyone hurt?", "Who was hurt?")


def find(place: str) -> str:
    """The report on the shelf that shares most words with what is looked for."""
    words = set(re.findall(r"\w+", place.lower()))
    return max(SHELF, key=lambda report: len(words & set(re.findall(r"\w+", report.lower()))))


def build_chain(llm: ChatConure) -> Runnable[Any, dict[str, Any]]:
    """The chain: {"question": ..., "history": [...]} in; these, what was found, an answer out."""
    before = MessagesPlaceholder("history")
    placing = ChatPromptTemplate.from_messages([before, ("human", "{question}\n\nName the place.")])
    answering = ChatPromptTemplate.from_messages([before, ("human", "{report}\n\n{question}")])
    return (
        RunnablePassthrough.assign(place=placing | llm | StrOutputParser())
        | RunnablePassthrough.assign(report=itemgetter("place") | RunnableLambda(find))
        | RunnablePassthrough.assign(answer=answering | llm | StrOutputParser())
    )


def talk(client: Client) -> None:
    """Asks the questions one after the other and prints what came of each."""
    chain = accelerate(build_chain(ChatConure(client=client, temperature=0, max_tokens=48)))
    history: list[BaseMessage] = []
    for question in QUESTIONS:
        made = chain.invoke({"question": question, "history": history})
        print(f"question  {question}\nplace     {made['place']}\nfound     {made['report']}")
        print(f"answer    {made['answer']}\n")
        history += [HumanMessage(question), AIMessage(made["answer"])]
    for run in chain.explain().runs:
        receipt = client.attach(run.program).receipt()
        print(f"server    {run.num_served} served from the plan; {cost(receipt)}")


if __name__ == "__main__":
    sys.exit(run_example("langchain_rag", talk))
