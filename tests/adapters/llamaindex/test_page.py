"""The tables of docs/llamaindex.md, which are generated from runs, and the examples.

`CONURE_WRITE_PAGE=1 pytest tests/adapters/llamaindex/test_page.py` writes the table of the
installed core. Otherwise the tests compare the page with it.
"""

# The core with `QueryPipeline` is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, accelerate, explain

from ...served import environment, served
from .conformance import HAS_QUERY_PIPELINE, RESERVES_ANSWERS

ROOT = Path(__file__).parents[3]
PAGE = Path(__file__).parents[3] / "docs" / "llamaindex.md"

BLOCK = re.compile(
    r"^<!-- tested: (\w+) -->\n```python\n(.*?)^```$\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
BLOCKS = BLOCK.findall(PAGE.read_text("utf-8"))

needs_model = pytest.mark.skipif(
    find_spec("torch") is None, reason="the built-in model needs torch"
)
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated class QueryPipeline")


@needs_model
def test_examples_print_what_the_page_shows() -> None:
    assert [name for name, _, _ in BLOCKS] == ["llm", "app"]
    with served("--threads", "1") as url:
        for _, code, shown in BLOCKS:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code],
                env={**environment(), "CONURE_URL": url},
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout == shown


def compare(name: str, head: list[str], rows: list[list[str]]) -> None:
    """Compare the table between the marks of `name` on the page with this one, or write it."""
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    page = PAGE.read_text("utf-8")
    start, end = f"<!-- {name} -->\n", f"\n<!-- end {name} -->"
    before, _, rest = page.partition(start)
    found, _, after = rest.partition(end)
    if os.environ.get("CONURE_WRITE_PAGE"):
        PAGE.write_text(before + start + table + end + after, "utf-8")
        return
    assert found == table, f"docs/llamaindex.md, {name}: write it with CONURE_WRITE_PAGE=1"


def row(what: str, report: Any) -> list[str]:
    """Return one line of the table of core 0.14."""
    others = [call for call in report.calls if not call.is_planned]
    why = sorted({note.partition(": ")[2] for note in report.notes})
    left = f"{len(others)} {'call' if len(others) == 1 else 'calls'}" if others else ""
    assert report.num_wasted == 0
    return [
        what,
        f"{report.num_planned} of {len(report.calls)}",
        "; ".join(each for each in [left, *why] if each),
    ]


@pytest.mark.skipif(not RESERVES_ANSWERS, reason="the table is that of the newest core")
async def test_table_of_core_014_is_current(make_llm: Callable[..., Conure]) -> None:
    from llama_index.core.extractors import (
        KeywordExtractor,
        QuestionsAnsweredExtractor,
        SummaryExtractor,
        TitleExtractor,
    )
    from llama_index.core.indices.query.query_transform import HyDEQueryTransform
    from llama_index.core.ingestion import IngestionPipeline
    from llama_index.core.query_engine import TransformQueryEngine
    from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer

    from .conformance import Person
    from .test_accelerate import Fan, engine, nodes

    llm = make_llm(context_window=1300)
    rows = []
    for mode in (
        "tree_summarize",
        "refine",
        "compact",
        "accumulate",
        "compact_accumulate",
        "simple_summarize",
        "generation",
    ):
        fast = accelerate(get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode)))
        fast.synthesize("Why?", nodes=nodes(6))
        rows.append(row(f"synthesizer, `{mode}`", explain(fast)))
    wide = make_llm(context_window=1500, max_tokens=200)
    for mode in (ResponseMode.TREE_SUMMARIZE, ResponseMode.ACCUMULATE, ResponseMode.REFINE):
        structured = accelerate(
            get_response_synthesizer(llm=wide, response_mode=mode, output_cls=Person)
        )
        structured.synthesize("Who?", nodes=nodes(6))
        rows.append(row(f"synthesizer, `{mode.value}` with `output_cls`", explain(structured)))
    query = accelerate(engine(llm, "refine"))
    query.query("Why?")
    rows.append(row("query engine on a retriever, `refine`", explain(query)))
    hyde = accelerate(TransformQueryEngine(engine(llm, "refine"), HyDEQueryTransform(llm=llm)))
    hyde.query("Why?")
    rows.append(row("the same engine with HyDE", explain(hyde)))
    for kind in (TitleExtractor, KeywordExtractor, QuestionsAnsweredExtractor, SummaryExtractor):
        extractor = accelerate(kind(llm=make_llm(), show_progress=False))
        await extractor.aextract([each.node for each in nodes(3, sentences=3)])
        rows.append(row(f"`{kind.__name__}`", explain(extractor)))
    ingestion = accelerate(
        IngestionPipeline(
            transformations=[KeywordExtractor(llm=make_llm(), show_progress=False)],
            disable_cache=True,
        )
    )
    ingestion.run(nodes=[each.node for each in nodes(3, sentences=3)])
    rows.append(row("`IngestionPipeline` with an extractor", explain(ingestion)))
    flow = accelerate(Fan(make_llm(context_window=800)))
    await flow.run(topic="tea")
    rows.append(row("Workflow: 3 direct calls, then a tree summary", explain(flow)))
    head = ["part of an app", "calls from the plan", "other calls, and the reason"]
    compare("core 0.14", head, rows)


