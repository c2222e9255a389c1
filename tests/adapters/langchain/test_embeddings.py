"""`ConureEmbeddings` is LangChain's embedding model: same vectors as the server's, in all ways."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator

import pytest
from langchain_core.vectorstores import InMemoryVectorStore

from conure.adapters.client import Client
from conure.adapters.langchain import ConureEmbeddings
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ConureError, ProgramError


@pytest.fixture(scope="module")
def embedding_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    config = Config(engine="fake", data=tmp_path_factory.mktemp("data"), embeddings=True)
    with Client(app=create_app(config)) as client:
        yield client


@pytest.fixture
async def model(embedding_client: Client) -> AsyncIterator[ConureEmbeddings]:
    model = ConureEmbeddings(client=embedding_client)
    yield model
    await model.async_connection().close()


async def test_all_ways_give_the_same_vectors(model: ConureEmbeddings) -> None:
    texts = [f"text {n}" for n in range(100)]
    vectors = model.embed_documents(texts)
    assert len(vectors) == 100
    assert all(math.hypot(*each) == pytest.approx(1) for each in vectors)
    assert await model.aembed_documents(texts) == vectors
    assert model.embed_query(texts[7]) == await model.aembed_query(texts[7]) == vectors[7]
    assert model.embed_documents([]) == []


def test_fewer_dimensions(embedding_client: Client) -> None:
    model = ConureEmbeddings(client=embedding_client, dimensions=40)
    vector = model.embed_query("a tree")
    assert len(vector) == 40
    assert math.hypot(*vector) == pytest.approx(1)


def test_vector_store_finds_the_nearest_text(model: ConureEmbeddings) -> None:
    store = InMemoryVectorStore.from_texts(["zzzz", "a tree", "0000"], model)
    [found] = store.similarity_search("tree a", k=1)
    assert found.page_content == "a tree"


def test_errors_contain_the_remedy(model: ConureEmbeddings, client: Client) -> None:
    with pytest.raises(ProgramError, match="empty text") as refused:
        model.embed_documents(["a", ""])
    assert (refused.value.code, refused.value.path) == ("empty_input", "input[1]")
    with pytest.raises(ConureError, match="--embeddings"):
        ConureEmbeddings(client=client).embed_query("a")
    with pytest.raises(ValueError, match="dimension"):
        ConureEmbeddings(dimension=3)  # type: ignore[call-arg]  # misspelt
