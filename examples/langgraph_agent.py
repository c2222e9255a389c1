"""A LangGraph agent that reads reports until one of them answers its question.

It takes a report, answers, and has the model check whether there was anything to answer: if
not, it goes round again with the next report. How often, the model decides. `accelerate` makes
the calls of a run one program; each check finds the KV of the answer that it follows.

An agent that calls tools is beyond the built-in model; with a larger one, `bind_tools` gives
`ChatConure` tools. Start a server first: `conure serve`. Needs `pip install conure[langchain]
langgraph`.
"""

from __future__ import annotations

import sys
from typing import Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import Runnable
from langgraph.graph import END, START, StateGraph

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate
from show import cost, run_example

QUESTION, CHECK = "Who was hurt?", "Was anyone hurt?"
REPORTS = (
    "The inspector was Mira Dolan. Nobody was hurt. The place was Kolvar. The road was closed.",
    "The train was late. Nobody was hurt. The captain was Lena Moritz. It happened in Malbury.",
    "The guard was Tessa Brook. The accident hurt Jonas Wenk. The cause was a broken valve.",
    "One person was hurt: Ruth Sandberg. The driver is called Pavel Orlin.",
)


class State(TypedDict):
    """Where the agent is."""

    num_read: int
    talk: list[AnyMessage]
    """About the report that was read last; the model is asked about one at a time."""
    is_there: bool


def build_agent(llm: ChatConure) -> Runnable[Any, Any]:
    """The agent: {"num_read": 0} in, the state in which it ended out."""
    checker = llm.bind(constraint={"choices": ["yes", "no"]})

    def answer(state: State) -> dict[str, Any]:
        asked = HumanMessage(f"{REPORTS[state['num_read']]}\n\n{QUESTION}")
        return {"num_read": state["num_read"] + 1, "talk": [asked, llm.invoke([asked])]}

    def check(state: State) -> dict[str, Any]:
        talk = [*state["talk"], HumanMessage(CHECK)]
        verdict = checker.invoke(talk)
        return {"talk": [*talk, verdict], "is_there": verdict.text == "yes"}

    def again(state: State) -> str:
        return END if state["is_there"] or state["num_read"] == len(REPORTS) else "answer"

    graph = StateGraph(State).add_node("answer", answer).add_node("check", check)
    graph.add_edge(START, "answer").add_edge("answer", "check")
    return graph.add_conditional_edges("check", again, ["answer", END]).compile()


def look(client: Client) -> None:
    """Runs the agent and prints every step that it took."""
    llm = ChatConure(client=client, temperature=0, max_tokens=48)
    agent = accelerate(build_agent(llm), model=llm)
    for step in agent.stream({"num_read": 0}, stream_mode="updates"):
        for node, state in step.items():
            asked, said = state["talk"][-2:]
            print(f"{node:6}    {' '.join(asked.text.split())} {said.text}")
    (run,) = agent.explain().runs
    print(f"server    one program: {cost(client.attach(run.program).receipt())}")


if __name__ == "__main__":
    sys.exit(run_example("langgraph_agent", look))
