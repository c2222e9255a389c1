"""`POST /v1/programs` with a text instead of a graph."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from conure.server.app import create_app
from conure.server.config import Config

from ...service_double import in_process


def serving(folder: Path) -> contextlib.AbstractAsyncContextManager[httpx.AsyncClient]:
    """Serve the fake engine in this process."""
    return in_process(create_app(Config(data=folder, engine="fake")))


async def submit(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post("/v1/programs", json=body)


async def test_a_text_is_accepted_like_a_graph(tmp_path: Path) -> None:
    async with serving(tmp_path) as http:
        reply = await submit(
            http, source="yield {'ad': gen(f'{goods}: ')}", inputs={"goods": "tea"}
        )
        assert reply.status_code == 202
        assert reply.json()["outputs"] == ["ad"]
        value = await http.get(reply.json()["url"] + "/variables/ad", params={"wait_s": 20})
        assert value.json()["value"]


async def test_a_template_is_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path) as http:
        reply = await submit(
            http, source="{{q}} {{name=a}}", language="template", inputs={"q": "x"}
        )
        assert reply.json()["outputs"] == ["a"]


async def test_the_same_key_and_text_return_the_first_program(tmp_path: Path) -> None:
    async with serving(tmp_path) as http:
        body, headers = {"source": "yield gen('a')"}, {"Idempotency-Key": "k"}
        first = await http.post("/v1/programs", json=body, headers=headers)
        second = await http.post("/v1/programs", json=body, headers=headers)
        assert first.json() == second.json()
        assert second.headers["Idempotent-Replay"] == "true"


@pytest.mark.parametrize(
    ("body", "code", "path"),
    [
        ({"source": "yield\nx ="}, "language.syntax", "source:2:4"),
        ({"source": "yield {'a': nothing}"}, "language.undefined_name", "source:1:13"),
        ({"source": "yield 1", "program": {}}, "program.invalid", "source"),
        ({"source": "yield 1", "language": "cobol"}, "program.invalid", "language"),
        ({"source": "yield gen('a', model='other')"}, "model.unknown", "source:1:1"),
    ],
)
async def test_an_invalid_text_is_refused_with_its_position(
    tmp_path: Path, body: dict[str, Any], code: str, path: str
) -> None:
    async with serving(tmp_path) as http:
        reply = await submit(http, **body)
        assert reply.status_code == 400
        assert (reply.json()["code"], reply.json()["path"]) == (code, path)


async def test_a_text_can_be_explained(tmp_path: Path) -> None:
    async with serving(tmp_path) as http:
        reply = await http.post("/v1/programs/explain", json={"source": "yield gen('a')"})
        assert reply.status_code == 200
