"""`/v1/embeddings` by OpenAI's client: means of hidden states, in OpenAI's shape."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openai
import pytest

from conure.engine.testing.scripted_runner import HIDDEN_SIZE, hidden_state

from .test_requests import openai_client


def expected(text: str, dimensions: int = HIDDEN_SIZE) -> list[float]:
    states = [hidden_state(token_id) for token_id in text.encode()]
    kept = [sum(values) for values in zip(*states, strict=True)][:dimensions]
    return [each / math.hypot(*kept) for each in kept]


async def test_embeddings_are_means_of_hidden_states(tmp_path: Path) -> None:
    async with openai_client(tmp_path, embeddings=True) as client:
        found = await client.embeddings.create(model="fake", input="a tree")
        [only] = found.data
        assert only.embedding == pytest.approx(expected("a tree"))
        assert math.hypot(*only.embedding) == pytest.approx(1)
        assert (found.model, found.object) == ("fake", "list")
        assert found.usage.prompt_tokens == found.usage.total_tokens == len("a tree")
        [model] = (await client.models.list()).data
        assert "embeddings" in model.to_dict()["capabilities"]  # type: ignore[operator]  # a list


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_lists_of_texts_and_of_token_ids(tmp_path: Path, encoding: Any) -> None:
    texts = [f"text {n}" for n in range(20)]
    async with openai_client(tmp_path, embeddings=True) as client:
        found = await client.embeddings.create(
            model="default", input=texts, encoding_format=encoding
        )
        assert [each.index for each in found.data] == [*range(20)]
        ids = [[*text.encode()] for text in texts]
        by_ids = await client.embeddings.create(model="fake", input=ids, encoding_format="float")
        [of_one] = (await client.embeddings.create(model="fake", input=ids[3])).data
        assert of_one.embedding == pytest.approx(expected(texts[3]))
        for text, each, again in zip(texts, found.data, by_ids.data, strict=True):
            assert again.embedding == pytest.approx(expected(text))
            if encoding == "float":
                assert each.embedding == again.embedding
            else:
                assert isinstance(each.embedding, str)
        assert found.usage == by_ids.usage


async def test_the_limit_of_texts_is_not_one_of_token_ids(tmp_path: Path) -> None:
    text = "a tree " * 400
    async with openai_client(tmp_path, embeddings=True) as client:
        found = await client.embeddings.create(model="fake", input=[*text.encode()])
        assert found.data[0].embedding == pytest.approx(expected(text))


async def test_shortened_vectors_have_length_one(tmp_path: Path) -> None:
    async with openai_client(tmp_path, embeddings=True) as client:
        found = await client.embeddings.create(model="fake", input="a tree", dimensions=40)
        assert found.data[0].embedding == pytest.approx(expected("a tree", 40))


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "empty_input", "an empty text has no embedding"),
    ({"input": ["a", ""]}, "empty_input", "an empty text"),
    ({"input": []}, "invalid_input", "is an empty list"),
    ({"input": ["a", 3]}, "invalid_input", "mixes texts and token ids"),
    ({"input": [999_999]}, "", "999999"),
    ({"input": "x" * 9_000}, "context_length_exceeded", "9000 tokens and the model reads 8192"),
    ({"input": "a", "dimensions": 65}, "invalid_dimensions", "embeddings have 64"),
    ({"input": "a", "dimensons": 3}, "unknown_parameter", "did you mean `dimensions`?"),
    ({"input": [1] * 9_000}, "context_length_exceeded", "9000 tokens and the model reads 8192"),
    ({"input": ["x" * 8_000] * 40}, "too_many_tokens", "send several"),
    ({"input": ["x"] * 2_049}, "too_many_texts", "2049 texts and a request may have 2048"),
    ({"input": [[1]] * 2_049}, "too_many_texts", "send several"),
]


async def test_errors_contain_the_remedy(tmp_path: Path) -> None:
    async with openai_client(tmp_path, embeddings=True) as client:
        for fields, code, text in BAD:
            body = {"model": "fake", **fields}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/embeddings", body=body, cast_to=object)
            assert text in caught.value.message, fields
            assert not code or caught.value.code == code
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="fake", input=[[1], [999_999]])
        assert caught.value.param == "input[1]"
        with pytest.raises(openai.NotFoundError, match="this server has: fake"):
            await client.embeddings.create(model="other", input="a")


async def test_server_without_embeddings_names_the_option(tmp_path: Path) -> None:
    async with openai_client(tmp_path) as client:
        with pytest.raises(openai.InternalServerError, match="--embeddings") as failed:
            await client.embeddings.create(model="fake", input="Hi")
        assert failed.value.status_code == 501
        [model] = (await client.models.list()).data
        assert model.to_dict()["capabilities"] == ["tools"]
