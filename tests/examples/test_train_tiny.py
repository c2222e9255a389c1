"""Training of the small model: its data, its trees, and a few steps of the recipe.

`test_small_model.py` measures the shipped weights.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny"))

import evaluate
import export
import train
from cases import Case, about_passage, about_texts
from conure.engine.config import EngineConfig
from conure.engine.models import builtin
from conure.engine.runner.torch_runner import TorchModelRunner
from conure.engine.text.byte_tokenizer import CHAT_TEMPLATE, TURN_END
from passages import NOBODY, Task, joined
from trees import batch, prompt_end, tree_of, trees, trunk
from words import Words, is_held_back


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training folder with its tokenizer."""
    made = tmp_path_factory.mktemp("training")
    train.tokenizer_at(made, seed=0)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def drawn(seed: int, *, is_evaluation: bool = False) -> Iterator[Case]:
    words = Words(random.Random(seed), is_evaluation=is_evaluation)
    for _ in range(60):
        yield from about_passage(words, words.rng.randint(1, 6), 10)
        yield from about_texts(words, 5)


def test_training_covers_every_task() -> None:
    cases = list(drawn(0))
    assert {case.task for case in cases} == set(Task)
    assert len({case.opening for case in cases}) > 55
    for task in (Task.YES_NO, Task.SAME):
        assert {case.answer for case in cases if case.task == task} == {"yes", "no"}


def test_training_never_draws_held_back_names() -> None:
    for is_evaluation in (False, True):
        words = Words(random.Random(5), is_evaluation=is_evaluation)
        for _ in range(300):
            parts = [*words.person().split(), words.place(), words.number()]
            assert {is_held_back(part) for part in parts} == {is_evaluation}


def test_training_contains_no_evaluation_prompt() -> None:
    evaluation = {
        case.opening + case.question for cases in evaluate.held_back_cases(1, 40) for case in cases
    }
    words = Words(random.Random(11))
    training = {
        case.opening + case.question
        for _ in range(3_000)
        for case in (*about_passage(words, words.rng.randint(1, 2), 4), *about_texts(words, 5))
    }
    assert len(evaluation) > 9 * 30
    assert not evaluation & training


def test_answers_occur_in_their_passage() -> None:
    for case in drawn(1):
        if case.task == Task.EXTRACT and case.answer != NOBODY:
            assert case.answer in case.opening, case
        elif case.task == Task.JSON:
            assert all(value in case.opening for value in json.loads(case.answer).values())
        elif case.task == Task.LIST:
            assert joined(case.answer.split(", ")) in case.opening, case
        elif case.task == Task.COPY:
            assert case.question.endswith(case.answer), case


def test_verdicts_follow_from_their_prompts() -> None:
    verdicts = set()
    for case in drawn(7):
        if case.task == Task.CHECK:
            value, verdict = case.answer.removesuffix(".").rsplit(", so ", 1)
            claimed = case.question.split("The answer was: ")[1].split("\n")[0]
            assert value in case.opening, case
        elif case.task == Task.SAME:
            lines = case.question.split("\n")[1:]
            value, claimed = (re.sub(r"^(- |\d\. |Report \d: )", "", line) for line in lines)
            verdict = case.answer
        else:
            continue
        assert verdict == ("yes" if claimed == value else "no"), case
        verdicts.add((case.task, verdict))
    assert len(verdicts) == 4


def test_cases_depend_on_the_seed_only() -> None:
    assert list(drawn(3)) == list(drawn(3))
    assert list(drawn(3)) != list(drawn(4))


def test_prompts_match_the_chat_template() -> None:
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    for case in drawn(2):
        rendered = template.render(messages=case.messages(), add_generation_prompt=True)
        assert trunk(case) + prompt_end(case.question) == rendered


def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer) -> None:
    for text in ("Mira's 12 goats.", "  two  blanks\n\n\ttab", "Ærø 北京 \U0001f600", "a\x00b"):
        ids = tokenizer.encode(text).ids
        assert max(ids) < train.VOCAB_SIZE
        assert tokenizer.decode(ids) == text


def test_a_name_has_the_same_tokens_everywhere(tokenizer: Tokenizer) -> None:
    words = Words(random.Random(9))
    for _ in range(50):
        name = words.person()
        alone = tokenizer.encode(name).tokens
        for text in (f"It was {name}.", f'{{"guard": "{name}"}}', f"- {name}\n"):
            tokens = tokenizer.encode(text).tokens
            size = len(alone)
            assert any(tokens[at : at + size] == alone for at in range(len(tokens))), text


