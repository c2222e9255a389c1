"""An accelerated app has the answers and events of the app, and its calls are planned.

Every app runs twice on one server: plain and accelerated.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.extractors import (
    KeywordExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import (
    Refine,
    ResponseMode,
    TreeSummarize,
    get_response_synthesizer,
)
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span.base import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from conure.adapters.client import Client, ServerUnreachableError
from conure.adapters.llamaindex import Conure, Report, accelerate, explain
from conure.adapters.llamaindex.acceleration.scope import ACTIVE_SCOPE
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import RunError

from .conformance import Handler, Person, Recorder

# llama-index-workflows 1 uses what it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:ServiceManager is deprecated:DeprecationWarning")

PLANNED_MODES = ["tree_summarize", "refine", "compact", "accumulate", "compact_accumulate"]


class Given(BaseRetriever):
    """Always finds the same nodes."""

    def __init__(self, found: list[NodeWithScore]) -> None:
        super().__init__()
        self._found = found

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return self._found


def nodes(count: int = 6, *, sentences: int = 60) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(id_=f"n{n}", text=f"Fact {n} is here. " * sentences), score=1)
        for n in range(count)
    ]


def seen(events: Recorder) -> list[tuple[str, str, str]]:
    """Return and clear the recorded events, without the parts that differ between runs."""
    made = []
    for event in events.seen:
        response = getattr(event, "response", None)
        messages = getattr(event, "messages", None) or ""
        prompt = getattr(event, "prompt", "")
        span = (event.span_id or "").partition("-")[0]
        made.append((event.class_name(), span, f"{messages}{prompt}{response}"[:2_000]))
    events.seen.clear()
    return made


def without_programs(what: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [(name, span, text.partition("raw=")[0]) for name, span, text in what]


class Pair:
    """An app, plain and accelerated, and comparisons of the two."""

    def __init__(self, app: Any, events: Recorder) -> None:
        self.plain = app
        self.fast = accelerate(app)
        self._events = events

    def same(self, ask: Callable[[Any], Any], *, in_order: bool = True) -> Report:
        """Compare answers and events; return the report of the accelerated app."""
        self._events.seen.clear()
        expected = ask(self.plain)
        plain_events = seen(self._events)
        made = ask(self.fast)
        self._compare(expected, made, plain_events, in_order=in_order)
        return explain(self.fast)

    async def asame(self, ask: Callable[[Any], Any], *, in_order: bool = True) -> Report:
        """`same`, with await."""
        self._events.seen.clear()
        expected = await ask(self.plain)
        plain_events = seen(self._events)
        made = await ask(self.fast)
        self._compare(expected, made, plain_events, in_order=in_order)
        return explain(self.fast)

    def _compare(
        self, expected: Any, made: Any, plain: list[tuple[str, str, str]], *, in_order: bool
    ) -> None:
        assert str(made) == str(expected)
        theirs, ours = without_programs(plain), without_programs(seen(self._events))
        if not in_order:
            theirs, ours = sorted(theirs), sorted(ours)
        assert ours == theirs


@pytest.fixture
def pair(events: Recorder) -> Callable[[Any], Pair]:
    return lambda app: Pair(app, events)


@pytest.fixture
def llm(make_llm: Callable[..., Conure]) -> Conure:
    return make_llm(context_window=1300)


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("mode", [*PLANNED_MODES, "simple_summarize"])
def test_synthesizer_is_answered_from_its_plan(
    make_llm: Callable[..., Conure], pair: Callable[[Any], Pair], mode: str, is_chat: bool
) -> None:
    llm = make_llm(context_window=1300, is_chat_model=is_chat)
    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode))
    report = pair(synthesizer).same(lambda app: app.synthesize("Why?", nodes=nodes()))
    assert report.num_planned == len(report.calls) >= (1 if mode == "simple_summarize" else 2)
    assert report.num_wasted == 0
    assert report.notes == []
    assert len(report.programs) == 1


@pytest.mark.parametrize("mode", PLANNED_MODES)
async def test_awaited_synthesizer_is_answered_from_its_plan(
    llm: Conure, pair: Callable[[Any], Pair], mode: str
) -> None:
    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode))
    report = await pair(synthesizer).asame(
        lambda app: app.asynthesize("Why?", nodes=nodes()), in_order=False
    )
    assert report.num_planned == len(report.calls) >= 2
    assert report.num_wasted == 0


def test_three_level_tree_is_planned_by_level(
    make_llm: Callable[..., Conure], pair: Callable[[Any], Pair]
) -> None:
    llm = make_llm(context_window=230, max_tokens=40)
    tree = TreeSummarize(llm=llm)
    report = pair(tree).same(lambda app: app.synthesize("Why?", nodes=nodes(12, sentences=20)))
    depth = max(call.path.count("TreeSummarize.get_response") for call in report.calls)
    assert depth >= 3
    assert report.num_planned == len(report.calls)
    assert report.num_wasted == 0


@pytest.mark.parametrize("mode", ["refine", "tree_summarize", "simple_summarize"])
def test_streamed_response_comes_from_the_plan(
    llm: Conure, pair: Callable[[Any], Pair], mode: str
) -> None:
    synthesizer = get_response_synthesizer(
        llm=llm, response_mode=ResponseMode(mode), streaming=True
    )

    def ask(app: Any) -> str:
        response = app.synthesize("Why?", nodes=nodes(3))
        assert isinstance(response, StreamingResponse)
        return "".join(response.response_gen)

    both = pair(synthesizer)
    assert ask(both.plain) == ask(both.fast)
    report = explain(both.fast)
    assert report.num_planned == len(report.calls)
    assert report.num_wasted == 0


def test_planned_answer_is_streamed_while_it_is_generated(tmp_path: Path) -> None:
    app = create_app(Config(engine="fake", data=tmp_path, time_per_output_token=0.01))
    with Client(app=app) as client:
        llm = Conure(
            client=client,
            temperature=0,
            max_tokens=2_000,
            additional_kwargs={"ignore_eos": True},
        )
        fast = accelerate(Refine(llm=llm, streaming=True))
        response = fast.synthesize("Why?", nodes=nodes(1))
        assert isinstance(response, StreamingResponse)
        assert isinstance(response.response_gen, Generator)
        assert next(response.response_gen)
        (program,) = explain(fast).programs
        assert client.attach(program).status().status == "running"
        assert explain(fast).num_planned == 1
        response.response_gen.close()


def test_unread_stream_ends_its_run(llm: Conure) -> None:
    fast = accelerate(Refine(llm=llm, streaming=True))
    response = fast.synthesize("Why?", nodes=nodes(3))
    (program,) = explain(fast).programs
    del response
    run = llm.connection().attach(program)
    for _ in run.events():
        pass
    assert run.status().status in ("done", "cancelled")


async def test_awaited_stream_comes_from_the_plan(llm: Conure) -> None:
    plain = TreeSummarize(llm=llm, streaming=True)
    fast = accelerate(plain)
    made = []
    for app in (plain, fast):
        response: Any = await app.asynthesize("Why?", nodes=nodes(3))
        made.append("".join([piece async for piece in response.async_response_gen()]))
    assert made[0] == made[1]
    assert explain(fast).num_planned == len(explain(fast).calls)


def test_empty_answer_ends_the_plan_only(
    make_llm: Callable[..., Conure], pair: Callable[[Any], Pair]
) -> None:
    # The answer is empty where the engine's first word starts with a stop string.
    llm = make_llm(context_window=1300, stop=list("abcdefghijklm"))
    for mode in PLANNED_MODES:
        synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode))
        report = pair(synthesizer).same(lambda app: app.synthesize("Why?", nodes=nodes()))
        assert report.num_wasted == 0, mode


def test_answer_too_long_for_chunk_is_unplanned(
    make_llm: Callable[..., Conure], pair: Callable[[Any], Pair]
) -> None:
    long = {"min_tokens": 290, "ignore_eos": True}
    llm = make_llm(context_window=700, max_tokens=300, additional_kwargs=long)
    assert llm.metadata.num_output == 300
    tree = TreeSummarize(llm=llm)
    report = pair(tree).same(lambda app: app.synthesize("Why?", nodes=nodes(4, sentences=40)))
    assert report.num_wasted == 0


def engine(llm: Conure, mode: str = "compact", **settings: Any) -> RetrieverQueryEngine:
    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode), **settings)
    return RetrieverQueryEngine(Given(nodes(4)), response_synthesizer=synthesizer)


@pytest.mark.parametrize("mode", PLANNED_MODES)
async def test_query_engine_is_answered_from_plan(
    llm: Conure, pair: Callable[[Any], Pair], mode: str
) -> None:
    both = pair(engine(llm, mode))
    report = both.same(lambda app: app.query("Why?"))
    assert report.num_planned == len(report.calls) >= 2
    assert report.num_wasted == 0
    report = await both.asame(lambda app: app.aquery("Why?"), in_order=False)
    assert report.num_planned == len(report.calls)


def test_calls_before_plan_use_same_program(llm: Conure, pair: Callable[[Any], Pair]) -> None:
    app = TransformQueryEngine(engine(llm, "refine"), HyDEQueryTransform(llm=llm))
    report = pair(app).same(lambda app: app.query("Why?"))
    first, *others = report.calls
    assert (first.is_planned, first.reason) == (False, "not planned")
    assert first.path.startswith("TransformQueryEngine.query > ")
    assert all(call.is_planned for call in others)
    assert len(others) >= 4
    assert len(report.programs) == 1


def test_chat_engine_does_the_same(llm: Conure, pair: Callable[[Any], Pair]) -> None:
    def chat(app: Any) -> str:
        app.reset()
        return f"{app.chat('Why?')} {app.chat('And how?')}"

    app = ContextChatEngine.from_defaults(
        retriever=Given(nodes(1)), llm=llm, memory=ChatMemoryBuffer.from_defaults(llm=llm)
    )
    report = pair(app).same(chat)
    assert [call.is_planned for call in report.calls] == [True]


@pytest.mark.parametrize(
    "kind", [TitleExtractor, KeywordExtractor, QuestionsAnsweredExtractor, SummaryExtractor]
)
async def test_extractor_is_answered_from_its_plan(
    make_llm: Callable[..., Conure], pair: Callable[[Any], Pair], kind: Any
) -> None:
    llm = make_llm()
    texts: Sequence[Any] = [each.node for each in nodes(6, sentences=3)]
    for n, text in enumerate(texts):
        source = RelatedNodeInfo(node_id=f"d{n % 2}")
        text.relationships[NodeRelationship.SOURCE] = source
    report = await pair(kind(llm=llm, show_progress=False)).asame(
        lambda app: app.aextract(texts), in_order=False
    )
    assert report.num_planned == len(report.calls) >= 6
    assert report.num_wasted == 0
    assert report.notes == []


class Part(Event):
    text: str


class Done(Event):
    text: str


class Fan(Workflow):
    """Makes three parallel calls, then summarises the answers."""

    def __init__(self, llm: Conure) -> None:
        super().__init__(timeout=60)
        self.llm = llm
        self.tree = TreeSummarize(llm=llm)

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> Part | None:
        for n in range(3):
            ctx.send_event(Part(text=f"{ev.topic} {n}"))
        return None

    @step(num_workers=3)
    async def ask(self, ev: Part) -> Done:
        return Done(text=(await self.llm.acomplete(ev.text)).text)

    @step
    async def end(self, ctx: Context, ev: Done) -> StopEvent | None:
        made = ctx.collect_events(ev, [Done] * 3)
        if made is None:
            return None
        texts = sorted(each.text * 60 for each in made)
        return StopEvent(result=await self.tree.aget_response("Why?", texts))


async def test_workflow_parts_are_planned_in_one_program(
    make_llm: Callable[..., Conure],
) -> None:
    app = Fan(make_llm(context_window=800))
    fast = accelerate(app)
    expected = await app.run(topic="tea")
    made = await fast.run(topic="tea")
    assert str(made) == str(expected)
    report = explain(fast)
    assert [call.is_planned for call in report.calls[:3]] == [False] * 3
    assert all(call.is_planned for call in report.calls[3:])
    assert len(report.calls) >= 6
    assert report.num_wasted == 0
    assert len(report.programs) == 1


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"output_cls": Person, "streaming": True}, "structured answers (output_cls)"),
        (
            {
                "summary_template": PromptTemplate(
                    "{context_str} {query_str}", function_mappings={"query_str": lambda **_: "q"}
                )
            },
            "function_mappings",
        ),
        (
            {
                "summary_template": PromptTemplate(
                    "{context_str} {query_str}", output_parser=PydanticOutputParser(Person)
                )
            },
            "output parser",
        ),
    ],
)
def test_unplannable_part_runs_and_is_noted(
    make_llm: Callable[..., Conure], settings: Any, note: str
) -> None:
    tree = TreeSummarize(llm=make_llm(max_tokens=200), **settings)
    fast = accelerate(tree)
    assert str(fast.synthesize("Why?", nodes=nodes(2))) == str(
        tree.synthesize("Why?", nodes=nodes(2))
    )
    report = explain(fast)
    assert [call.is_planned for call in report.calls] == [False]
    assert len(report.notes) == 1
    assert report.notes[0].startswith("TreeSummarize.get_response: ")
    assert note in str(report)


def test_subclass_is_not_planned(llm: Conure, pair: Callable[[Any], Pair]) -> None:
    class Mine(TreeSummarize):
        pass

    report = pair(Mine(llm=llm)).same(lambda app: app.synthesize("Why?", nodes=nodes(2)))
    assert report.num_planned == 0
    assert report.notes == ["Mine.get_response: class Mine is not supported"]


def test_user_functions_run_equally_often(llm: Conure) -> None:
    ran: list[str] = []

    class Counting(Given):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            ran.append(query_bundle.query_str)
            return super()._retrieve(query_bundle)

    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode.REFINE)
    fast = accelerate(RetrieverQueryEngine(Counting(nodes(3)), response_synthesizer=synthesizer))
    fast.query("Why?")
    assert ran == ["Why?"]


def test_failing_app_leaves_nothing_running(llm: Conure) -> None:
    class Broken(TreeSummarize):
        pass

    class Raising(Given):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            llm.complete("first")
            raise KeyError("no index")

    fast = accelerate(engine(llm))
    fast._retriever = Raising([])
    with pytest.raises(KeyError, match="no index"):
        fast.query("Why?")
    report = explain(fast)
    status = llm.connection().attach(report.programs[0])
    for _ in status.events():
        pass
    assert status.status().status in ("done", "cancelled")


def test_unreachable_server_raises_same_error() -> None:
    llm = Conure(base_url="http://127.0.0.1:9", max_retries=0, context_window=1300)
    llm._model_infos["default"] = {"id": "m", "max_model_len": 1300}
    fast = accelerate(TreeSummarize(llm=llm))
    with pytest.raises(ServerUnreachableError, match="conure serve"):
        fast.synthesize("Why?", nodes=nodes(3))
    llm.connection().close()


def test_rejected_prompt_raises_same_error(
    make_llm: Callable[..., Conure],
) -> None:
    tree = TreeSummarize(llm=make_llm(context_window=200_000))
    much = nodes(1, sentences=2_000)
    with pytest.raises(Exception, match="tokens") as plain:
        tree.synthesize("Why?", nodes=much)
    with pytest.raises(Exception, match="tokens") as fast:
        accelerate(tree).synthesize("Why?", nodes=much)
    assert type(fast.value) is type(plain.value)
    # The messages differ in the name of the node only.
    assert str(fast.value).partition(": ")[2] == str(plain.value).partition(": ")[2]


def test_code_after_the_run_calls_directly(llm: Conure) -> None:
    left: list[Any] = []

    class Leaving(Given):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            left.append(copy_context())
            return super()._retrieve(query_bundle)

    fast = accelerate(RetrieverQueryEngine(Leaving(nodes(2)), Refine(llm=llm)))
    fast.query("Why?")
    num_calls = len(explain(fast).calls)
    assert left[0].run(llm.complete, "later").text == llm.complete("later").text
    assert len(explain(fast).calls) == num_calls


def test_program_ended_by_server_raises(llm: Conure) -> None:
    class Ending(Given):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            llm.complete("first")
            scope = ACTIVE_SCOPE.get()
            assert scope is not None
            run = llm.connection().attach(scope.report.programs[0])
            run.cancel()
            for _ in run.events():
                pass
            for thread in threading.enumerate():
                if thread.name == "conure-events":
                    thread.join(10)
            return super()._retrieve(query_bundle)

    fast = accelerate(RetrieverQueryEngine(Ending(nodes(2)), Refine(llm=llm)))
    with pytest.raises(RunError, match="ended"):
        fast.query("Why?")


def test_client_can_be_closed_after_the_answer(tmp_path: Path) -> None:
    # pytest reports an exception in a thread as an error.
    app = create_app(Config(engine="fake", data=tmp_path))
    with Client(app=app) as client:
        llm = Conure(client=client, temperature=0, context_window=1300, max_tokens=40)
        fast = accelerate(TreeSummarize(llm=llm))
        assert str(fast.synthesize("Why?", nodes=nodes(3)))
    for thread in threading.enumerate():
        if thread.name == "conure-requests":
            thread.join(10)
            assert not thread.is_alive()


async def test_concurrent_runs_do_not_mix(llm: Conure) -> None:
    fast = accelerate(TreeSummarize(llm=llm))
    queries = [fast.asynthesize(f"Why {n}?", nodes=nodes(3)) for n in range(5)]
    made = [str(each) for each in await asyncio.gather(*queries)]
    plain = TreeSummarize(llm=llm)
    assert made == [str(plain.synthesize(f"Why {n}?", nodes=nodes(3))) for n in range(5)]


def test_app_is_not_modified(llm: Conure) -> None:
    tree = TreeSummarize(llm=llm)
    fast = accelerate(tree)
    assert type(tree) is TreeSummarize
    assert isinstance(fast, TreeSummarize)
    assert type(fast).__name__ == "TreeSummarize"
    assert fast._llm is llm
    fast.synthesize("Why?", nodes=nodes(1))
    with pytest.raises(ValueError, match="not accelerated"):
        explain(tree)
    # Outside of a run its LLM calls the server directly.
    assert llm.chat([ChatMessage("hi")]).raw is not None


def test_only_apps_are_accelerated(llm: Conure) -> None:
    with pytest.raises(TypeError, match="class Conure"):
        accelerate(llm)


class SpanNames(BaseSpanHandler[BaseSpan]):
    """Records the classes and methods of spans."""

    names: list[str] = []  # noqa: RUF012 - pydantic copies it

    @classmethod
    def class_name(cls) -> str:
        return "SpanNames"

    def new_span(self, id_: str, *args: Any, **kwargs: Any) -> None:
        self.names.append(id_.partition("-")[0])

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.fixture
def spans() -> Iterator[SpanNames]:
    root = get_dispatcher()
    handler = SpanNames()
    root.add_span_handler(handler)
    yield handler
    root.span_handlers.remove(handler)


@pytest.mark.parametrize("mode", [*PLANNED_MODES, "simple_summarize"])
def test_spans_of_accelerated_synthesizer_are_the_same(
    llm: Conure, spans: SpanNames, mode: str
) -> None:
    plain = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode))
    plain.synthesize("Why?", nodes())
    expected, spans.names[:] = sorted(spans.names), []
    assert expected
    fast = accelerate(plain)
    fast.synthesize("Why?", nodes())
    assert sorted(spans.names) == expected
    assert explain(fast).num_planned > 0


@pytest.mark.parametrize("mode", [*PLANNED_MODES, "simple_summarize"])
def test_callbacks_of_accelerated_synthesizer_are_the_same(
    make_llm: Callable[..., Conure], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    handler = Handler()
    monkeypatch.setattr(Settings, "_callback_manager", CallbackManager([handler]))
    llm = make_llm(context_window=1300)
    plain = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode))
    plain.synthesize("Why?", nodes())
    expected, handler.starts[:] = sorted(kind for kind, _ in handler.starts), []
    assert "chunking" in expected
    fast = accelerate(plain)
    fast.synthesize("Why?", nodes())
    assert sorted(kind for kind, _ in handler.starts) == expected
    assert explain(fast).num_planned > 0
