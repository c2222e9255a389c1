"""`ConureEmbedding` is LlamaIndex's embedding model: same vectors as the server's, in all ways."""

from __future__ import annotations

import math
import pickle
from collections.abc import AsyncIterator, Iterator

import pytest
from llama_index.core import Document, VectorStoreIndex

from conure.adapters.client import Client
from conure.adapters.llamaindex import ConureEmbedding
from conure.server.app import create_app
from conure.server.config import Config


@pytest.fixture(scope="module")
def embedding_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    config = Config(engine="fake", data=tmp_path_factory.mktemp("data"), embeddings=True)
    with Client(app=create_app(config)) as client:
        yield client


@pytest.fixture
async def model(embedding_client: Client) -> AsyncIterator[ConureEmbedding]:
    model = ConureEmbedding(client=embedding_client)
    yield model
    await model.async_connection().close()


async def test_all_ways_give_the_same_vectors(model: ConureEmbedding) -> None:
    texts = [f"text {n}" for n in range(30)]
    vectors = model.get_text_embedding_batch(texts)
    assert all(math.hypot(*each) == pytest.approx(1) for each in vectors)
    assert await model.aget_text_embedding_batch(texts) == vectors
    assert model.get_text_embedding(texts[7]) == vectors[7]
    assert await model.aget_text_embedding(texts[7]) == vectors[7]
    assert model.get_query_embedding(texts[7]) == vectors[7]
    assert await model.aget_query_embedding(texts[7]) == vectors[7]


async def test_index_finds_the_nearest_text(model: ConureEmbedding) -> None:
    documents = [Document(text=text) for text in ("zzzz", "a tree", "0000")]
    index = VectorStoreIndex.from_documents(documents, embed_model=model)
    retriever = index.as_retriever(similarity_top_k=1)
    [found] = retriever.retrieve("tree a")
    assert found.text == "a tree"
    [again] = await retriever.aretrieve("tree a")
    assert again.text == "a tree"


def test_embedding_model_is_serializable() -> None:
    model = ConureEmbedding(base_url="http://127.0.0.1:9", dimensions=8)
    assert model.to_dict()["class_name"] == "conure_embedding"
    assert pickle.loads(pickle.dumps(model)).to_dict() == model.to_dict()


def test_pickled_embedding_model_keeps_the_server() -> None:
    with Client("http://127.0.0.1:9") as client:
        model = ConureEmbedding(client=client)
        made = pickle.loads(pickle.dumps(model))
        assert (made.client, made.base_url) == (None, "http://127.0.0.1:9")
        assert model.connection() is client
