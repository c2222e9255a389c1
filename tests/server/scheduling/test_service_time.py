"""Moving averages of durations."""

from __future__ import annotations

import pytest

from conure.server.scheduling.service_time import SHARED_STEP_CALLS, ServiceTimeEstimator


def test_bare_steps_follow_quick_steps_and_ignore_a_few_slow_ones() -> None:
    pace = ServiceTimeEstimator()
    for number in range(100):
        pace.observe_decode(10, 0.5 if number % 4 else 0.03)
    assert pace.bare_step_s < 0.015, "steps of 3 ms and of 50 ms"
    assert pace.step_s > 0.03


def test_bare_steps_grow_if_all_steps_are_slow() -> None:
    pace = ServiceTimeEstimator(bare_step_s=0.001)
    for _ in range(300):
        pace.observe_decode(1, 0.1)
    assert pace.bare_step_s == pytest.approx(0.1, rel=0.01)


def test_tokens_per_character_follow_encoded_prompts() -> None:
    pace = ServiceTimeEstimator()
    for _ in range(100):
        pace.observe_prompt(200, 200)
    pace.observe_prompt(10**6, 1)
    pace.observe_prompt(0, 100)
    assert pace.tokens_per_char == pytest.approx(1.0, rel=0.01)


def test_decode_steps_are_shared_work() -> None:
    pace = ServiceTimeEstimator(prompt_token_s=0.5, step_s=2.0)
    assert pace.estimate_work_s(4, 3) == 4 * 0.5 + 3 * 2.0 / SHARED_STEP_CALLS
