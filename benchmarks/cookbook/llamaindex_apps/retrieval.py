"""Apps that search in their own index before they answer."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core import (
    DocumentSummaryIndex,
    PropertyGraphIndex,
    Settings,
    SQLDatabase,
    StorageContext,
    TreeIndex,
)
from llama_index.core.evaluation import GuidelineEvaluator
from llama_index.core.indices.document_summary import DocumentSummaryIndexLLMRetriever
from llama_index.core.indices.property_graph import LLMSynonymRetriever, SimpleLLMPathExtractor
from llama_index.core.indices.query.query_transform.feedback_transform import (
    FeedbackQueryTransformation,
)
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    get_leaf_nodes,
)
from llama_index.core.query_engine import (
    NLSQLTableQueryEngine,
    RetrieverQueryEngine,
    RetryGuidelineQueryEngine,
)
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, insert
from sqlalchemy.pool import StaticPool

from .kit import (
    QUESTION,
    LlamaIndexApp,
    LlamaIndexKit,
    aanswer_of,
    answer_of,
    chunks,
    documents,
    queried,
)


def child_id(number: int, parent: BaseNode) -> str:
    """Return an id that is the same in every run; equally good nodes are ordered by it."""
    return f"{parent.node_id}/{number}"


def auto_merging(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Search small chunks; read the larger chunks that most of them belong to."""
    sizes = {"large": 512, "small": 128}
    parser = HierarchicalNodeParser(
        node_parser_ids=[*sizes],
        node_parser_map={
            name: SentenceSplitter(chunk_size=size, chunk_overlap=0, id_func=child_id)
            for name, size in sizes.items()
        },
    )
    nodes = parser.get_nodes_from_documents(documents())
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents(nodes)
    leaves = kit.index(get_leaf_nodes(nodes))
    small: Any = leaves.as_retriever(similarity_top_k=6)
    retriever = AutoMergingRetriever(small, storage)
    return queried(RetrieverQueryEngine(retriever, kit.synthesizer("refine")))


def document_summaries(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Summarise every document; let the model choose one by its summary, and read it."""

    def build() -> RetrieverQueryEngine:
        index = DocumentSummaryIndex.from_documents(
            documents(),
            llm=kit.llm,
            transformations=[],
            response_synthesizer=LlamaIndexKit(kit.llm).synthesizer("tree_summarize"),
            embed_model=kit.embedding,
        )
        retriever = DocumentSummaryIndexLLMRetriever(index, llm=kit.llm)
        return RetrieverQueryEngine(retriever, kit.synthesizer("compact"))

    def run(_: Any) -> Any:
        return answer_of(build().query(QUESTION))

    async def arun(_: Any) -> Any:
        engine = await asyncio.to_thread(build)
        return await aanswer_of(await engine.aquery(QUESTION))

    return LlamaIndexApp(None, run, arun)


def knowledge_graph(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Extract facts from every chunk to a graph; search the graph by the model's keywords."""

    def build() -> RetrieverQueryEngine:
        index = PropertyGraphIndex(
            chunks(documents()),
            llm=kit.llm,
            kg_extractors=[SimpleLLMPathExtractor(llm=kit.llm, num_workers=4)],
            embed_model=kit.embedding,
            embed_kg_nodes=False,
            use_async=False,
        )
        search = LLMSynonymRetriever(index.property_graph_store, llm=kit.llm)
        retriever = index.as_retriever(sub_retrievers=[search])
        return RetrieverQueryEngine(retriever, kit.synthesizer("tree_summarize"))

    def run(_: Any) -> Any:
        return answer_of(build().query(QUESTION))

    async def arun(_: Any) -> Any:
        engine = await asyncio.to_thread(build)
        return await aanswer_of(await engine.aquery(QUESTION))

    return LlamaIndexApp(None, run, arun)


def tree_index(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Build a tree of summaries; let the model go down to the leaf that answers."""

    def build() -> RetrieverQueryEngine:
        index = TreeIndex(chunks(documents()), llm=kit.llm, num_children=3)
        retriever = index.as_retriever(retriever_mode="select_leaf")
        return RetrieverQueryEngine(retriever, kit.synthesizer("refine"))

    def run(_: Any) -> Any:
        return answer_of(build().query(QUESTION))

    async def arun(_: Any) -> Any:
        engine = await asyncio.to_thread(build)
        return await aanswer_of(await engine.aquery(QUESTION))

    return LlamaIndexApp(None, run, arun)


def retry_by_guideline(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Answer; check the answer against a guideline; answer again with the feedback.

    LlamaIndex makes the second engine with the LLM of its settings.
    """
    Settings.llm = kit.llm
    return queried(
        RetryGuidelineQueryEngine(
            kit.engine("refine"),
            GuidelineEvaluator(llm=kit.llm, guidelines="The answer names a leaf."),
            max_retries=2,
            query_transformer=FeedbackQueryTransformation(llm=kit.llm, resynthesize_query=True),
        )
    )


def text_to_sql(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Let the model write SQL, run it, and answer from the rows."""
    database = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    schema = MetaData()
    table = Table(
        "teas", schema, Column("name", String(16), primary_key=True), Column("price", Integer)
    )
    schema.create_all(database)
    with database.begin() as connection:
        connection.execute(
            insert(table), [{"name": "sencha", "price": 9}, {"name": "oolong", "price": 7}]
        )
    return queried(
        NLSQLTableQueryEngine(
            SQLDatabase(database, include_tables=["teas"]),
            llm=kit.llm,
            tables=["teas"],
            embed_model=kit.embedding,
            streaming=kit.streaming,
        )
    )


def retrieval_apps(kit: LlamaIndexKit) -> dict[str, LlamaIndexApp]:
    """Return the apps of this module by name."""
    made = (
        auto_merging,
        document_summaries,
        knowledge_graph,
        tree_index,
        retry_by_guideline,
        text_to_sql,
    )
    return {each.__name__: each(kit) for each in made}