@pytest.mark.skipif(not HAS_QUERY_PIPELINE, reason="QueryPipeline was removed in core 0.13")
def test_table_of_core_012_is_current(make_llm: Callable[..., Conure], client: Client) -> None:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.query_pipeline import ArgPackComponent, FnComponent, QueryPipeline

    from conure.adapters.llamaindex import to_program

    from .pipeline.test_pipeline import NAMES, inputs_of, join_responses, joins, shapes

    llm = make_llm()
    pipelines = {name: (shapes(llm)[name], inputs_of(name)) for name in NAMES}
    packed = joins(llm, ArgPackComponent(), [FnComponent(fn=join_responses)])
    pipelines["fan, pack and function"] = (packed, {"x": "tea"})
    nested = QueryPipeline(chain=[shapes(llm)["two calls"], PromptTemplate("{y}"), llm])
    pipelines["pipeline within a pipeline"] = (nested, {"x": "tea"})
    rows = []
    for name, (pipeline, given) in pipelines.items():
        compiled = to_program(pipeline)
        compiled.run(client, **given)
        fast = accelerate(pipeline)
        fast.run(**given)
        report = explain(fast)
        assert report.num_wasted == 0
        operations = [node["op"] for node in compiled.program["nodes"]]
        rows.append(
            [
                name,
                str(operations.count("generate")),
                str(operations.count("client") or ""),
                f"{report.num_planned} of {len(report.calls)}",
            ]
        )
    head = ["pipeline", "calls in the program", "client steps", "accelerated: calls from the plan"]
    compare("core 0.12", head, rows)


FINDINGS = ["Jonas Wenk", "nobody", "Ruth Sandberg", "Emil Hartson", "nobody"]


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run an example on a temporary server, or on the one at `CONURE_URL`."""
    return subprocess.run(
        [*options, sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        cwd=ROOT,
        env={**environment(), "CONURE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def printed(name: str, *options: str) -> str:
    """Return the output of an example on a temporary server with these options."""
    made = run(name, sys.executable, "benchmarks/temporary_server.py", *options, "--")
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@needs_model
def test_summary_example_is_planned_and_correct() -> None:
    output = printed("llamaindex_tree_summary.py", "--threads", "1")
    assert re.findall(r"^Report \d: (.*)$", output, re.MULTILINE) == FINDINGS
    assert "\nJonas Wenk, Ruth Sandberg and Emil Hartson.\n" in output
    assert re.search(r"^same +yes$", output, re.MULTILINE)
    assert "6 served from the plan; 6 calls" in output


@pytest.mark.skipif(not HAS_QUERY_PIPELINE, reason="QueryPipeline went with core 0.13")
def test_query_pipeline_example_matches_in_three_modes() -> None:
    output = printed("llamaindex_query_pipeline.py", "--engine", "fake")
    made = re.findall(r"^(?:plain|ahead|whole) +(\S.*)$", output, re.MULTILINE)
    assert made == [made[0]] * 3
    assert "3 calls: 3 from the plan, 0 made by the app, 0 wasted" in output
    assert re.search(r"as one program: 3 calls, .*, 1 client step$", output, re.MULTILINE)


def test_example_without_server_explains_setup() -> None:
    made = run(
        "llamaindex_query_pipeline.py" if HAS_QUERY_PIPELINE else "llamaindex_tree_summary.py"
    )
    assert made.returncode == 1
    assert "conure serve" in made.stderr.splitlines()[-1]
    assert "Traceback" not in made.stderr
