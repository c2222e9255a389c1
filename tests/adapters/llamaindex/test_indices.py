"""Indices that an LLM writes are planned: all documents, and one level of a tree at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import DocumentSummaryIndex, KeywordTableIndex, MockEmbedding, TreeIndex
from llama_index.core.indices.common_tree.base import GPTTreeIndexBuilder
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from conure.adapters.llamaindex import Conure, conure_run
from conure.adapters.llamaindex.acceleration import indices
from conure.adapters.llamaindex.acceleration.span_planner import plan_method

from .conformance import RESERVES_ANSWERS
from .test_accelerate import SpanNames, spans

__all__ = ["spans"]

NUM_DOCUMENTS = 4
MODES = [
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.SIMPLE_SUMMARIZE,
]


@pytest.fixture
def llm(make_llm: Callable[..., Conure]) -> Conure:
    return make_llm(context_window=1300)


def nodes(num_documents: int, num_chunks: int = 2) -> list[TextNode]:
    """Return the chunks of some documents; chunks of a document are not next to each other."""
    return [
        TextNode(
            id_=f"n{document}.{chunk}",
            text=f"Fact {chunk} of document {document}.",
            metadata={"page": chunk},
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"d{document}")},
        )
        for chunk in range(num_chunks)
        for document in range(num_documents)
    ]


def summaries(llm: Conure, mode: ResponseMode, kind: type[Any] = DocumentSummaryIndex) -> list[str]:
    """Build an index; return the summary of each document."""
    index = kind(
        nodes(NUM_DOCUMENTS),
        llm=llm,
        response_synthesizer=get_response_synthesizer(llm=llm, response_mode=mode),
        embed_summaries=False,
        embed_model=MockEmbedding(1),
    )
    return [index.get_document_summary(f"d{document}") for document in range(NUM_DOCUMENTS)]


def tree(llm: Conure, num_nodes: int, *, use_async: bool = False) -> list[str]:
    """Build a tree; return the texts of all its nodes."""
    index = TreeIndex(nodes(num_nodes, 1), llm=llm, num_children=3, use_async=use_async)
    graph = index.index_struct
    return [index.docstore.get_node(name).get_content() for name in graph.all_nodes.values()]


@pytest.mark.parametrize("mode", MODES)
def test_summaries_of_all_documents_are_planned_together(llm: Conure, mode: ResponseMode) -> None:
    expected = summaries(llm, mode)
    with conure_run() as report:
        assert summaries(llm, mode) == expected
    assert report.num_planned == len(report.calls)
    assert report.num_wasted == 0
    assert report.notes == []
    assert len(report.programs) == 1


@pytest.mark.skipif(not RESERVES_ANSWERS, reason="keywords of this core need data of NLTK")
@pytest.mark.parametrize("use_async", [False, True])
def test_keywords_of_all_nodes_are_planned_together(llm: Conure, use_async: bool) -> None:
    def build() -> dict[str, set[str]]:
        table = KeywordTableIndex(nodes(4), llm=llm, use_async=use_async).index_struct.table
        return {name: set(ids) for name, ids in table.items()}

    expected = build()
    with conure_run() as report:
        assert build() == expected
    assert report.num_planned == len(report.calls) == 8
    assert report.num_wasted == 0
    assert report.notes == []


def test_subclass_of_a_summary_index_is_not_planned_ahead(llm: Conure) -> None:
    class Own(DocumentSummaryIndex):
        pass

    with conure_run() as report:
        summaries(llm, ResponseMode.TREE_SUMMARIZE, Own)
    assert report.num_wasted == 0
    assert any("class Own is not supported" in note for note in report.notes)


def test_summaries_by_another_llm_are_not_planned_ahead(llm: Conure) -> None:
    other = llm.model_copy()
    synthesizer = get_response_synthesizer(llm=other)
    with conure_run() as report:
        DocumentSummaryIndex(
            nodes(2),
            llm=llm,
            response_synthesizer=synthesizer,
            embed_summaries=False,
            embed_model=MockEmbedding(1),
        )
    assert report.num_wasted == 0
    assert any("another LLM" in note for note in report.notes)


@pytest.mark.parametrize(("num_nodes", "num_summaries"), [(3, 0), (9, 3), (10, 6)])
def test_each_level_of_a_tree_is_planned(llm: Conure, num_nodes: int, num_summaries: int) -> None:
    expected = tree(llm, num_nodes)
    with conure_run() as report:
        found = tree(llm, num_nodes)
    assert sorted(found) == sorted(expected)
    assert report.num_planned == len(report.calls) == num_summaries
    assert report.num_wasted == 0
    assert report.notes == []


def test_tree_whose_calls_run_in_parallel_already_is_not_planned(llm: Conure) -> None:
    with conure_run() as report:
        tree(llm, 9, use_async=True)
    assert (report.num_planned, report.num_wasted) == (0, 0)


def test_index_that_refuses_its_nodes_is_not_planned(llm: Conure) -> None:
    orphans = [TextNode(text=f"Fact {number}.") for number in range(3)]
    with conure_run() as report, pytest.raises(ValueError, match="ref_doc_id"):
        DocumentSummaryIndex(orphans, llm=llm, embed_model=MockEmbedding(1))
    assert report.calls == []
    assert report.num_wasted == 0


def test_large_index_is_planned_in_part(llm: Conure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "MAX_CALLS", 2)
    expected = tree(llm, 12)
    with conure_run() as report:
        assert sorted(tree(llm, 12)) == sorted(expected)
    assert (report.num_planned, report.num_wasted) == (4, 0)
    assert len(report.calls) == 6


def test_methods_are_wrapped_once() -> None:
    indices.watch_methods(plan_method)
    wrapped = vars(GPTTreeIndexBuilder)["build_index_from_nodes"]
    indices.watch_methods(plan_method)
    assert vars(GPTTreeIndexBuilder)["build_index_from_nodes"] is wrapped


def test_building_an_index_has_the_same_spans_after_a_run(llm: Conure, spans: SpanNames) -> None:
    with conure_run():
        summaries(llm, ResponseMode.TREE_SUMMARIZE)
    spans.names.clear()
    summaries(llm, ResponseMode.TREE_SUMMARIZE)
    tree(llm, 9)
    assert spans.names
    assert not any("_add_nodes_to_index" in name or "build_index" in name for name in spans.names)
