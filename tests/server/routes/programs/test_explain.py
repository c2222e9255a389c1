"""Explanations over HTTP."""

from __future__ import annotations

from pathlib import Path

from conure.server.app import create_app
from conure.server.config import Config

from ...inprocess import generate
from ...service_double import in_process


async def test_explanation_is_json_or_plain_text(tmp_path: Path) -> None:
    body = {"program": {"nodes": [generate("g", "x")], "outputs": ["g"]}}
    async with in_process(create_app(Config(data=tmp_path, engine="fake"))) as client:
        url = (await client.post("/v1/programs", json=body)).json()["url"]
        for form, media_type in (
            ("json", "application/json"),
            ("text", "text/plain; charset=utf-8"),
            ("mermaid", "text/plain; charset=utf-8"),
        ):
            answers = (
                await client.get(f"{url}/explain", params={"as": form}),
                await client.post("/v1/programs/explain", params={"as": form}, json=body),
            )
            assert [answer.headers["content-type"] for answer in answers] == [media_type] * 2
