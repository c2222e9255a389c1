"""What the built-in model can do: 500 cases of every task, on words that its training never saw."""

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
"""Of unseen words as training has them, and of real names."""
ROUNDING = 0.004
"""Two cases may go the other way where a library adds in another order."""
CARD = evaluate.SHIPPED / "README.md"


def told() -> dict[str, list[float]]:
    """The shares of right answers that the card tells: of unseen words, and of real names."""
    rows = re.findall(
        r"^\| (\w+) \| ([0-9.]+) % \| ([0-9.]+) % \|$", CARD.read_text("utf-8"), re.MULTILINE
    )
    return {task: [float(share) / 100 for share in shares] for task, *shares in rows}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("kind", "column"), [(Words, 0), (RealWords, 1)])
def test_the_model_is_right_as_often_as_its_card_says(
    kind: type[Words], column: int, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    shares, _ = evaluate.accuracy(evaluate.SHIPPED, NUM_CASES, kind=kind)
    with capsys.disabled():
        print(f"\n  {NUM_CASES} cases of each task, {'real names' if column else 'unseen words'}")
        for task, share in shares.items():
            print(f"  {task:<8} {share:6.1%}")
    assert set(told()) == {str(task) for task in Task}
    for task, share in shares.items():
        assert abs(told()[task][column] - share) <= ROUNDING, task
        assert share >= NEEDED[column], task


def test_a_server_gives_the_answers_that_the_evaluation_judged() -> None:
    _, wrong = evaluate.accuracy(evaluate.SHIPPED, 4, seed=77)
    misses = [case for case, _ in wrong]
    with served("--threads", "1") as url, httpx.Client(base_url=url, timeout=60) as client:
        for case in (case for cases in evaluate.held_back_cases(77, 4) for case in cases):
            asked = {"model": "builtin", "temperature": 0, "messages": case.messages()}
            [choice] = client.post("/v1/chat/completions", json=asked).json()["choices"]
            said = (choice["message"]["content"], choice["finish_reason"])
            assert (said == (case.answer, "stop")) == (case not in misses), case
