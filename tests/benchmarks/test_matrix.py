"""The matrix of workloads and systems: equal work in every way of sending it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableLambda

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from apps.client import AppAnswer
from apps.programs import chain, coding, map_reduce, single
from apps.scaled_workloads import ScheduledProgram, at_once
from matrix import run, ties
from matrix.chains import Chain, Runner, chain_of, run_chains
from matrix.page import FOLDER, MARK, README, ratios, tables, wall_ratios
from matrix.run import CellSetting, Round, Work, count_ties, summary

PLANS = [chain(3, 20, 4), map_reduce(3, 20, 4), coding(2, 1, scale=40), single("s", 20, 5, 4, 0)]


def answer(prompt: str, max_tokens: int) -> str:
    """Return a text that depends on everything that a call reads."""
    return f"({max_tokens} {sum(map(ord, prompt))})"


@pytest.mark.parametrize("plan", PLANS)
def test_chain_computes_the_variables_of_its_program(plan: Any) -> None:
    program = plan.written("seed")
    values: dict[str, str] = {}
    for node in program["nodes"]:
        *parts, output = node["prompt"]
        prompt = "".join(part.get("text") or values[part["input"]] for part in parts)
        values[node["id"]] = answer(prompt, output["max_tokens"])

    assert chain_of(program, echo).invoke({}) == values


def echo(max_tokens: int) -> Any:
    """Return a model whose answers depend on the prompt."""

    def reply(prompt: PromptValue) -> AIMessage:
        return AIMessage(answer(prompt.to_string(), max_tokens))

    return RunnableLambda(reply)


def test_users_share_system_prompts_and_instructions_only() -> None:
    one, other = (map_reduce(2, 20, 4).copy(user).written("seed")["nodes"] for user in (0, 1))
    assert one[0]["prompt"][0] == other[0]["prompt"][0]
    assert one[0]["prompt"][1] != other[0]["prompt"][1]
    one, other = (coding(2, 1, scale=40).copy(user).written("seed")["nodes"] for user in (0, 1))
    assert one[0]["prompt"] != other[0]["prompt"], "the task of the design"
    assert one[1]["prompt"][0] == other[1]["prompt"][0], "the instructions of the code"


def test_programs_at_once_are_copies_of_the_workload() -> None:
    sent = at_once("mixed chat and map-reduce", 0, 3)
    assert [each.kind for each in sent] == [*["chat"] * 10, *["map-reduce"] * 3] * 3


def result(*seconds: float, text: str = "same") -> Round:
    answers = [AppAnswer("app", each, {"out": text, "inner": "x"}) for each in seconds]
    return Round(answers, max(seconds), Work(5, 100, 7))


def test_chains_are_prepared_before_the_first_one_runs_and_return_their_outputs() -> None:
    events = []

    def prepare(chain: Chain) -> Runner:
        events.append("prepared")

        def ran() -> Awaitable[dict[str, str]]:
            events.append("ran")
            return chain.ainvoke({})

        return ran

    sent = [ScheduledProgram(chain(3, 20, 4), 0.0), ScheduledProgram(map_reduce(2, 20, 4), 0.0)]
    answers = asyncio.run(run_chains(sent, "seed", echo, prepare))
    assert events == ["prepared", "prepared", "ran", "ran"]
    assert [list(each.texts) for each in answers] == [["s2"], ["out"]]


def test_ratios_compare_the_same_round() -> None:
    before = summary([result(2.0, 4.0), result(6.0)])
    after = summary([result(1.0, 2.0), result(2.0)])
    assert ratios(before, after) == [2.0, 3.0]
    assert wall_ratios(before, after) == [2.0, 3.0]
    assert before["recomputed"] == 7
    assert before["programs"]["all"]["p99_s"] == 6.0


def test_work_that_a_server_does_not_report_is_unknown(tmp_path: Path) -> None:
    work = Work(12, 120, None).since(Work(2, 20, None))
    assert work == Work(10, 100, None)
    system = summary([Round([AppAnswer("app", 1.0, {})], 1.0, work)])
    key = {"workload": "w", "programs": 1, "pool": 100, "blocks": 9, "round_trip_ms": 5.0}
    record = {"engine": [], "cells": [key | {"systems": {"peer": system}}]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert "| 10 | 100 | unknown |" in tables(tmp_path)["cells"]


def test_tables_have_pairs_means_and_cells(tmp_path: Path) -> None:
    before = summary([result(2.0, 4.0), result(6.0)])
    after = summary([result(1.0, 2.0), result(2.0)])
    key = {"workload": "w", "programs": 1, "pool": 66, "blocks": 9, "round_trip_ms": 5.0}
    cell = key | {"systems": {"requests": before, "whole": after}}
    chains = key | {"systems": {"peer": before, "program": after}}
    for name, engine, each in (("a", "local", cell), ("b", "local", chains), ("c", "fake", cell)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"engine": [engine], "cells": [each]}))
    found = tables(tmp_path)
    place = "| w | 1 | 66 %, 9 | 5 ms |"
    figures = "4.50 | 1.75 | 2.50 (2.00 to 3.00) | 2.50 (2.00 to 3.00) | 5 / 5 | 100 / 100 | 7 / 7"
    assert found["whole"].splitlines()[2:] == [f"{place} {figures} |"], "nothing that was simulated"
    assert "| 1 | 66 % | 5 ms | peer / program | 1 | 2.50 | 2.50 |" in found["means"]
    assert f"{place} whole, simulated | all | 1.75 (1.50 to 2.00) |" in found["cells"]


def test_repeated_cell_counts_once_in_the_means(tmp_path: Path) -> None:
    slow, fast = summary([result(6.0)]), summary([result(1.0)])
    other = summary([result(3.0)])
    key = {"workload": "w", "programs": 1, "pool": 100, "blocks": 9, "round_trip_ms": 5.0}
    cells = [key | {"systems": {"peer": each, "program": fast}} for each in (slow, other)]
    (tmp_path / "a.json").write_text(json.dumps({"engine": ["local"], "cells": cells}))
    assert "| peer / program | 1 | 3.00 | 3.00 |" in tables(tmp_path)["means"]


def test_compact_table_has_a_row_for_each_workload_and_the_least_first(tmp_path: Path) -> None:
    slow, fast = summary([result(2.0)]), summary([result(1.0)])
    places = [("a", 1, 100, 0.0, slow), ("a", 1, 40, 5.0, fast), ("b", 8, 66, 5.0, fast)]
    cells = [
        {
            "workload": name,
            "programs": programs,
            "pool": pool,
            "round_trip_ms": trip_ms,
            "blocks": 9,
        }
        | {"systems": {"requests": slow, "whole": after}}
        for name, programs, pool, trip_ms, after in [*places, ("b", 8, 66, 0.0, slow)]
    ]
    (tmp_path / "record.json").write_text(json.dumps({"engine": ["local"], "cells": cells}))
    assert tables(tmp_path)["compact"].splitlines()[2:] == [
        "| a, 1 | 1.00 (1.00 to 1.00) |  |  |  | 2.00 (2.00 to 2.00) |",
        "| b, 8 |  |  |  | 2.00 (2.00 to 2.00) |  |",
    ]


def test_readme_has_the_table_of_the_records() -> None:
    text = README.read_text("utf-8")
    found = {match[2]: match[3] for match in MARK.finditer(text)}
    assert found["compact"] == tables(FOLDER)["compact"], "run benchmarks/matrix/page.py"


def test_all_chains_write_the_same_texts_on_a_server(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    systems = ("langchain", "accelerated", "program")
    options = ["--only", "map-reduce summary", "--programs", "1", "--pool", "100", "--rounds", "1"]
    options += [f"--system={each}" for each in systems]
    fast = ("--time-per-prompt-token", "--time-per-output-token")
    assert (
        run.main(
            [
                *options,
                "--simulated",
                *(f"--option={each}=0" for each in fast),
                "--out",
                str(record),
            ]
        )
        == 0
    )
    (cell,) = json.loads(record.read_text())["cells"]
    computed = {name: figures["computed"] for name, figures in cell["systems"].items()}
    assert computed["langchain"] == computed["accelerated"] == computed["program"] > 0


def test_peer_and_its_python_need_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--system", "peer"], ["--peer", "python"]):
        with pytest.raises(SystemExit):
            run.main(arguments)
        assert "need each other" in capsys.readouterr().err


@pytest.mark.parametrize("is_simulated", [False, True])
def test_record_has_the_options_of_the_engine_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_simulated: bool
) -> None:
    setting = CellSetting("w", 1, 100, run.ROOMY, 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(run, "settings_of", lambda *_: [setting])
    monkeypatch.setattr(run.Servers, "url", lambda *_: "")
    monkeypatch.setattr(run, "side_of", lambda *_: nullcontext())
    monkeypatch.setattr(run, "run_cell", lambda *_: ({}, 0))
    monkeypatch.setattr(run, "line_of", lambda *_: "")
    out = tmp_path / "record.json"
    simulated = ["--simulated"] if is_simulated else []
    run.main([*simulated, "--model", "m", "--option=--quiet", "--out", str(out)])
    record = json.loads(out.read_bytes())
    expected = run.SIMULATED if is_simulated else run.REAL
    assert record["engine"] == [*expected, "--quiet"]
    assert record["model"] == "m"


def test_counters_of_vllm_are_sums_over_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """# HELP vllm:prompt_tokens_total of prompts
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_total{engine="1"} 50.0
vllm:prefix_cache_hits_total{engine="0"} 30.0
vllm:iteration_tokens_total_count{engine="0"} 12.0
"""
    monkeypatch.setattr(
        httpx, "get", lambda url, **_: httpx.Response(200 if "metrics" in url else 404, text=text)
    )
    assert run.work_of("http://peer") == Work(12, 120, None)


SINGLE = ScheduledProgram(single("system", 4, 3, 2, 0), 0.0)
"""A program with one call."""


def two_best(first: float, second: float) -> httpx.Response:
    """Return a completion in which the tokens s and o have these log probabilities."""
    best = {"logprobs": {"top_logprobs": [{"s": first, "o": second}]}}
    request = httpx.Request("POST", "http://conure/v1/completions")
    return httpx.Response(200, json={"choices": [best]}, request=request)


def test_equal_texts_are_no_ties() -> None:
    results = {"requests": result(1.0), "whole": result(1.0)}
    # A chain has a chat template, so it writes other texts.
    results["langchain"] = result(1.0, text="other")
    assert count_ties(results, [SINGLE], "seed", {}) == 0


@pytest.mark.parametrize("other", [-0.50009, -0.49991])
def test_texts_may_differ_where_two_tokens_are_equally_good(
    monkeypatch: pytest.MonkeyPatch, other: float
) -> None:
    sent: list[dict[str, Any]] = []

    def post(url: str, *, json: dict[str, Any], **_: Any) -> httpx.Response:
        sent.append({"url": url, **json})
        return two_best(-0.5, other)

    def get(url: str, **_: Any) -> httpx.Response:
        assert url == "http://w/v1/programs/p"
        body = {"variables": {name: {"value": "ao"}, "without": {}}}
        return httpx.Response(200, json=body, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "post", post)
    monkeypatch.setattr(httpx, "get", get)
    (node,) = SINGLE.plan.written("seed")["nodes"]
    *parts, output = node["prompt"]
    name = output["output"]
    work = Work(0, 0, 0)
    results = {
        "requests": Round([AppAnswer("app", 1.0, {name: "as"})], 1.0, work),
        "whole": Round([AppAnswer("app", 1.0, {name: "ao"}, "p")], 1.0, work),
    }
    urls = {"requests": "http://r", "whole": "http://w"}
    assert count_ties(results, [SINGLE], "seed", urls) == 1
    prompt = "".join(part["text"] for part in parts)
    assert (sent[0]["url"], sent[0]["prompt"]) == ("http://r/v1/completions", f"{prompt}a")


def test_different_texts_of_chains_end_the_benchmark() -> None:
    results = {"langchain": result(1.0), "program": result(1.0, text="other")}
    with pytest.raises(SystemExit, match="different texts"):
        count_ties(results, [SINGLE], "seed", {})


CHAIN = {
    "nodes": [
        {"prompt": [{"text": "One. "}, {"output": "one"}]},
        {"prompt": [{"text": "Go on: "}, {"input": "one"}, {"output": "two"}]},
        {"prompt": [{"text": "Apart. "}, {"output": "three"}]},
    ]
}
TEXTS = {"one": "as", "two": "b", "three": "c"}


@pytest.mark.parametrize(
    ("changes", "second_best", "num_ties"),
    [
        ({}, -0.5, 0),
        ({"one": "ao", "two": "other"}, -0.50009, 1),
        ({"one": "ao", "two": "other"}, -0.5002, None),
        ({"one": "ax"}, -0.5, None),
        ({"one": "ao", "three": "d"}, -0.5, None),
    ],
)
def test_first_different_calls_must_have_ties(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], second_best: float, num_ties: int
) -> None:
    monkeypatch.setattr(httpx, "post", lambda *_, **__: two_best(-0.5, second_best))
    assert ties.count_ties("http://r", CHAIN, TEXTS, TEXTS | changes) == num_ties
