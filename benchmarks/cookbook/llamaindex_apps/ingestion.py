"""Apps that read many documents: metadata, summaries of summaries, questions and checks."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.evaluation import BatchEvalRunner, FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.extractors import (
    DocumentContextExtractor,
    KeywordExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.storage.docstore import SimpleDocumentStore

from .kit import LlamaIndexApp, LlamaIndexKit, chunks, documents


def metadata_of(nodes: Any) -> list[dict[str, Any]]:
    """Return the metadata of nodes."""
    return [dict(node.metadata) for node in nodes]


def metadata_pipeline(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Split documents; add a title, keywords, a summary and questions to every chunk."""
    llm: Any = kit.llm
    pipeline = IngestionPipeline(
        transformations=[
            TokenTextSplitter(chunk_size=160, chunk_overlap=0),
            TitleExtractor(llm=llm, nodes=2, show_progress=False),
            KeywordExtractor(llm=llm, keywords=3, show_progress=False),
            SummaryExtractor(llm=llm, summaries=["self"], show_progress=False),
            QuestionsAnsweredExtractor(llm=llm, questions=2, show_progress=False),
        ],
        disable_cache=True,
    )

    def run(app: Any) -> Any:
        return metadata_of(app.run(documents=documents(3)))

    async def arun(app: Any) -> Any:
        return metadata_of(await app.arun(documents=documents(3)))

    return LlamaIndexApp(pipeline, run, arun)


def contextual_chunks(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Describe the place of every chunk in its document."""
    given = documents()
    store = SimpleDocumentStore()
    store.add_documents(given)
    pipeline = IngestionPipeline(
        transformations=[
            TokenTextSplitter(chunk_size=160, chunk_overlap=0),
            DocumentContextExtractor(
                docstore=store, llm=kit.llm, max_output_tokens=200, show_progress=False
            ),
        ],
        disable_cache=True,
    )

    def run(app: Any) -> Any:
        return metadata_of(app.run(documents=given))

    async def arun(app: Any) -> Any:
        return metadata_of(await app.arun(documents=given))

    return LlamaIndexApp(pipeline, run, arun)


def summaries_of_clusters(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Summarise groups of chunks, then the summaries, as a tree over clusters does."""
    groups = [[node.get_content() for node in chunks([each])] for each in documents(3)]
    tree, refine = (
        LlamaIndexKit(kit.llm).synthesizer("tree_summarize"),
        LlamaIndexKit(kit.llm).synthesizer("refine"),
    )

    def run(_: Any) -> Any:
        found = [str(tree.get_response("Summarise the chapter.", group)) for group in groups]
        return str(refine.get_response("What do the chapters share?", found))

    async def arun(_: Any) -> Any:
        made = (tree.aget_response("Summarise the chapter.", group) for group in groups)
        found = [str(each) for each in await asyncio.gather(*made)]
        return str(await refine.aget_response("What do the chapters share?", found))

    return LlamaIndexApp(None, run, arun)


def question_dataset(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Let the model ask a question about every chunk, and answer it from the chunk."""
    question = PromptTemplate("Text: {text}\nAsk one exam question about the text.")
    answer = PromptTemplate("Text: {text}\nQuestion: {question}\nAnswer from the text.")
    texts = [node.get_content() for node in chunks(documents(2))]

    def run(_: Any) -> Any:
        made = []
        for text in texts:
            asked = kit.llm.predict(question, text=text)
            made.append((asked, kit.llm.predict(answer, text=text, question=asked)))
        return made

    async def of_text(text: str) -> tuple[str, str]:
        asked = await kit.llm.apredict(question, text=text)
        return asked, await kit.llm.apredict(answer, text=text, question=asked)

    async def arun(_: Any) -> Any:
        return list(await asyncio.gather(*map(of_text, texts)))

    return LlamaIndexApp(None, run, arun)


def graded_answers(kit: LlamaIndexKit) -> LlamaIndexApp:
    """Answer questions, and let the model grade each answer in two respects."""
    engine = LlamaIndexKit(kit.llm).engine("refine", top_k=3)
    questions = ["How is tea dried?", "What is chapter 2 on?"]

    async def arun(_: Any) -> Any:
        runner = BatchEvalRunner(
            {"faith": FaithfulnessEvaluator(llm=kit.llm), "use": RelevancyEvaluator(llm=kit.llm)},
            workers=4,
        )
        graded = await runner.aevaluate_queries(engine, queries=questions)
        return {
            name: [(each.query, each.response, each.feedback) for each in rows]
            for name, rows in graded.items()
        }

    return LlamaIndexApp(None, lambda app: asyncio.run(arun(app)), arun)


def ingestion_apps(kit: LlamaIndexKit) -> dict[str, LlamaIndexApp]:
    """Return the apps of this module by name."""
    made = (
        metadata_pipeline,
        contextual_chunks,
        summaries_of_clusters,
        question_dataset,
        graded_answers,
    )
    return {each.__name__: each(kit) for each in made}
