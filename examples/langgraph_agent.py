"""A LangGraph agent that reads pages until it can answer; only its model is Conure's.

The graph is ordinary LangGraph, with a memory. The first answer of a turn has to ask for a
page; the grammar keeps its arguments to the tool's schema. All calls of one thread are one
session on the server: each finds the KV of the ones before it.

Start a server first: `conure serve`. Needs `pip install conure[langchain] langgraph`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure
from conure.server.program.errors import ConureError

TEXT = Path(__file__).parent / "texts" / "tell_tale_heart.txt"
PAGE_CHARS = 600
QUESTIONS = ("How does the story begin?", "And how does it end?")
RULES = SystemMessage("You answer questions about a story. Read a page before you answer.")


def read_page(where: Literal["first", "middle", "last"]) -> str:
    """Read one page of the story."""
    text = TEXT.read_text(encoding="utf-8").partition("\n\n")[2]
    start = {"first": 0, "middle": len(text) // 2, "last": len(text) - PAGE_CHARS}[where]
    return text[start : start + PAGE_CHARS]


def build_agent(llm: ChatConure) -> Runnable[Any, Any]:
    """The agent: messages in, messages out."""
    # The tools stand at the head of a prompt, so they stay there when none may be called.
    reading, answering = (llm.bind_tools([read_page], tool_choice=how) for how in ("any", "none"))

    def think(state: MessagesState) -> dict[str, Any]:
        has_read = state["messages"][-1].type == "tool"
        model = answering if has_read else reading
        return {"messages": [model.invoke([RULES, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([read_page]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile(checkpointer=InMemorySaver())


def run(client: Client, max_tokens: int) -> None:
    """Asks the questions in one thread and prints what every call cost."""
    llm = ChatConure(client=client, temperature=0, max_tokens=max_tokens)
    agent = build_agent(llm)
    thread: RunnableConfig = {"configurable": {"thread_id": "reader"}}
    seen = 0
    for question in QUESTIONS:
        state = agent.invoke({"messages": [HumanMessage(question)]}, thread)
        for message in state["messages"][seen:]:
            print(f"{message.type:6}  {_told(message)}")
            if isinstance(message, AIMessage):
                print(f"        {_cost(client, message)}")
        seen = len(state["messages"])


def _told(message: Any) -> str:
    calls = [f"{call['name']}({call['args']})" for call in getattr(message, "tool_calls", [])]
    return " ".join([*str(message.content).split(), *calls])[:88]


def _cost(client: Client, message: AIMessage) -> str:
    status = client.attach(message.response_metadata["program"]).status()
    (node,) = status.nodes.values()
    tokens = node.prompt_tokens
    if not tokens:
        return "not known yet"
    return f"prompt {tokens.logical} tokens, {tokens.shared} of them known; engine {node.engine}"


def main() -> int:
    """Reads the arguments and runs the example."""
    parser = argparse.ArgumentParser(description="LangGraph agent that reads before it answers")
    parser.add_argument("--url", help="of the server (CONURE_URL, else http://127.0.0.1:8400)")
    parser.add_argument("--max-tokens", type=int, default=120, help="of each answer")
    arguments = parser.parse_args()
    try:
        with Client(arguments.url) as client:
            run(client, arguments.max_tokens)
    except ConureError as problem:
        print(f"langgraph_agent: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
