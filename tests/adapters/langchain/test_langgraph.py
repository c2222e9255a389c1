"""Agents and graphs of LangGraph have the same answers with `ChatConure`, in one session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import PrivateAttr

from conure.adapters.client import AsyncClient, Client
from conure.adapters.langchain import ChatConure, accelerate
from conure.adapters.langchain.chat.model_call import ModelCall
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.status import ProgramStatus

Graph = Runnable[Any, Any]
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
SCRIPT = [
    {"match": r"<\|im_start\|>tool\nrain", "text": "Take a coat."},
    {"match": "<tools>", "text": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
    {"match": "You plan", "text": "writer"},
    {"match": "You write", "text": "Tea is fresh."},
    {"match": "You judge", "text": "good"},
]


KEPT = object()
"""State is stored by thread."""


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"rain in {city}"


def tool_agent(llm: BaseChatModel, saver: Any = KEPT) -> Graph:
    """Return an agent that calls tools until it has the answer."""
    bound = llm.bind_tools([weather])

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    async def athink(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", _both(think, athink))
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile(checkpointer=InMemorySaver() if saver is KEPT else saver)


def team(llm: BaseChatModel, saver: Any = KEPT) -> Graph:
    """Return a graph with a planner, a writer and two parallel judges."""

    def part(role: str) -> Any:
        def asked(state: MessagesState) -> list[BaseMessage]:
            return [SystemMessage(f"You {role}."), *state["messages"]]

        def act(state: MessagesState) -> dict[str, Any]:
            return {"messages": [llm.invoke(asked(state))]}

        async def aact(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await llm.ainvoke(asked(state))]}

        return _both(act, aact)

    graph = StateGraph(MessagesState)
    for name, role in [("planner", "plan"), ("writer", "write")]:
        graph.add_node(name, part(role))
    for name in ("strict", "kind"):
        graph.add_node(name, part(f"judge as a {name} one"))
        graph.add_edge("writer", name)
        graph.add_edge(name, END)
    graph.add_edge(START, "planner")
    graph.add_conditional_edges(
        "planner", lambda state: str(state["messages"][-1].content), {"writer": "writer"}
    )
    return graph.compile(checkpointer=InMemorySaver() if saver is KEPT else saver)


def _both(sync: Any, asynchronous: Any) -> Any:
    return RunnableLambda(sync, asynchronous)


class Plain(BaseChatModel):
    """A model without a server that gives the same answers."""

    @property
    def _llm_type(self) -> str:
        return "plain"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        reply = AIMessage("")
        if messages[-1].type == "tool":
            reply = AIMessage("Take a coat.")
        elif "tools" in kwargs:
            call = {"name": CALL["name"], "args": CALL["arguments"], "id": "1"}
            reply = AIMessage("", tool_calls=[call])
        else:
            words = {"plan": "writer", "writ": "Tea is fresh.", "judg": "good"}
            reply = AIMessage(words[str(messages[0].content)[4:8]])
        return ChatResult(generations=[ChatGeneration(message=reply)])


GRAPHS = {"a tool-calling agent": (tool_agent, 2), "a team": (team, 4)}
SAID = {"messages": [HumanMessage("Tea in Oslo?")]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder: Path = tmp_path_factory.mktemp("graphs")
    (folder / "script.json").write_text(json.dumps(SCRIPT), "utf-8")
    config = Config(
        engine="fake", data=folder / "data", script=folder / "script.json", num_engines=2
    )
    with Client(app=create_app(config)) as client:
        yield client


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=300)


def thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def messages_of(state: dict[str, Any]) -> list[tuple[str, Any, list[Any]]]:
    """Return the messages without ids, with those of parallel parts sorted."""
    messages = [
        (m.type, m.content, [(c["name"], c["args"]) for c in getattr(m, "tool_calls", [])])
        for m in state["messages"]
    ]
    return messages[:-2] + sorted(messages[-2:])


def programs(client: Client, state: dict[str, Any]) -> list[ProgramStatus]:
    """Return the programs of a state's answers, in order."""
    made = [m.response_metadata["program"] for m in state["messages"] if isinstance(m, AIMessage)]
    return [client.attach(program).status() for program in made]


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_has_same_result_with_conure(llm: ChatConure, name: str) -> None:
    make, num_calls = GRAPHS[name]
    config = thread(name)
    before = make(Plain()).invoke(SAID, config)
    after = make(llm).invoke(SAID, config)
    assert messages_of(after) == messages_of(before)
    assert sum(message.type == "ai" for message in after["messages"]) == num_calls


