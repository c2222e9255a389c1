"""Apps of many shapes do the same plain and accelerated, on one server.

The shapes are those that once caused a difference or a plan miss.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.extractors import (
    DocumentContextExtractor,
    KeywordExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.indices.property_graph import SimpleLLMPathExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.response_synthesizers import (
    Accumulate,
    CompactAndRefine,
    Generation,
    Refine,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate
from llama_index.core.schema import (
    Document,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, accelerate, explain
from conure.adapters.speculation import outbox
from conure.server.app import create_app
from conure.server.config import Config

from ..left import all_ended
from .conformance import RESERVES_ANSWERS, Person
from .test_accelerate import Fan, Pair, engine, llm, nodes, pair

__all__ = ["llm", "pair"]

pytestmark = pytest.mark.filterwarnings("ignore:ServiceManager is deprecated:DeprecationWarning")


class Open(Workflow):
    """A Workflow whose only step is a function."""


@step(workflow=Open)
async def answer(ev: StartEvent) -> StopEvent:
    return StopEvent(result=await ev.tree.aget_response("Why?", ev.texts))


async def test_function_steps_belong_to_accelerated_workflow(llm: Conure) -> None:
    given: Any = {"tree": TreeSummarize(llm=llm), "texts": [each.text for each in nodes()]}
    plain, fast = Open(), accelerate(Open())
    assert str(await fast.run(**given)) == str(await plain.run(**given))
    assert explain(fast).num_planned == len(explain(fast).calls) == 3


class Rag(Workflow):
    """Returns a response that is streamed."""

    def __init__(self, llm: Conure) -> None:
        super().__init__(timeout=60)
        self.llm = llm

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        synthesizer = CompactAndRefine(llm=self.llm, streaming=True)
        return StopEvent(result=await synthesizer.asynthesize("Why?", ev.nodes))


async def test_stream_that_a_workflow_returns_is_part_of_its_run(llm: Conure) -> None:
    app: Any = Rag(llm)
    fast = accelerate(app)
    made = []
    for each in (app, fast):
        response = await each.run(nodes=nodes(1))
        made.append("".join([piece async for piece in response.async_response_gen()]))
    assert made[0] == made[1]
    report = explain(fast)
    assert (report.num_planned, len(report.calls), report.num_wasted) == (1, 1, 0)
    assert len(report.programs) == 1


def test_accelerated_workflow_keeps_its_name(client: Client) -> None:
    class Local(Fan):
        pass

    app: Any = Local(Conure(context_window=1300, client=client))
    fast = accelerate(app)
    assert type(fast).__name__ == type(app).__name__
    if hasattr(app, "workflow_name"):  # since llama-index-workflows 2
        assert fast.workflow_name == app.workflow_name


@pytest.mark.parametrize(
    "again",
    [
        accelerate,
        copy.copy,
        copy.deepcopy,
        lambda app: pickle.loads(pickle.dumps(app)),
    ],
    ids=["accelerate", "copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize(
    "make", [Refine, lambda llm: TitleExtractor(llm=llm), engine], ids=["refine", "title", "engine"]
)
def test_copies_of_accelerated_app_are_accelerated(
    make: Callable[..., Any], again: Callable[[Any], Any]
) -> None:
    llm = Conure(base_url="http://127.0.0.1:9", context_window=1300)
    llm._model_infos["default"] = {"id": "m", "max_model_len": 1300}
    app = make(llm=llm)
    made = again(accelerate(app))
    assert isinstance(made, type(app))
    assert vars(type(made))["__conure_of__"] is type(app)
    assert vars(made).keys() == vars(app).keys()


def test_app_accelerated_twice_is_planned(llm: Conure, pair: Callable[[Any], Pair]) -> None:
    report = pair(accelerate(Refine(llm=llm))).same(lambda app: app.synthesize("Why?", nodes(3)))
    assert report.num_planned == len(report.calls) == 3


def test_ingestion_pipeline_is_planned_in_one_program(
    llm: Conure, pair: Callable[[Any], Pair]
) -> None:
    extractors: list[Any] = [
        TitleExtractor(llm=llm, show_progress=False),
        KeywordExtractor(llm=llm, show_progress=False),
    ]
    app = IngestionPipeline(transformations=extractors, disable_cache=True)
    report = pair(app).same(
        lambda app: [each.metadata for each in app.run(nodes=[n.node for n in nodes(4)])],
        in_order=False,
    )
    assert report.num_planned == len(report.calls) == 9
    assert report.num_wasted == 0
    assert len(report.programs) == 1


class Shape(NamedTuple):
    """An app, a question, and the number of its calls that are answered from the plan."""

    make: Callable[[Conure], Any]
    ask: Callable[[Any], Any]
    num_planned: int
    num_calls: int


def synthesized(app: Any) -> list[Any]:
    """Return the parts of a response besides its text."""
    made = app.synthesize("Why?", nodes=nodes())
    return [str(made), type(made), made.metadata, [each.node.node_id for each in made.source_nodes]]


def of_texts(*texts: str, query: str = "Why?", **settings: Any) -> Callable[[Any], Any]:
    return lambda app: app.get_response(query, list(texts), **settings)


TONED = PromptTemplate("{tone} {context_str} {query_str}")
RICH = RichPromptTemplate("{% chat role='user' %}{{ context_str }} {{query_str}}{% endchat %}")
RICH_ANSWER = RichPromptTemplate("{% chat role='user' %} {{ existing_answer }}{% endchat %}")
DRESSED = TextNode(
    text="tea " * 300,
    metadata={"kind": "note", "hidden": "h"},
    excluded_llm_metadata_keys=["hidden"],
    metadata_template="<{key}>{value}",
    text_template="{metadata_str}: {content}",
)
TWICE = ChatPromptTemplate.from_messages(
    [("system", "{existing_answer}"), ("user", "{context_msg} {query_str} {existing_answer}")]
)

SHAPES: dict[str, Shape] = {
    "a tree of structured answers": Shape(
        lambda llm: TreeSummarize(llm=llm, output_cls=Person), synthesized, 3, 3
    ),
    "structured answers side by side": Shape(
        lambda llm: Accumulate(llm=llm, output_cls=Person), synthesized, 6, 6
    ),
    "structured answers, each refined": Shape(
        lambda llm: Refine(llm=llm, output_cls=Person), of_texts("a", "b"), 0, 2
    ),
    "a query alone": Shape(lambda llm: Generation(llm=llm), synthesized, 1, 1),
    "a variable of the user's": Shape(
        lambda llm: TreeSummarize(llm=llm, summary_template=TONED),
        of_texts(*(each.text for each in nodes()), tone="formal"),
        3,
        3,
    ),
    "rich templates that print": Shape(
        lambda llm: Refine(
            llm=llm,
            text_qa_template=RICH,
            refine_template=RichPromptTemplate("{{ existing_answer }}{{context_msg}}{{query_str}}"),
        ),
        synthesized,
        6,
        6,
    ),
    "a rich template of messages for an answer": Shape(
        lambda llm: Refine(llm=llm, text_qa_template=RICH, refine_template=RICH_ANSWER),
        of_texts("a", "b", "c"),
        1,
        3,
    ),
    "a rich template with a filter": Shape(
        lambda llm: Accumulate(
            llm=llm, text_qa_template=RichPromptTemplate("{{ context_str | upper }}{{ query_str }}")
        ),
        of_texts("a", "b"),
        0,
        2,
    ),
    "an answer in two places": Shape(
        lambda llm: Refine(llm=llm, refine_template=TWICE), synthesized, 6, 6
    ),
    "other names for variables": Shape(
        lambda llm: TreeSummarize(
            llm=llm,
            summary_template=PromptTemplate(
                "{mine} {asked}",
                template_var_mappings={"context_str": "mine", "query_str": "asked"},
            ),
        ),
        synthesized,
        3,
        3,
    ),
    "braces and marks in texts": Shape(
        lambda llm: Refine(llm=llm),
        of_texts("\ue0000\ue001 {existing_answer}", "{{x}} \ue0001\ue001", query="{context_str}?"),
        2,
        2,
    ),
    "other alphabets": Shape(
        lambda llm: Refine(llm=llm), of_texts("Тест 🍵 " * 50, "e\u0301" * 99, query="ß?"), 2, 2
    ),
    "equal texts": Shape(lambda llm: Accumulate(llm=llm), of_texts("a", "a", "a"), 3, 3),
    "no texts": Shape(lambda llm: Refine(llm=llm), of_texts(), 0, 0),
    "an empty text first": Shape(lambda llm: Refine(llm=llm), of_texts("", "a"), 2, 2),
    "a text of many windows": Shape(
        lambda llm: CompactAndRefine(llm=llm), of_texts("tea is hot. " * 900), 5, 5
    ),
    "nodes that are dressed": Shape(
        lambda llm: TreeSummarize(llm=llm),
        lambda app: str(app.synthesize("Why?", [NodeWithScore(node=DRESSED)] * 9)),
        4,
        4,
    ),
    "another LLM around it": Shape(
        lambda llm: TreeSummarize(llm=llm.as_structured_llm(Person)), of_texts("a"), 0, 1
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_synthesizer_shape_does_the_same(
    make_llm: Callable[..., Conure], pair: Callable[[Any], Pair], name: str
) -> None:
    if name == "a text of many windows" and not RESERVES_ANSWERS:
        pytest.skip("this core splits a chunk by the length of the answer that it refines")
    shape = SHAPES[name]
    max_tokens = 200 if "structured" in name or "another" in name else 40
    llm = make_llm(context_window=1500, max_tokens=max_tokens, system_prompt="{query_str}")
    report = pair(shape.make(llm)).same(shape.ask)
    assert (report.num_planned, len(report.calls)) == (shape.num_planned, shape.num_calls)
    assert report.num_wasted == 0
    assert len(report.notes) == (report.num_planned == 0 < len(report.calls))


def test_synthesizer_that_cannot_stream_submits_nothing(llm: Conure, submitted: list[str]) -> None:
    for app in (Accumulate(llm=llm, streaming=True), CompactAndAccumulate(llm=llm, streaming=True)):
        with pytest.raises(ValueError, match="Unable to stream"):
            accelerate(app).synthesize("Why?", nodes())
    assert submitted == []


@pytest.mark.parametrize(
    "function", ["completion_to_prompt", "messages_to_prompt", "query_wrapper_prompt", "mapping"]
)
def test_prompt_functions_run_equally_often(make_llm: Callable[..., Conure], function: str) -> None:
    seen: list[str] = []

    def made(*given: Any, **named: Any) -> str:
        seen.append(f"{given}{named}")
        return f"[{given}{named.get('query_str')}]"

    wrapper = PromptTemplate("{x}", function_mappings={"x": made})
    value = wrapper if function == "query_wrapper_prompt" else made
    settings: dict[str, Any] = {} if function == "mapping" else {function: value}
    mappings: Any = {"query_str": made} if function == "mapping" else {}
    template: Any = PromptTemplate("{context_str} {query_str}", function_mappings=mappings)
    if function == "messages_to_prompt":
        template = ChatPromptTemplate.from_messages([("user", "{context_str} {query_str}")])
    llm = make_llm(context_window=1300, is_chat_model=False, **settings)
    plain = Refine(llm=llm, text_qa_template=template)
    fast = accelerate(plain)
    plain.synthesize("Why?", nodes(3))
    ran, seen[:] = list(seen), []
    fast.synthesize("Why?", nodes(3))
    assert seen == ran != []
    assert explain(fast).num_planned == 0


ITERATED: dict[str, tuple[Callable[[Conure], Any], Callable[[Any, Any], Any]]] = {
    "extract": (lambda llm: KeywordExtractor(llm=llm), lambda app, found: app.extract(found)),
    "call": (lambda llm: SimpleLLMPathExtractor(llm=llm), lambda app, found: app(found)),
    "get_response": (
        lambda llm: TreeSummarize(llm=llm),
        lambda app, found: app.get_response("Why?", (each.text for each in found)),
    ),
}


@pytest.mark.parametrize("way", ITERATED)
def test_iterator_is_read_by_the_app_alone(llm: Conure, way: str) -> None:
    make, ask = ITERATED[way]
    app = make(llm)
    fast = accelerate(app)
    found = [TextNode(id_=f"n{n}", text=f"Fact {n}.") for n in range(3)]
    assert str(ask(fast, iter(found))) == str(ask(app, found))
    report = explain(fast)
    assert (report.num_planned, report.num_wasted) == (0, 0)
    assert "is an iterator, which can be read only once" in report.notes[0]


def test_llm_that_overrides_a_method_is_not_planned(client: Client) -> None:
    class Redacting(Conure):
        def chat(self, messages: Any, **kwargs: Any) -> Any:
            redacted = [each.model_copy(deep=True) for each in messages]
            for each in redacted:
                each.content = (each.content or "").replace("Fact", "...")
            return super().chat(redacted, **kwargs)

    llm = Redacting(client=client, temperature=0, max_tokens=40, context_window=1300)
    plain = TreeSummarize(llm=llm)
    fast = accelerate(plain)
    assert str(fast.synthesize("Why?", nodes())) == str(plain.synthesize("Why?", nodes()))
    report = explain(fast)
    assert (report.num_planned, report.num_wasted) == (0, 0)
    assert "its LLM is a Redacting, which overrides 'chat'" in report.notes[0]


def test_llm_with_other_defaults_and_methods_is_planned(client: Client) -> None:
    class Calm(Conure):
        temperature: float | None = 0
        context_window: int | None = 1300
        _seen: list[str] = []  # noqa: RUF012 - pydantic copies it

        @classmethod
        def class_name(cls) -> str:
            return "calm"

        def own(self) -> None:
            pass

    fast = accelerate(TreeSummarize(llm=Calm(client=client, max_tokens=40)))
    fast.synthesize("Why?", nodes())
    assert explain(fast).num_planned == 3


@pytest.mark.skipif("rate_limiter" not in BaseLLM.model_fields, reason="new in core 0.14")
def test_llm_with_a_rate_limiter_is_not_planned(make_llm: Callable[..., Conure]) -> None:
    class Limiter:
        num_acquired = 0

        def acquire(self) -> None:
            self.num_acquired += 1

        async def async_acquire(self) -> None:
            self.num_acquired += 1

    limiter = Limiter()
    fast = accelerate(Accumulate(llm=make_llm(context_window=1300, rate_limiter=limiter)))
    fast.synthesize("Why?", nodes(3))
    report = explain(fast)
    assert (report.num_planned, report.num_wasted) == (0, 0)
    assert limiter.num_acquired == len(report.calls) == 3
    assert "rate limiter" in report.notes[0]


def test_extractor_that_refuses_a_document_is_not_planned(llm: Conure) -> None:
    docstore = SimpleDocumentStore()
    docstore.add_documents([Document(text="Fact. " * 40, doc_id="long")])
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="long")}
    extractor = DocumentContextExtractor(
        docstore, llm=llm, max_context_length=10, oversized_document_strategy="error"
    )
    fast = accelerate(extractor)
    with pytest.raises(ValueError, match="is too large"):
        fast.extract([TextNode(text="Fact.", relationships=source)])
    assert explain(fast).num_wasted == 0


async def summarised(app: Any) -> list[str]:
    """Return summaries of many short nodes."""
    many = [TextNode(id_=f"n{n}", text=f"Fact {n}.") for n in range(40)]
    return [str(each) for each in await app.aextract(many)]


async def test_large_run_uses_several_programs(
    client: Client, make_llm: Callable[..., Conure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_BATCH", 4)
    monkeypatch.setattr(outbox, "MAX_NODES", 10)
    app = SummaryExtractor(llm=make_llm(), show_progress=False)
    fast = accelerate(app)
    assert await summarised(fast) == await summarised(app)
    report = explain(fast)
    assert report.num_planned == len(report.calls) == 40
    assert len(report.programs) == 5
    await all_ended(client, report.programs)


async def test_plan_larger_than_a_request_is_sent_in_parts(
    tmp_path: Path, submitted: list[str]
) -> None:
    config = Config(engine="fake", data=tmp_path, max_body=6_000)
    with Client(app=create_app(config)) as client:
        llm = Conure(client=client, temperature=0, max_tokens=5)
        app = SummaryExtractor(llm=llm, show_progress=False)
        fast = accelerate(app)
        assert await summarised(fast) == await summarised(app)
        assert explain(fast).num_planned == 40
        await all_ended(client, submitted)
        await llm._clients.aclose()


async def test_cancelled_app_leaves_no_unretrieved_exception(
    tmp_path: Path, submitted: list[str]
) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    config = Config(engine="fake", data=tmp_path, time_per_call=0.2)
    with Client(app=create_app(config)) as client:
        llm = Conure(client=client, context_window=1300, max_tokens=5)
        asking = asyncio.create_task(accelerate(TreeSummarize(llm=llm)).asynthesize("?", nodes()))
        async with asyncio.timeout(60):
            while not submitted:  # noqa: ASYNC110 - a thread submits
                await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await all_ended(client, submitted)
        for thread in threading.enumerate():
            if thread.name == "conure-events":
                await asyncio.to_thread(thread.join, 10)
        await asyncio.sleep(0)
        await llm._clients.aclose()
    gc.collect()
    assert reported == []
