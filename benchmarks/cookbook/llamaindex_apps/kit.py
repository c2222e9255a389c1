"""What the LlamaIndex apps share: documents, an embedding without a model, readers of answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, NamedTuple

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import BaseNode, TextNode

QUESTION = "How is green tea made?"

SCRIPT = [
    {"match": "return the choice that is most relevant", "text": "ANSWER: 2, it fits"},
    {"match": "A list of documents is shown below", "text": "Doc: 2, Relevance: 8"},
    {
        "match": r"extract up to \d+ knowledge triplets",
        "text": "(tea, comes from, leaves)\n(leaves, are dried in, pans)",
    },
    {"match": "generate synonyms or related keywords", "text": "Tea^Leaves"},
    {"match": "Here is the original query:.*Answered", "text": '{"passing": true}'},
    {
        "match": "Here is the original query:",
        "text": '{"passing": false, "feedback": "Say more."}',
    },
    {"match": "evaluate if the response", "text": "YES"},
    {"match": "SQLQuery:", "text": "SELECT name, price FROM teas ORDER BY name"},
]
"""Answers of the model that the apps parse; all others are words."""


class LlamaIndexApp(NamedTuple):
    """An app, and how it is run."""

    part: Any
    """What `accelerate` takes: an engine, a pipeline or a Workflow. None: the app is a script."""
    run: Callable[[Any], Any] | None
    """Run the part with blocking calls; None for a Workflow, which has none."""
    arun: Callable[[Any], Awaitable[Any]]
    """`run`, as a coroutine."""


class HashedWords(BaseEmbedding):
    """Embeds a text as the counts of its words in 32 buckets."""

    @classmethod
    def class_name(cls) -> str:
        return "HashedWords"

    def _get_text_embedding(self, text: str) -> list[float]:
        counts = [0.0] * 32
        for word in text.lower().split():
            counts[blake2b(word.encode(), digest_size=1).digest()[0] % 32] += 1.0
        return counts

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LlamaIndexKit:
    """Parts with one LLM."""

    def __init__(self, llm: LLM, *, streaming: bool = False) -> None:
        """Make parts that answer whole, or in streams."""
        self.llm = llm
        self.streaming = streaming
        self.embedding = HashedWords(model_name="words")

    def synthesizer(self, mode: str) -> Any:
        """Return a response synthesizer."""
        return get_response_synthesizer(
            llm=self.llm,
            response_mode=ResponseMode(mode),
            streaming=self.streaming,
            use_async=False,
        )

    def index(self, nodes: list[BaseNode]) -> VectorStoreIndex:
        """Return a vector index of nodes."""
        return VectorStoreIndex(nodes, embed_model=self.embedding)

    def engine(self, mode: str, top_k: int = 4, about: str = "tea") -> RetrieverQueryEngine:
        """Return a query engine on the chunks of the documents."""
        index = self.index(chunks(documents(about=about)))
        return RetrieverQueryEngine(
            index.as_retriever(similarity_top_k=top_k), self.synthesizer(mode)
        )


def documents(count: int = 4, about: str = "tea") -> list[Document]:
    """Return short texts, with ids."""
    return [
        Document(
            id_=f"{about}-{n}",
            text=f"Chapter {n} is on {about}. " + f"Leaf {n} of {about} is dried, step {n}. " * 20,
        )
        for n in range(count)
    ]


def chunks(given: list[Document], size: int = 160) -> list[BaseNode]:
    """Split documents; the ids of the nodes are the same in every run."""
    nodes = TokenTextSplitter(chunk_size=size, chunk_overlap=0).get_nodes_from_documents(given)
    return [
        TextNode(id_=f"{node.ref_doc_id}/{n}", text=node.get_content(), metadata=node.metadata)
        for n, node in enumerate(nodes)
    ]


def answer_of(response: Any) -> list[str]:
    """Return the text of a response and the ids of its sources; read its stream, if it is one."""
    if hasattr(response, "get_response"):
        response = response.get_response()
    return [str(response), *(each.node.get_content()[:40] for each in response.source_nodes)]


async def aanswer_of(response: Any) -> list[str]:
    """`answer_of`, for coroutines."""
    made = getattr(response, "aget_response", None) or getattr(response, "get_response", None)
    if made is not None:
        response = made()
        response = await response if hasattr(response, "__await__") else response
    return [str(response), *(each.node.get_content()[:40] for each in response.source_nodes)]


def queried(engine: Any) -> LlamaIndexApp:
    """Return a query engine as an app."""

    async def ask(app: Any) -> list[str]:
        return await aanswer_of(await app.aquery(QUESTION))

    return LlamaIndexApp(engine, lambda app: answer_of(app.query(QUESTION)), ask)
