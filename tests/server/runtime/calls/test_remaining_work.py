"""The engine time of a program's remaining calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.ir import GenerateNode
from conure.server.runtime.calls.remaining_work import RemainingWork
from conure.server.scheduling.service_time import SHARED_STEP_CALLS, ServiceTimeEstimator

PACE = ServiceTimeEstimator(prompt_token_s=1.0, step_s=1.0 * SHARED_STEP_CALLS, tokens_per_char=1.0)
"""Every prompt token and every output token takes a second."""


def call(name: str, *parts: dict[str, Any], max_tokens: int = 3) -> GenerateNode:
    prompt = [*parts, {"output": name, "max_tokens": max_tokens}]
    return msgspec.convert({"id": name, "prompt": prompt}, GenerateNode)


def text(value: str) -> dict[str, Any]:
    return {"text": value}


def test_prompt_and_output_count() -> None:
    work = RemainingWork()
    work.add([call("a", text("four"))], {})
    assert work.seconds(PACE) == 4 + 3


def test_text_at_the_start_of_several_prompts_counts_once() -> None:
    work = RemainingWork()
    work.add([call(name, text("shared"), text(name)) for name in "abc"], {})
    assert work.seconds(PACE) == len("shared") + 3 * (1 + 3)
    assert work.call_seconds("a", PACE) == len("shared") + 1 + 3
    work.remove("a")
    work.remove("a")
    assert work.seconds(PACE) == len("shared") + 2 * (1 + 3)


def test_input_counts_with_the_tokens_that_its_writer_may_write() -> None:
    reader = call("b", text("x"), {"input": "a"})
    work = RemainingWork()
    work.add([reader, call("a", text("y"), max_tokens=7)], {})
    assert work.call_seconds("b", PACE) == 1 + 7 + 3


def test_input_with_a_value_counts_with_its_length() -> None:
    work = RemainingWork()
    work.add([call("a", {"input": "given"})], {"given": "seven.."})
    assert work.seconds(PACE) == 7 + 3


def test_messages_count() -> None:
    message = {"role": "user", "content": "hello"}
    node = {"id": "a", "messages": [message], "output": {"variable": "a", "max_tokens": 2}}
    work = RemainingWork()
    work.add([msgspec.convert(node, GenerateNode)], {})
    assert work.seconds(PACE) == 5 + 2


CALLS = st.lists(
    st.tuples(st.sampled_from(["", "head", "other"]), st.integers(0, 9), st.integers(1, 9)),
    max_size=12,
)


@given(calls=CALLS, removed=st.sets(st.integers(0, 11)))
def test_total_equals_a_sum_over_the_calls_that_are_left(
    calls: list[tuple[str, int, int]], removed: set[int]
) -> None:
    work = RemainingWork()
    nodes = [
        call(f"c{i}", text(head), text("x" * tail), max_tokens=output)
        for i, (head, tail, output) in enumerate(calls)
    ]
    work.add(nodes, {})
    work.add(nodes, {})
    for index in removed:
        work.remove(f"c{index}")
    left = [each for i, each in enumerate(calls) if i not in removed]
    expected = sum(tail + output for _, tail, output in left)
    expected += sum(len(head) for head in {head for head, _, _ in left})
    assert work.seconds(PACE) == pytest.approx(expected)
