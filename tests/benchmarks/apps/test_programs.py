"""Generated programs have the costs that the paper's logs report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.programs import LOG_PROMPTS, logged_coding

ROUNDS = {4: (4_456, 17_339, 21_096, 24_388), 8: (8_912, 33_654, 42_237, 47_938)}
"""Tokens of all prompts and outputs of a round, as the artifact's runs print them."""


@pytest.mark.parametrize("num_files", [4, 8, 16])
def test_prompt_lengths_match_the_log(
    num_files: int,
) -> None:
    calls = logged_coding(num_files).blueprint.calls

    assert len(calls) == 10 * num_files
    for name, call in calls.items():
        assert call.num_prompt == LOG_PROMPTS[name.partition("_")[0]], name


@pytest.mark.parametrize("num_files", ROUNDS)
def test_tokens_per_round_match_the_log(num_files: int) -> None:
    calls = logged_coding(num_files).blueprint.calls

    for number, (kind, total) in enumerate(
        zip(("design", "code", "review", "revise"), ROUNDS[num_files], strict=True)
    ):
        found = [calls[f"{kind}_{number}_{i}"] for i in range(num_files)]
        assert sum(call.num_prompt + call.num_output for call in found) == pytest.approx(
            total, rel=0.015
        )


@pytest.mark.parametrize("num_files", [4, 8, 16])
def test_calls_of_a_round_share_only_the_codebase(num_files: int) -> None:
    calls = logged_coding(num_files).blueprint.calls

    for kind, own in (("code_1", 100), ("review_2", 70), ("revise_3", 603), ("review_8", 70)):
        first, *others = (calls[f"{kind}_{i}"] for i in range(num_files))
        ends = {boundary.digest: boundary.num_tokens for boundary in first.boundaries}
        for other in others:
            shared = max(ends.get(boundary.digest, 0) for boundary in other.boundaries)
            assert other.num_prompt - shared == own


def test_reviews_and_revisions_read_the_right_inputs() -> None:
    nodes = {node["id"]: node for node in logged_coding(2, num_cycles=2).nodes}

    def read(name: str) -> list[str]:
        return [each["input"] for each in nodes[name]["prompt"] if "input" in each]

    assert read("code_1_1") == ["design_0_0"]
    assert read("review_2_1") == ["code_1_0", "code_1_1"]
    assert read("revise_3_1") == ["code_1_0", "code_1_1", "review_2_1"]
    assert read("review_4_0") == ["revise_3_0", "revise_3_1"]
    assert read("revise_5_0") == ["revise_3_0", "revise_3_1", "review_4_0"]
