"""Apps in the patterns of public notebooks return the same with and without server and plan."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from llama_index.core import Settings

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, Report, accelerate, conure_run, to_program
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ProgramError

from ...benchmarks.package_loader import load_package
from .oracle import OracleLLM

pytestmark = [
    pytest.mark.filterwarnings("ignore:ServiceManager is deprecated:DeprecationWarning"),
    # LlamaIndex's own BatchEvalRunner raises this warning.
    pytest.mark.filterwarnings(r"ignore:asyncio_module\(\) is deprecated:DeprecationWarning"),
]

apps: Any = load_package("cookbook/llamaindex_apps")
NAMES = (
    *("auto_merging", "document_summaries", "knowledge_graph", "tree_index"),
    *("retry_by_guideline", "text_to_sql", "metadata_pipeline", "contextual_chunks"),
    *("summaries_of_clusters", "question_dataset", "graded_answers", "corrective_rag"),
    *("several_strategies", "report_writer", "self_discover"),
)
STREAMED = ("auto_merging", "document_summaries", "tree_index", "text_to_sql", "corrective_rag")
LIMITS: dict[str, Any] = {"max_tokens": 200, "context_window": 1500}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "script.json"
    script.write_text(json.dumps(apps.SCRIPT))
    with Client(app=create_app(Config(engine="fake", data=folder, script=script))) as client:
        yield client


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the LLM of LlamaIndex's settings, which one app sets."""
    monkeypatch.setattr(Settings, "_llm", None)


@pytest.fixture
async def llm(scripted: Client) -> AsyncIterator[Conure]:
    llm = Conure(client=scripted, temperature=0, **LIMITS)
    yield llm
    await llm._clients.aclose()


@pytest.fixture
def oracle() -> OracleLLM:
    return OracleLLM(script=apps.SCRIPT, **LIMITS)


def accelerated(app: Any) -> Any:
    return None if app.part is None else accelerate(app.part)


def check(report: Report) -> None:
    assert len(report.programs) == 1
    assert report.num_wasted == 0


def test_the_cookbook_has_fifteen_apps(llm: Conure) -> None:
    assert tuple(apps.cookbook(llm)) == NAMES
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_blocking_runs_return_the_expected_result(
    llm: Conure, oracle: OracleLLM, name: str
) -> None:
    if apps.cookbook(llm)[name].run is None:
        pytest.skip("a Workflow has no blocking run")
    without_server = apps.cookbook(oracle)[name]
    expected = without_server.run(without_server.part)
    app = apps.cookbook(llm)[name]
    assert app.run(app.part) == expected
    with conure_run() as report:
        assert app.run(accelerated(app)) == expected
    check(report)


@pytest.mark.parametrize("name", NAMES)
async def test_awaited_runs_return_the_expected_result(
    llm: Conure, oracle: OracleLLM, name: str
) -> None:
    without_server = apps.cookbook(oracle)[name]
    expected = await without_server.arun(without_server.part)
    app = apps.cookbook(llm)[name]
    assert await app.arun(app.part) == expected
    with conure_run() as report:
        assert await app.arun(accelerated(app)) == expected
    check(report)


@pytest.mark.parametrize("name", STREAMED)
async def test_streams_contain_the_whole_answer(llm: Conure, name: str) -> None:
    whole = await apps.cookbook(llm)[name].arun(apps.cookbook(llm)[name].part)
    app = apps.cookbook(llm, streaming=True)[name]
    assert await app.arun(app.part) == whole
    with conure_run() as report:
        assert await app.arun(accelerated(app)) == whole
    check(report)
    if app.run is not None:
        with conure_run() as report:
            assert app.run(accelerated(app)) == whole
        check(report)


async def test_runs_of_many_apps_do_not_mix(llm: Conure) -> None:
    cookbook = apps.cookbook(llm)
    expected = [await app.arun(app.part) for app in cookbook.values()]

    async def run(app: Any) -> tuple[Any, Report]:
        with conure_run() as report:
            return await app.arun(accelerated(app)), report

    found = await asyncio.gather(*(run(app) for app in cookbook.values()))
    assert [result for result, _ in found] == expected
    assert len({report.programs[0] for _, report in found}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_compilation_rejects_apps_that_are_not_pipelines(llm: Conure, name: str) -> None:
    app = apps.cookbook(llm)[name]
    if app.part is None:
        pytest.skip("this entry is a script, not an app")
    with pytest.raises(ProgramError, match="use accelerate") as refused:
        to_program(app.part)
    assert refused.value.code == "to_program.unsupported"
