"""A LangChain map-reduce whose width the model decides: a list, a question per item, a summary.

The model lists the villages of a report; a regex constraint guarantees a well-formed list.
`.map()` then makes one call per village, all in parallel, and a last call joins the findings.

Start a server first: `conure serve`. Needs `pip install '.[langchain]'`.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.output_parsers import CommaSeparatedListOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from conure import Client
from conure.adapters.langchain import ChatConure, accelerate
from show import cost, run_example

REPORTS = (
    "The villages were Kolvar, Tarnby and Malbury. The doctor in Malbury is Ruth Sandberg. "
    "The doctor in Kolvar is Pavel Orlin. The doctor in Tarnby is Emil Hartson.",
    "The villages were Gresfell and Ostwick. The doctor in Gresfell is Lena Moritz. "
    "The road was closed. The doctor in Ostwick is Jonas Wenk.",
)
NAMES = r"[A-Z][a-z]+(, [A-Z][a-z]+)*"


def build_chain(llm: ChatConure) -> Runnable[Any, dict[str, Any]]:
    """Return the chain from {"report": ...} to its villages, their doctors and all of them."""
    listing = ChatPromptTemplate.from_template("{report}\n\nList the villages.")
    asking = ChatPromptTemplate.from_template("{report}\n\nWho is the doctor in {village}?")
    joining = ChatPromptTemplate.from_template("Join the findings:\n{findings}")
    villages = listing | llm.bind(constraint={"regex": NAMES}) | CommaSeparatedListOutputParser()
    doctor = asking | llm | StrOutputParser()
    return (
        RunnablePassthrough.assign(villages=villages)
        | RunnablePassthrough.assign(doctors=RunnableLambda(_questions) | doctor.map())
        | RunnablePassthrough.assign(
            all=RunnableLambda(_findings) | joining | llm | StrOutputParser()
        )
    )


def _questions(state: dict[str, Any]) -> list[dict[str, str]]:
    return [{"report": state["report"], "village": village} for village in state["villages"]]


def _findings(state: dict[str, Any]) -> dict[str, str]:
    return {"findings": "\n".join(f"- {doctor}" for doctor in state["doctors"])}


def read(client: Client) -> None:
    """Run the chain on all reports in parallel and print the results."""
    llm = ChatConure(client=client, temperature=0, max_tokens=48)
    chain = accelerate(build_chain(llm))
    for result in chain.batch([{"report": report} for report in REPORTS]):
        print(f"report    {result['report']}")
        for village, doctor in zip(result["villages"], result["doctors"], strict=True):
            print(f"doctor    {village}: {doctor}")
        print(f"joined    {result['all']}\n")
    for run in chain.explain().runs:
        receipt = client.attach(run.program).receipt()
        print(f"server    {run.num_served} served from the plan; {cost(receipt)}")


if __name__ == "__main__":
    sys.exit(run_example("langchain_map", read))
