"""A LangChain router: the answer of one call decides the next question.

A constraint limits the deciding call to yes or no, so its answer needs no parsing or retry. The
branch is known when the chain reaches it; its call is then appended to the same program.

Start a server first: `conure serve`. Needs `pip install '.[langchain]'`.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableBranch, RunnablePassthrough

from conure import Client
from conure.adapters.langchain import ChatConure, accelerate
from show import cost, run_example

REPORTS = (
    "The accident hurt Jonas Wenk. The cause was a wet rail. The road was closed.",
    "The cause was a broken valve. Nobody was hurt. It happened in Malbury.",
    "The train was late. One person was hurt: Ruth Sandberg. The place was Kolvar.",
)


def build_chain(llm: ChatConure) -> Runnable[Any, dict[str, str]]:
    """Return the chain from {"report": ...} to the report, "is_hurt" and "answer"."""

    def ask(question: str, model: Runnable[Any, Any] = llm) -> Runnable[Any, str]:
        prompt = ChatPromptTemplate.from_template(f"{{report}}\n\n{question}")
        return prompt | model | StrOutputParser()

    branches = RunnableBranch(
        (lambda state: state["is_hurt"] == "yes", ask("Who was hurt?")),
        ask("What was the cause?"),
    )
    yes_or_no = llm.bind(constraint={"choices": ["yes", "no"]})
    return RunnablePassthrough.assign(
        is_hurt=ask("Was anyone hurt?", yes_or_no)
    ) | RunnablePassthrough.assign(answer=branches)


def read(client: Client) -> None:
    """Run the chain on all reports in parallel and print the results."""
    llm = ChatConure(client=client, temperature=0, max_tokens=48)
    chain = accelerate(build_chain(llm))
    for result in chain.batch([{"report": report} for report in REPORTS]):
        print(f"report    {result['report']}\nis hurt   {result['is_hurt']}")
        print(f"{'who' if result['is_hurt'] == 'yes' else 'cause':9} {result['answer']}\n")
    for run in chain.explain().runs:
        receipt = client.attach(run.program).receipt()
        print(f"server    {run.num_served} served from the plan; {cost(receipt)}")


if __name__ == "__main__":
    sys.exit(run_example("langchain_router", read))
