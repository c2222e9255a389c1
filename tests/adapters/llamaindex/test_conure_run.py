"""The code of a `with conure_run()` block is one run: planned where possible, in one program."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    Document,
    DocumentSummaryIndex,
    KeywordTableIndex,
    MockEmbedding,
    Settings,
)
from llama_index.core.evaluation import FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.extractors import BaseExtractor
from llama_index.core.indices.property_graph import (
    DynamicLLMPathExtractor,
    SchemaLLMPathExtractor,
    SimpleLLMPathExtractor,
)
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.response_synthesizers import (
    Refine,
    ResponseMode,
    TreeSummarize,
    get_response_synthesizer,
)
from llama_index.core.schema import BaseNode, TextNode

from conure.adapters.client import Client, NotReadyError
from conure.adapters.llamaindex import Conure, Report, accelerate, conure_run, explain
from conure.adapters.llamaindex.acceleration.scope import ACTIVE_SCOPE
from conure.server.app import create_app
from conure.server.config import Config

from ...served import served
from ..left import all_ended
from .conformance import RESERVES_ANSWERS
from .test_accelerate import nodes


@pytest.fixture
def llm(make_llm: Callable[..., Conure]) -> Conure:
    return make_llm(context_window=1300)


def documents(count: int = 3) -> list[Document]:
    return [Document(text=f"Fact {n} is here. " * 40, doc_id=f"d{n}") for n in range(count)]


def test_script_is_one_program(llm: Conure) -> None:
    expected = [llm.complete("a").text, str(Refine(llm=llm).synthesize("Why?", nodes=nodes(4)))]
    with conure_run() as report:
        made = [llm.complete("a").text, str(Refine(llm=llm).synthesize("Why?", nodes=nodes(4)))]
    assert made == expected
    assert [call.is_planned for call in report.calls[:2]] == [False, True]
    assert report.num_planned == len(report.calls) - 1
    assert len(report.programs) == 1
    assert ACTIVE_SCOPE.get() is None


async def test_awaited_script_with_tasks_is_one_program(llm: Conure) -> None:
    with conure_run() as report:
        made = await asyncio.gather(*(llm.acomplete(f"{n}") for n in range(4)))
    assert [each.text for each in made] == [llm.complete(f"{n}").text for n in range(4)]
    assert len(report.calls) == 4
    assert len(report.programs) == 1


def test_time_of_a_planned_call_counts_from_the_call_of_the_app(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=0.5, max_sequences=1)
    with Client(app=create_app(config)) as client:
        llm = Conure(client=client, max_tokens=4, timeout=3.0)
        synthesizer = get_response_synthesizer(
            llm=llm, response_mode=ResponseMode("accumulate"), use_async=False
        )
        with conure_run() as report:
            synthesizer.synthesize("Why?", nodes=nodes(8, sentences=1))
    assert report.num_planned == 8


def test_timeouts_are_equal_plain_and_accelerated(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=60.0)
    with Client(app=create_app(config)) as client:
        llm = Conure(client=client, timeout=0.1)

        async def chunks() -> list[str]:
            return [each.text async for each in await llm.astream_complete("a")]

        calls: list[Callable[[], Any]] = [
            lambda: llm.complete("a"),
            lambda: asyncio.run(llm.acomplete("a")),
            lambda: list(llm.stream_complete("a")),
            lambda: asyncio.run(chunks()),
        ]
        found = []
        for call in calls:
            for context in (nullcontext(), conure_run()):
                with pytest.raises(NotReadyError) as problem, context:
                    call()
                found.append(str(problem.value))
    assert set(found) == {"the call has no answer after 0.1 s"}


def test_summary_index_is_built_from_plans(llm: Conure) -> None:
    synthesizer = get_response_synthesizer(
        llm=llm, response_mode=ResponseMode("tree_summarize"), use_async=False
    )

    def build() -> list[str]:
        index = DocumentSummaryIndex.from_documents(
            documents(),
            llm=llm,
            response_synthesizer=synthesizer,
            embed_model=MockEmbedding(embed_dim=2),
            transformations=[TokenTextSplitter(chunk_size=64, chunk_overlap=0)],
        )
        return [index.get_document_summary(f"d{n}") for n in range(3)]

    expected = build()
    with conure_run() as report:
        assert build() == expected
    assert report.num_planned == len(report.calls) == 3
    assert len(report.programs) == 1


@pytest.mark.skipif(not RESERVES_ANSWERS, reason="keywords of this core need data of NLTK")
def test_keyword_index_is_built_in_one_program(llm: Conure) -> None:
    def build() -> dict[str, Any]:
        index = KeywordTableIndex.from_documents(documents(), llm=llm)
        return {name: len(ids) for name, ids in index.index_struct.table.items()}

    expected = build()
    with conure_run() as report:
        assert build() == expected
    assert len(report.calls) == 3
    assert len(report.programs) == 1


@pytest.mark.parametrize("kind", [FaithfulnessEvaluator, RelevancyEvaluator])
async def test_evaluator_is_planned(llm: Conure, kind: Any) -> None:
    judge = kind(llm=llm)
    case: dict[str, Any] = {
        "query": "Why?",
        "response": "It is so.",
        "contexts": [each.node.get_content() for each in nodes(3)],
    }
    expected = await judge.aevaluate(**case)
    with conure_run() as report:
        made = await judge.aevaluate(**case)
    assert (made.feedback, made.score) == (expected.feedback, expected.score)
    assert report.num_planned == len(report.calls) > 0


async def test_concurrent_runs_have_separate_reports(llm: Conure) -> None:
    fast = accelerate(TreeSummarize(llm=llm))

    async def ask(count: int) -> Report:
        with conure_run() as report:
            await fast.asynthesize("Why?", nodes=nodes(count))
        return report

    reports = await asyncio.gather(*map(ask, (1, 4, 8)))
    assert [report.num_planned == len(report.calls) for report in reports] == [True] * 3
    assert len(reports[0].calls) < len(reports[1].calls) < len(reports[2].calls)
    assert len({report.programs[0] for report in reports}) == 3


def test_block_inside_a_run_belongs_to_it(llm: Conure) -> None:
    with conure_run() as outer:
        with conure_run() as inner:
            llm.complete("a")
        llm.complete("b")
    assert inner is outer
    assert len(outer.calls) == 2


async def test_failed_block_leaves_nothing_running(llm: Conure, submitted: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), conure_run():
        llm.complete("a")
        raise ZeroDivisionError
    assert ACTIVE_SCOPE.get() is None
    await all_ended(llm.connection(), submitted)


async def test_answers_that_other_tasks_await_outlive_a_failure(
    tmp_path: Path, submitted: list[str]
) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=0.2)
    with Client(app=create_app(config)) as client:
        llm = Conure(client=client, temperature=0, max_tokens=4)
        waiting: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(0))
        with pytest.raises(ZeroDivisionError), conure_run():
            waiting = asyncio.create_task(llm.acomplete("b"))
            await llm.acomplete("a", max_tokens=1)
            raise ZeroDivisionError
        assert not waiting.done()
        assert (await waiting).text == llm.complete("b").text
        await all_ended(client, submitted)
        await llm._clients.aclose()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_is_outside_of_the_run(tmp_path: Path) -> None:
    with served("--engine", "fake", "--data", str(tmp_path)) as url:
        llm = Conure(base_url=url, temperature=0, max_tokens=4)
        expected = llm.complete("b").text
        with conure_run() as report:
            llm.complete("a")
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # ends a child that waits for an event of its parent
                try:
                    os._exit(0 if llm.complete("b").text == expected else 1)
                finally:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert llm.complete("b").text == expected
    assert len(report.calls) == 2


async def test_an_app_in_a_task_that_outlives_its_run_has_a_run_of_its_own(llm: Conure) -> None:
    fast = accelerate(TreeSummarize(llm=llm))
    has_ended = asyncio.Event()

    async def later() -> str:
        await has_ended.wait()
        return str(await fast.aget_response("Why?", ["a", "b"]))

    with conure_run() as report:
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
    has_ended.set()
    await task
    assert report.calls == []
    assert len(explain(fast).calls) > 0


async def test_the_call_of_a_stream_that_is_never_read_is_cancelled(
    llm: Conure, submitted: list[str]
) -> None:
    with conure_run():
        stream = llm.stream_complete("a", max_tokens=200_000)
    del stream
    gc.collect()
    await all_ended(llm.connection(), submitted)


async def test_stream_that_outlives_its_block_is_whole(llm: Conure, submitted: list[str]) -> None:
    expected = llm.complete("a").text
    with conure_run() as report:
        stream = llm.stream_complete("a")
    assert "".join(piece.delta or "" for piece in stream) == expected
    assert len(report.calls) == 1
    await all_ended(llm.connection(), submitted)


async def test_streamed_response_that_outlives_its_block_is_part_of_the_run(
    llm: Conure, submitted: list[str]
) -> None:
    synthesizer = Refine(llm=llm, streaming=True)
    expected = str(synthesizer.synthesize("Why?", nodes=nodes(1)))
    with conure_run() as report:
        response = synthesizer.synthesize("Why?", nodes=nodes(1))
    assert str(response) == expected
    assert (report.num_planned, len(report.calls), report.num_wasted) == (1, 1, 0)
    await all_ended(llm.connection(), submitted)


async def test_stream_that_is_not_read_before_the_end_is_whole(
    llm: Conure, submitted: list[str]
) -> None:
    expected = llm.complete("a").text
    with conure_run() as report:
        stream = llm.stream_complete("a")
        llm.complete("b")
    assert "".join(piece.delta or "" for piece in stream) == expected
    assert len(report.calls) == 2
    await all_ended(llm.connection(), submitted)


PATH_EXTRACTORS: dict[str, Callable[[Conure], Any]] = {
    "simple": lambda llm: SimpleLLMPathExtractor(llm=llm, num_workers=2),
    "dynamic": lambda llm: DynamicLLMPathExtractor(
        llm=llm, num_workers=2, allowed_entity_types=["Person"], allowed_relation_types=[""]
    ),
    "dynamic with properties": lambda llm: DynamicLLMPathExtractor(
        llm=llm, allowed_entity_props=["age"], allowed_relation_props=["since"]
    ),
    "schema": lambda llm: SchemaLLMPathExtractor(
        llm=llm.model_copy(update={"max_tokens": 400}), num_workers=2, max_triplets_per_chunk=1
    ),
}


def texts() -> list[BaseNode]:
    return [TextNode(id_=f"n{n}", text=f"Fact {n}.", metadata={"page": n}) for n in range(5)]


@pytest.mark.parametrize("name", PATH_EXTRACTORS)
async def test_path_extractor_is_answered_from_its_plan(llm: Conure, name: str) -> None:
    plain = PATH_EXTRACTORS[name](llm)
    fast = accelerate(plain)
    expected = await plain.acall(texts())
    assert str([each.metadata for each in await fast.acall(texts())]) == str(
        [each.metadata for each in expected]
    )
    report = explain(fast)
    assert report.num_planned == len(report.calls) == 5
    assert report.num_wasted == 0
    assert report.notes == []
    assert len(report.programs) == 1


@pytest.mark.parametrize("is_accelerated", [False, True], ids=["in a block", "accelerated"])
def test_called_path_extractor_is_planned_once(llm: Conure, is_accelerated: bool) -> None:
    plain = PATH_EXTRACTORS["simple"](llm)
    extractor = accelerate(plain) if is_accelerated else plain
    with conure_run() as report:
        extractor(texts())
    assert report.num_planned == len(report.calls) == 5
    assert report.num_wasted == 0


async def test_path_extractor_in_a_pipeline_is_planned(llm: Conure) -> None:
    pipeline = IngestionPipeline(transformations=[PATH_EXTRACTORS["simple"](llm)])
    fast = accelerate(pipeline)
    await fast.arun(nodes=texts())
    report = explain(fast)
    assert report.num_planned == len(report.calls) == 5
    assert type(pipeline.transformations[0]) is SimpleLLMPathExtractor


class OwnExtractor(BaseExtractor):
    """Has an LLM in a custom attribute."""

    model: Conure

    async def aextract(self, nodes: Any) -> list[dict[str, str]]:
        return [{"said": (await self.model.acomplete(node.text)).text} for node in nodes]


async def test_part_without_a_known_llm_is_noted(llm: Conure) -> None:
    fast = accelerate(OwnExtractor(model=llm))
    await fast.aextract(texts())
    assert explain(fast).notes == [
        "OwnExtractor.aextract: it has no attribute 'llm' with an LLM",
    ]


def test_synthesizer_without_calls_is_not_noted(
    llm: Conure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)
    for mode in ("no_text", "context_only"):
        fast = accelerate(get_response_synthesizer(response_mode=ResponseMode(mode)))
        fast.synthesize("Why?", nodes=nodes(1))
        assert explain(fast).notes == []


def test_other_code_is_referred_to_the_block(llm: Conure) -> None:
    with pytest.raises(TypeError, match=r"run other code in a `with conure_run\(\):` block"):
        accelerate(llm)