@pytest.mark.parametrize("name", GRAPHS)
async def test_awaited_graph_has_same_result(llm: ChatConure, name: str) -> None:
    make, _ = GRAPHS[name]
    config = thread(f"{name} with await")
    after = await make(llm).ainvoke(SAID, config)
    assert messages_of(after) == messages_of(make(Plain()).invoke(SAID, config))
    await llm.async_connection().close()


@pytest.mark.parametrize("name", GRAPHS)
def test_accelerated_graph_is_one_program(llm: ChatConure, client: Client, name: str) -> None:
    make, num_calls = GRAPHS[name]
    fast = accelerate(make(llm), model=llm)
    config = thread(f"{name}, fast")
    assert messages_of(fast.invoke(SAID, config)) == messages_of(make(Plain()).invoke(SAID, config))
    (run,) = fast.explain().runs
    assert len(run.misses) == num_calls, "nothing of a graph is known before it runs"
    assert client.attach(run.program).receipt().calls == num_calls


def test_graph_step_can_be_accelerated_chain(llm: ChatConure) -> None:
    def twice(model: BaseChatModel) -> Graph:
        return RunnableLambda(_first) | model | RunnableLambda(_second) | model

    def _first(state: MessagesState) -> list[BaseMessage]:
        return [SystemMessage("You plan."), *state["messages"]]

    def _second(message: AIMessage) -> list[BaseMessage]:
        return [SystemMessage("You write."), message]

    fast = accelerate(twice(llm), model=llm)
    graph = StateGraph(MessagesState)
    graph.add_node("both", RunnableLambda(lambda state: {"messages": [fast.invoke(state)]}))
    graph.add_edge(START, "both")
    compiled: Any = graph.compile()
    state = compiled.invoke(SAID)
    assert state["messages"][-1].content == "Tea is fresh."
    (run,) = fast.explain().runs
    assert (run.num_served, run.misses) == (2, [])


def test_calls_of_a_thread_share_session_and_engine(llm: ChatConure, client: Client) -> None:
    agent = tool_agent(llm)
    config = thread("customer 7")
    asked: dict[str, Any] = {"messages": [HumanMessage("Oslo, please. " * 20)]}
    for _ in range(2):
        agent.invoke(asked, config)
    state = agent.invoke(asked, config)
    made = programs(client, state)
    nodes: list[Any] = [program.nodes["chat"] for program in made]
    assert len(made) == 4  # the script ends after the first tool
    assert {node.meta["thread_id"] for node in nodes} == {"customer 7"}
    assert {node.meta["langgraph_node"] for node in nodes} == {"think"}
    assert len({node.engine for node in nodes}) == 1, "all turns go where the ones before lie"
    for before, after in pairwise(nodes):
        reused = after.prompt_tokens.shared / before.prompt_tokens.logical
        assert reused > 0.9, "every turn finds the KV of the one before"


class Watching(ChatConure):
    """A model that records the sessions of its calls."""

    _seen: list[str | None] = PrivateAttr(default_factory=list)

    def _model_call(self, *args: Any, **kwargs: Any) -> ModelCall:
        call = super()._model_call(*args, **kwargs)
        self._seen.append(call.session)
        return call


def test_calls_of_a_thread_keep_its_queue_position(llm: ChatConure, client: Client) -> None:
    watching = Watching(client=client, temperature=0, max_tokens=300)
    tool_agent(watching).invoke(SAID, thread("customer 8"))
    watching.invoke("Without a thread.")
    assert watching._seen == ["thread customer 8", "thread customer 8", None]


@pytest.mark.parametrize("has_thread", [True, False])
def test_accelerated_graph_is_in_the_session_of_its_thread(
    llm: ChatConure, monkeypatch: pytest.MonkeyPatch, has_thread: bool
) -> None:
    sessions: list[Any] = []
    submit = AsyncClient.submit

    async def record(self: AsyncClient, body: Any, **kwargs: Any) -> Any:
        sessions.append(body["options"].get("session"))
        return await submit(self, body, **kwargs)

    monkeypatch.setattr(AsyncClient, "submit", record)
    fast = accelerate(tool_agent(llm, None))
    fast.invoke(SAID, thread("customer 9") if has_thread else None)
    outer = RunnableLambda(lambda given: fast.invoke(given))
    outer.invoke(SAID, thread("customer 10") if has_thread else None)
    assert sessions == (["thread customer 9", "thread customer 10"] if has_thread else [None, None])


