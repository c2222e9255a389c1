"""The benchmark under memory pressure: equal work in every way of sending it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableLambda

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from apps.client import Answer
from apps.programs import chain, coding, map_reduce, single
from apps.scaled_workloads import at_once
from pressure.chains import chain_of
from pressure.page import rows
from pressure.run import Result, Work, check_texts, ratio, summary

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

    def model(max_tokens: int) -> Any:
        def reply(prompt: PromptValue) -> AIMessage:
            return AIMessage(answer(prompt.to_string(), max_tokens))

        return RunnableLambda(reply)

    assert chain_of(program, model).invoke({}) == values


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


def result(*seconds: float, text: str = "same") -> Result:
    answers = [Answer("app", each, {"out": text, "inner": "x"}) for each in seconds]
    return Result(answers, max(seconds), Work(5, 100, 7))


def test_ratio_compares_the_same_round() -> None:
    before = summary([result(2.0, 4.0), result(6.0)])
    after = summary([result(1.0, 2.0), result(2.0)])
    assert ratio(before, after) == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert before["recomputed"] == 7
    assert before["programs"]["all"]["p99_s"] == 6.0
    key = {"workload": "w", "programs": 1, "pool": 66, "blocks": 9, "round_trip_ms": 5.0}
    _, row = rows(key | {"systems": {"requests": before, "whole": after}})
    assert "| 66 %, 9 | 5 ms | whole | all | 1.75 | 2.00 | 2.00 | 2.50 | 2.00 | 3.00 |" in row


def test_different_texts_end_the_benchmark() -> None:
    whole = Result([Answer("app", 1.0, {"out": "same"})], 1.0, Work(0, 0, 0))
    check_texts({"requests": result(1.0), "whole": whole})
    with pytest.raises(SystemExit, match="different texts"):
        check_texts({"requests": result(1.0, text="other"), "whole": whole})
