"""Acceleration does not change the results of query engines, chat engines, agents and Workflows.

The apps here decide by the model's answers. The script of the fake engine contains these answers:
choices, sub-questions and tool calls.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from llama_index.core import Settings
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform import StepDecomposeQueryTransform
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import (
    ResponseMode,
    TreeSummarize,
    get_response_synthesizer,
)
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llama_index.core.workflow import (
    Context,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, Report, accelerate, explain
from conure.server.app import create_app
from conure.server.config import Config

from ..left import all_ended
from .conformance import RESERVES_ANSWERS
from .test_accelerate import Given, Pair, engine, nodes, pair

__all__ = ["pair"]

pytestmark = pytest.mark.filterwarnings("ignore:ServiceManager is deprecated:DeprecationWarning")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 40, "b": 2}}\n</tool_call>'
SUB_QUESTIONS = {
    "items": [{"sub_question": f"What is {name}?", "tool_name": name} for name in ("one", "two")]
}
SCRIPT = [
    {"match": "return the choice that is most", "text": '[{"choice": 2, "reason": "it fits"}]'},
    {
        "match": "return the top choices",
        "text": '[{"choice": 1, "reason": "a"}, {"choice": 2, "reason": "b"}]',
    },
    {
        "match": "output a list of relevant sub-questions",
        "text": f"```json\n{msgspec.json.encode(SUB_QUESTIONS).decode()}\n```",
    },
    {"match": "A list of documents is shown below", "text": "Doc: 2, Relevance: 8"},
    {"match": "evaluate if the response for the query", "text": "YES"},
    {"match": "REACT.*Observation", "text": "Thought: I know.\nAnswer: It is 42."},
    {
        "match": "REACT",
        "text": 'Thought: I add.\nAction: add\nAction Input: {"a": 40, "b": 2}',
    },
    {"match": r"CALL.*\b42\b", "text": "It is 42."},
    {"match": "CALL", "text": CALL},
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "script.json"
    script.write_bytes(msgspec.json.encode(SCRIPT))
    with Client(app=create_app(Config(engine="fake", data=folder, script=script))) as client:
        yield client


@pytest.fixture
async def llm(scripted: Client) -> AsyncIterator[Conure]:
    llm = Conure(client=scripted, temperature=0, max_tokens=200, context_window=8000)
    yield llm
    await llm._clients.aclose()


def small(llm: Conure) -> Conure:
    """An LLM with a context window for few nodes."""
    return llm.model_copy(update={"context_window": 1500})


def tools(llm: Conure) -> list[QueryEngineTool]:
    metadata = [ToolMetadata(name=name, description=f"about {name}") for name in ("one", "two")]
    engines = engine(small(llm), "refine"), engine(small(llm), "tree_summarize")
    return [
        QueryEngineTool(query_engine=each, metadata=data)
        for each, data in zip(engines, metadata, strict=True)
    ]


def routed(llm: Conure, selector: Any) -> RouterQueryEngine:
    tree = TreeSummarize(llm=llm)
    return RouterQueryEngine(selector, tools(llm), llm=llm, summarizer=tree)


def sub_questions(llm: Conure) -> SubQuestionQueryEngine:
    return SubQuestionQueryEngine(
        LLMQuestionGenerator.from_defaults(llm=llm),
        get_response_synthesizer(llm=llm),
        tools(llm),
        verbose=False,
        use_async=False,
    )


class Engine(NamedTuple):
    """A query engine, and how many of its calls are not answered from the plan.

    In an awaited run, some versions of LlamaIndex make several calls at the same time, and more of
    them may be unplanned.
    """

    make: Callable[[Conure], Any]
    num_unplanned: int
    max_unplanned_awaited: int


ENGINES: dict[str, Engine] = {
    "a router to one": Engine(
        lambda llm: routed(llm, LLMSingleSelector.from_defaults(llm=llm)), 1, 1
    ),
    "a router to several": Engine(
        lambda llm: routed(llm, LLMMultiSelector.from_defaults(llm=llm)), 1, 1
    ),
    "sub-questions": Engine(sub_questions, 1, 1),
    "several steps": Engine(
        lambda llm: MultiStepQueryEngine(
            engine(small(llm)),
            StepDecomposeQueryTransform(llm=llm),
            response_synthesizer=get_response_synthesizer(llm=llm),
            num_steps=2,
        ),
        2,
        2,
    ),
    "citations": Engine(
        lambda llm: CitationQueryEngine(
            Given(nodes(3)),
            llm=llm,
            response_synthesizer=get_response_synthesizer(
                llm=small(llm), response_mode=ResponseMode.REFINE
            ),
            citation_chunk_size=128,
            citation_chunk_overlap=10,
        ),
        0,
        0,
    ),
    "a reranking model": Engine(
        lambda llm: RetrieverQueryEngine(
            Given(nodes(4, sentences=5)),
            get_response_synthesizer(llm=llm),
            node_postprocessors=[LLMRerank(llm=llm, choice_batch_size=2, top_n=2)],
        ),
        0,
        2,
    ),
    "queries written by the model": Engine(
        lambda llm: RetrieverQueryEngine(
            QueryFusionRetriever([Given(nodes(3))], llm=llm, num_queries=3, use_async=False),
            get_response_synthesizer(llm=small(llm), response_mode=ResponseMode.REFINE),
        ),
        1,
        1,
    ),
}


@pytest.mark.parametrize("name", ENGINES)
async def test_accelerated_query_engine_returns_the_same(
    llm: Conure, pair: Callable[[Any], Pair], name: str
) -> None:
    if name == "citations" and not RESERVES_ANSWERS:
        pytest.skip("the sentence splitter of this core needs data of NLTK")
    made = ENGINES[name]
    both = pair(made.make(llm))
    report = both.same(lambda app: app.query("Why?"))
    assert len(report.calls) - report.num_planned == made.num_unplanned
    assert report.num_planned > 0
    assert report.num_wasted == 0
    assert len(report.programs) == 1
    report = await both.asame(lambda app: app.aquery("Why?"), in_order=False)
    assert len(report.calls) - report.num_planned <= made.max_unplanned_awaited
    assert report.num_wasted == 0


def memory(llm: Conure) -> ChatMemoryBuffer:
    return ChatMemoryBuffer.from_defaults(llm=llm)


CHATS: dict[str, Callable[[Conure], Any]] = {
    "simple": lambda llm: SimpleChatEngine.from_defaults(llm=llm, memory=memory(llm)),
    "context": lambda llm: ContextChatEngine.from_defaults(
        Given(nodes(2)), llm=llm, memory=memory(llm)
    ),
    "condensed question": lambda llm: CondenseQuestionChatEngine.from_defaults(
        engine(small(llm), "refine", streaming=True), llm=llm, memory=memory(llm)
    ),
    "condensed and context": lambda llm: CondensePlusContextChatEngine.from_defaults(
        Given(nodes(2)), llm=llm, memory=memory(llm)
    ),
}


NUM_CHAT_CALLS = {
    "simple": (1, 1),
    "context": (1, 1),
    "condensed question": (4, 5),
    "condensed and context": (1, 2),
}
"""Calls of the first message, and of the second one, which has a history to condense."""


@pytest.mark.parametrize("name", CHATS)
async def test_chat_engine_streams_one_answer_and_keeps_the_history(
    llm: Conure, submitted: list[str], name: str
) -> None:
    plain, fast = CHATS[name](llm), accelerate(CHATS[name](llm))
    texts_and_history: list[list[str]] = []
    reports: list[Report] = []
    for app in (plain, fast):
        first = await app.astream_chat("Why?")
        if (writer := first.awrite_response_to_history_task) is not None:
            # LlamaIndex drops the text if the event loop is late: it reads with a timeout of 0.1 s,
            # and gives up at the first one after the text has been written.
            await writer
        texts = ["".join([piece async for piece in first.async_response_gen()])]
        if app is fast:
            reports.append(explain(fast))
        second = await asyncio.to_thread(app.stream_chat, "And how?")
        texts.append(await asyncio.to_thread("".join, second.response_gen))
        async with asyncio.timeout(60):
            while len(app.chat_history) < 4:  # noqa: ASYNC110 - LlamaIndex writes in a thread
                await asyncio.sleep(0.01)
        history = [str(each.content) for each in app.chat_history]
        texts_and_history.append([*texts, *history])
    assert texts_and_history[0] == texts_and_history[1]
    reports.append(explain(fast))
    assert tuple(len(report.calls) for report in reports) == NUM_CHAT_CALLS[name]
    for report in reports:
        assert report.num_wasted == 0
        assert len(report.programs) == 1
    await all_ended(llm.connection(), submitted)
    for report in reports:
        assert llm.connection().attach(report.programs[0]).status().status == "done"


def test_chat_stream_may_be_collected_on_the_thread_that_sends_requests(tmp_path: Path) -> None:
    slow = Config(engine="fake", data=tmp_path, time_per_output_token=0.01)
    with Client(app=create_app(slow)) as client:
        llm = Conure(client=client, temperature=0, max_tokens=60, context_window=8000)
        fast = accelerate(CHATS["simple"](llm))
        texts = fast.stream_chat("Tell a long story.").response_gen
        next(texts)
        cycle: list[object] = [texts]
        cycle.append(cycle)
        del texts, cycle
        is_collected = threading.Event()
        client.io_thread.wake(gc.collect)
        client.io_thread.wake(is_collected.set)
        assert is_collected.wait(60), "the collection waits for the reader of the stream"
        assert str(fast.chat("Is it over?"))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


AGENTS: dict[str, Callable[[Conure], Any]] = {
    "REACT": lambda llm: ReActAgent(name="r", description="adds", tools=[add], llm=llm),
    "CALL": lambda llm: FunctionAgent(name="f", description="adds", tools=[add], llm=llm),
    "CALL many": lambda llm: AgentWorkflow(
        agents=[
            FunctionAgent(
                name=name, description="adds", tools=[add], llm=llm, can_handoff_to=[other]
            )
            for name, other in (("f", "g"), ("g", "f"))
        ],
        root_agent="f",
    ),
}


# LlamaIndex reads all attributes of an agent, including deprecated ones.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("prompt", AGENTS)
async def test_agent_calls_tools_in_one_program(llm: Conure, prompt: str) -> None:
    app = AGENTS[prompt](llm)
    fast = accelerate(app)
    seen: list[list[str]] = []
    for agent in (app, fast):
        handler = agent.run(user_msg=prompt)
        names = [type(event).__name__ async for event in handler.stream_events()]
        # The number of pieces of a text depends on timing.
        seen.append([name for name in names if name != "AgentStream"])
        assert str(await handler) == "It is 42."
    assert seen[0] == seen[1]
    assert "ToolCallResult" in seen[0]
    assert len(explain(fast).calls) == 2
    assert len(explain(fast).programs) == 1


class Question(InputRequiredEvent):
    prefix: str


class Response(HumanResponseEvent):
    response: str


class HumanInTheLoop(Workflow):
    """Waits for the response of a human between two calls."""

    def __init__(self, llm: Conure) -> None:
        super().__init__(timeout=60)
        self.llm = llm

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> StopEvent:
        first = (await self.llm.acomplete("a")).text
        answer = await ctx.wait_for_event(Response, waiter_event=Question(prefix=first))
        await ctx.store.set("response", answer.response)
        return StopEvent(result=first + (await self.llm.acomplete(answer.response)).text)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_waiting_workflow_stays_in_its_program(
    llm: Conure, submitted: list[str], is_cancelled: bool
) -> None:
    outcomes: list[str] = []
    for app in (HumanInTheLoop(llm), accelerate(HumanInTheLoop(llm))):
        handler = app.run()
        async for event in handler.stream_events():
            if isinstance(event, Question) and is_cancelled:
                await handler.cancel_run()
            elif isinstance(event, Question):
                assert handler.ctx is not None
                handler.ctx.send_event(Response(response="yes"))
        try:
            outcomes.append(str(await handler))
        except Exception as problem:
            outcomes.append(type(problem).__name__)
    assert outcomes[0] == outcomes[1]
    assert ("Cancelled" in outcomes[0]) is is_cancelled
    await all_ended(llm.connection(), submitted)


def test_evaluator_inside_query_engine_is_planned(
    llm: Conure, pair: Callable[[Any], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)
    app = RetryQueryEngine(engine(small(llm)), RelevancyEvaluator(llm=llm))
    report = pair(app).same(lambda app: app.query("Why?"))
    assert report.num_planned == len(report.calls) > 2
