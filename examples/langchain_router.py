"""A LangChain router: one call decides who answers, and the answer is always one of three words.

The deciding call is held to a list of choices, so nothing has to be parsed, repaired or asked
again. Who answers is known when the chain gets there; that call then joins the same program.

Start a server first: `conure serve`. Needs `pip install conure[langchain]`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableBranch, RunnablePassthrough

from conure.adapters.langchain import ChatConure, accelerate
from conure.server.program.errors import ConureError

ROLES = {
    "repair": "You mend bicycles. Say what to check first.",
    "sale": "You sell bicycles. Recommend one.",
    "complaint": "You answer complaints. Apologise and offer one remedy.",
}
LETTERS = (
    "My chain jumps whenever I go uphill.",
    "I need something for twenty kilometres a day.",
    "You sent me the wrong saddle for the second time!",
)


def build_chain(llm: ChatConure) -> Runnable[Any, dict[str, str]]:
    """The chain: a letter in, {"kind": ..., "answer": ...} out."""
    sort = ChatPromptTemplate.from_template(
        "What is this letter to a bicycle shop? One of: repair, sale, complaint.\n\n{letter}"
    )
    kind = sort | llm.bind(constraint={"choices": list(ROLES)}) | StrOutputParser()

    def answer(role: str) -> Runnable[Any, str]:
        prompt = ChatPromptTemplate.from_messages([("system", role), ("human", "{letter}")])
        return prompt | llm | StrOutputParser()

    branches = RunnableBranch(
        (lambda state: state["kind"] == "repair", answer(ROLES["repair"])),
        (lambda state: state["kind"] == "sale", answer(ROLES["sale"])),
        answer(ROLES["complaint"]),
    )
    return (
        {"letter": RunnablePassthrough()}
        | RunnablePassthrough.assign(kind=kind)
        | RunnablePassthrough.assign(answer=branches)
    )


def run(url: str | None, max_tokens: int) -> None:
    """Answers all letters at once and prints who answered what."""
    llm = ChatConure(base_url=url, temperature=0, max_tokens=max_tokens)
    chain = accelerate(build_chain(llm))
    for made in chain.batch(list(LETTERS)):
        print(f"letter    {made['letter']}\nkind      {made['kind']}")
        print(f"answer    {' '.join(made['answer'].split())}\n")
    print(chain.explain())


def main() -> int:
    """Reads the arguments and runs the example."""
    parser = argparse.ArgumentParser(description="LangChain router")
    parser.add_argument("--url", help="of the server (CONURE_URL, else http://127.0.0.1:8400)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer")
    arguments = parser.parse_args()
    try:
        run(arguments.url, arguments.max_tokens)
    except ConureError as problem:
        print(f"langchain_router: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
