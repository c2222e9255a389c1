"""Accuracy of the built-in model: 500 cases of each task, on words that training never saw."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny"))

import evaluate
from passages import Task
from words import RealWords, Words

from ..served import served

NUM_CASES = 500
NEEDED = (0.95, 0.9)
"""Required accuracy on held-back words, and on real names."""
ROUNDING = 0.004
"""Two cases of 500 may differ if a library sums in another order."""
CARD = evaluate.SHIPPED / "README.md"


def card_accuracies() -> dict[str, list[float]]:
    """Return the accuracies on the model card by task: on held-back words, and on real names."""
    rows = re.findall(
        r"^\| (\w+) \| ([0-9.]+) % \| ([0-9.]+) % \|$", CARD.read_text("utf-8"), re.MULTILINE
    )
    return {task: [float(share) / 100 for share in shares] for task, *shares in rows}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "column"), [(Words, 0), (RealWords, 1)])
def test_accuracy_matches_the_model_card(
    kind: type[Words], column: int, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    shares, _ = evaluate.accuracy(evaluate.SHIPPED, NUM_CASES, kind=kind)
    with capsys.disabled():
        print(f"\n  {NUM_CASES} cases of each task, {'real names' if column else 'unseen words'}")
        for task, share in shares.items():
            print(f"  {task:<8} {share:6.1%}")
    assert set(card_accuracies()) == {str(task) for task in Task}
    for task, share in shares.items():
        assert abs(card_accuracies()[task][column] - share) <= ROUNDING, task
        assert share >= NEEDED[column], task


def test_server_and_evaluation_agree() -> None:
    _, wrong = evaluate.accuracy(evaluate.SHIPPED, 4, seed=77)
    misses = [case for case, _ in wrong]
    with served("--threads", "1") as url, httpx.Client(base_url=url, timeout=60) as client:
        for case in (case for cases in evaluate.held_back_cases(77, 4) for case in cases):
            request = {"model": "builtin", "temperature": 0, "messages": case.messages()}
            [choice] = client.post("/v1/chat/completions", json=request).json()["choices"]
            answer = (choice["message"]["content"], choice["finish_reason"])
            assert (answer == (case.answer, "stop")) == (case not in misses), case