@pytest.fixture(scope="module")
def untrained() -> Any:
    """The model before its first step, in float32."""
    training = train.Training(seed=0)
    training.load_masters()
    return training.model.float()


def test_a_branch_equals_an_independent_sequence(untrained: Any, tokenizer: Tokenizer) -> None:
    words = Words(random.Random(6))
    group = about_passage(words, 3, 6)
    made = [tree_of(group, tokenizer, random.Random(0), follow_up=0)]
    made.append(tree_of(about_texts(words, 2), tokenizer, random.Random(0)))
    data = batch(iter(made), 1, sum(len(tree.ids) for tree in made), torch.float32)
    with torch.inference_mode():
        hidden = untrained.model(
            input_ids=data.ids, position_ids=data.positions, attention_mask=data.mask
        ).last_hidden_state[0]
        branches = untrained.lm_head(hidden[data.sources])
        start = 0
        for case in group:
            prompt = tokenizer.encode(trunk(case) + prompt_end(case.question)).ids
            answer = tokenizer.encode(case.answer + TURN_END).ids
            ids = torch.tensor([prompt + answer])
            mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), -1e9).triu(1)
            alone = untrained.lm_head(untrained.model(input_ids=ids, attention_mask=mask)[0])[0]
            alone = alone[len(prompt) - 1 : -1]
            part = slice(start, start + len(answer))
            assert data.targets[part].tolist() == answer
            torch.testing.assert_close(branches[part], alone, atol=2e-3, rtol=1e-3)
            start += len(answer)


def test_the_untrained_model_copies(untrained: Any) -> None:
    ids = torch.randint(300, 1000, (1, 30), generator=torch.Generator().manual_seed(1))
    twice = torch.cat([ids, ids], 1)
    mask = torch.full((1, 1, 60, 60), -1e9).triu(1)
    with torch.inference_mode():
        logits = untrained.lm_head(untrained.model(input_ids=twice, attention_mask=mask)[0])[0]
    right = logits[31:59].argmax(-1) == ids[0, 2:]
    assert right.float().mean() > 0.8


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer) -> None:
    training, losses = train.Training(seed=0), []
    for number in range(3):
        words = Words(random.Random(f"test {number}"))
        training.load_masters()
        gradients = training.gradients(batch(trees(words, tokenizer, 2), 2, 224, torch.bfloat16))
        losses.append(float(gradients[-2]))
        training.apply(gradients, 1.0)
    assert losses[-1] < losses[0]


def run_up_to(steps: int, folder: Path) -> Path:
    """Train in a folder, from its checkpoint if it has one; return the checkpoint.

    A shard is one row, not four: a step needs a quarter of the time, and is otherwise the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SHARD_TOKENS", train.GROWTH[0][2])
        train.run(0, Namespace(folder=folder, steps=steps, cooldown=0, seed=0, workers=1))
    return folder / "checkpoint.pt"


@pytest.fixture(scope="module")
def after_one_step(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training folder after the first step. Tests copy it."""
    made = tmp_path_factory.mktemp("run")
    shutil.copy(folder / "tokenizer.json", made)
    run_up_to(1, made)
    return made


def test_a_resumed_run_equals_an_uninterrupted_one(
    folder: Path, after_one_step: Path, tmp_path: Path
) -> None:
    shutil.copytree(after_one_step, tmp_path / "resumed")
    (tmp_path / "whole").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "whole")
    uninterrupted, resumed = (
        torch.load(run_up_to(2, tmp_path / name)) for name in ("whole", "resumed")
    )
    assert uninterrupted["step"] == resumed["step"] == 2
    for one, other in zip(uninterrupted["masters"], resumed["masters"], strict=True):
        assert torch.equal(one, other)


def test_resuming_with_another_seed_is_an_error(
    after_one_step: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(after_one_step, tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["train.py", str(folder), "--seed", "1"])
    with pytest.raises(SystemExit):
        train.main()
    assert "was started with seed 0" in capsys.readouterr().err


def test_an_exported_checkpoint_can_be_served(after_one_step: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export.export(shutil.copytree(after_one_step, tmp_path / "run"), folder)
    assert builtin.verified_folder(folder) == folder
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8 * 2**20
    runner = TorchModelRunner(EngineConfig(model=str(folder), threads=1, num_blocks=64))
    assert runner.limits.context_len == train.CONTEXT_LEN
    assert runner.chat_template == CHAT_TEMPLATE
