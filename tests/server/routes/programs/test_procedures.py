"""Stored procedures over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from conure.server.app import create_app
from conure.server.config import Config

from ...service_double import in_process

TEXT = "text: str\nreturn gen(text, max_tokens=4)"


async def test_a_version_is_removed_after_its_alias(tmp_path: Path) -> None:
    async with in_process(create_app(Config(data=tmp_path, engine="fake"))) as client:
        url = "/v1/procedures/sum"
        stored = (await client.put(url, json={"source": TEXT})).json()
        version = f"{url}@{stored['version']}"
        refused = await client.delete(version)
        assert (refused.status_code, refused.json()["code"]) == (409, "procedure.in_use")
        removed = await client.delete(f"{url}/aliases/default")
        assert (removed.status_code, removed.content) == (204, b"")
        assert (await client.delete(version)).status_code == 204
        assert (await client.get("/v1/procedures")).json() == {"procedures": []}
        for missing in (version, f"{url}/aliases/default"):
            answer = await client.delete(missing)
            assert (answer.status_code, answer.json()["code"]) == (404, "procedure.not_found")


async def test_a_version_is_removed_by_its_hash_only(tmp_path: Path) -> None:
    async with in_process(create_app(Config(data=tmp_path, engine="fake"))) as client:
        for reference in ("sum", "sum:default", "sum@1"):
            answer = await client.delete(f"/v1/procedures/{reference}")
            assert (answer.status_code, answer.json()["code"]) == (400, "procedure.name")
            assert "write `name@version` with 32 hexadecimal digits" in answer.json()["detail"]


async def test_a_name_begins_with_an_ascii_letter(tmp_path: Path) -> None:
    async with in_process(create_app(Config(data=tmp_path, engine="fake"))) as client:
        accepted = await client.put("/v1/procedures/aä1", json={"source": TEXT})
        assert accepted.status_code == 200
        refused = await client.put("/v1/procedures/ä1", json={"source": TEXT})
    assert (refused.status_code, refused.json()["code"]) == (400, "procedure.name")
    assert "the first is an ASCII letter or `_`" in refused.json()["detail"]


@pytest.mark.parametrize(("is_removed_before", "is_restarted"), [(False, False), (True, True)])
async def test_a_version_is_removed_with_its_pin(
    tmp_path: Path, is_removed_before: bool, is_restarted: bool
) -> None:
    url = "/v1/procedures/sum"
    config = Config(data=tmp_path, engine="fake")
    source = f"text: str\nreturn gen(f{'Sum up. ' * 20 + '{text}'!r}, max_tokens=4)"
    async with in_process(create_app(config)) as client:
        stored = (await client.put(url, json={"source": source, "pin_s": 60})).json()
        version = f"{url}@{stored['version']}"
        if is_removed_before:
            assert (await client.delete(f"{url}/pin")).status_code == 200
        assert (await client.delete(f"{url}/aliases/default")).status_code == 204
        if not is_restarted:
            assert (await client.delete(version)).status_code == 204
            assert "conure_pins 0.0" in (await client.get("/metrics")).text
    async with in_process(create_app(config)) as client:
        if is_restarted:
            assert (await client.delete(version)).status_code == 204
        assert (await client.get("/v1/procedures")).json() == {"procedures": []}