async def test_agent_without_thread_is_one_session(client: Client) -> None:
    watching = Watching(client=client, temperature=0, max_tokens=300)
    for agent in (tool_agent(watching, None), team(watching, None)):
        agent.invoke(SAID)
        first, *rest = watching._seen
        assert first is None, "a call that begins something is nobody's"
        assert rest[0] is not None
        assert {each for each in rest if each} == {rest[0]}
        watching._seen.clear()
        await agent.ainvoke(SAID)
        assert watching._seen[1] not in (None, rest[0]), "another run is another session"
        watching._seen.clear()
    await watching.async_connection().close()


async def test_accelerated_graph_has_the_surface_of_the_graph(llm: ChatConure) -> None:
    agent = tool_agent(llm)
    fast = accelerate(agent)
    thread: RunnableConfig = {"configurable": {"thread_id": "surface"}}
    fast.invoke({"messages": [HumanMessage("Rain?")]}, thread)
    plain: Any = agent
    assert fast.get_state(thread) == plain.get_state(thread)
    assert (await fast.aget_state(thread)).values == plain.get_state(thread).values
    assert len(list(fast.get_state_history(thread))) == 4 + 1
    fast.update_state(thread, {"messages": [HumanMessage("And now?")]})
    assert plain.get_state(thread).values["messages"][-1].text == "And now?"
    assert (fast.checkpointer, fast.nodes, fast.stream_mode) == (
        plain.checkpointer,
        plain.nodes,
        plain.stream_mode,
    )
    with pytest.raises(AttributeError, match="no_such_method"):
        fast.no_such_method  # noqa: B018


def test_explanation_of_a_graph_says_why_no_call_is_planned(llm: ChatConure) -> None:
    fast = accelerate(tool_agent(llm), model=llm)
    assert "chooses its calls while it runs" in str(fast.explain())


def test_accelerated_graph_has_the_name_and_the_drawing_of_the_graph(llm: ChatConure) -> None:
    inner = StateGraph(MessagesState).add_node("act", lambda state: state)
    part: Any = inner.add_edge(START, "act").compile(name="helper")
    outer = StateGraph(MessagesState).add_node("part", part)
    graph: Any = outer.add_edge(START, "part").compile()
    assert accelerate(part).name == "helper"
    assert accelerate(llm).name is None
    drawn = accelerate(graph).get_graph(xray=True)
    assert drawn.draw_mermaid() == graph.get_graph(xray=True).draw_mermaid()


@pytest.mark.parametrize("mode", ["values", "updates", "messages", "debug", ["values", "updates"]])
def test_accelerated_graph_streams_every_mode(llm: ChatConure, mode: Any) -> None:
    given = {"messages": [HumanMessage("Rain?")]}
    agent: Any = tool_agent(llm, None)
    plain = list(agent.stream(given, stream_mode=mode))
    fast = list(accelerate(agent).stream(given, stream_mode=mode))
    if mode == "messages":  # texts that arrive together are one chunk
        assert joined(fast) == joined(plain)
    else:
        assert [type(chunk) for chunk in fast] == [type(chunk) for chunk in plain]


def joined(chunks: list[tuple[BaseMessage, dict[str, Any]]]) -> list[tuple[str, str]]:
    """Return the nodes that wrote messages, in the order of the stream, each with its text."""
    texts: dict[str, str] = {}
    for message, metadata in chunks:
        node = metadata["langgraph_node"]
        texts[node] = texts.get(node, "") + message.text
    return list(texts.items())


async def test_awaited_graph_of_plain_functions_is_one_program(llm: ChatConure) -> None:
    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("one", think).add_node("two", think)
    graph.add_edge(START, "one").add_edge("one", "two")
    fast = accelerate(graph.compile())
    await fast.ainvoke({"messages": [HumanMessage("Rain?")]})
    (run,) = fast.explain().runs
    assert run.program
    assert len(run.misses) == 2
