"""A LangGraph agent that reads reports until one of them answers its question.

The agent answers the question for one report, lets the model check whether the report contains an
answer, and otherwise continues with the next report. `accelerate` turns the calls of a run into
one program; each check reuses the KV cache of the answer before it.

The built-in model cannot call tools; with a larger model, use `ChatConure.bind_tools`.

Start a server first: `conure serve`. Needs `pip install '.[langchain]' langgraph`.
"""

from __future__ import annotations

import sys
from typing import Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import Runnable
from langgraph.graph import END, START, StateGraph

from conure import Client
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
    """State of the agent."""

    num_read: int
    messages: list[AnyMessage]
    """Conversation about the latest report."""
    is_answered: bool


def build_agent(llm: ChatConure) -> Runnable[Any, Any]:
    """Return the agent from {"num_read": 0} to its final state."""
    checker = llm.bind(constraint={"choices": ["yes", "no"]})

    def answer(state: State) -> dict[str, Any]:
        question = HumanMessage(f"{REPORTS[state['num_read']]}\n\n{QUESTION}")
        return {"num_read": state["num_read"] + 1, "messages": [question, llm.invoke([question])]}

    def check(state: State) -> dict[str, Any]:
        messages = [*state["messages"], HumanMessage(CHECK)]
        verdict = checker.invoke(messages)
        return {"messages": [*messages, verdict], "is_answered": verdict.text == "yes"}

    def next_node(state: State) -> str:
        return END if state["is_answered"] or state["num_read"] == len(REPORTS) else "answer"

    graph = StateGraph(State).add_node("answer", answer).add_node("check", check)
    graph.add_edge(START, "answer").add_edge("answer", "check")
    return graph.add_conditional_edges("check", next_node, ["answer", END]).compile()


def search(client: Client) -> None:
    """Run the agent and print each step."""
    llm = ChatConure(client=client, temperature=0, max_tokens=48)
    agent = accelerate(build_agent(llm), model=llm)
    for step in agent.stream({"num_read": 0}, stream_mode="updates"):
        for node, state in step.items():
            question, answer = state["messages"][-2:]
            print(f"{node:6}    {' '.join(question.text.split())} {answer.text}")
    (run,) = agent.explain().runs
    print(f"server    one program: {cost(client.attach(run.program).receipt())}")


if __name__ == "__main__":
    sys.exit(run_example("langgraph_agent", search))
