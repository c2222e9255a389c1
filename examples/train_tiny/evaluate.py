"""Measure the accuracy of a model folder on words that training never saw.

    python examples/train_tiny/evaluate.py [FOLDER] [--cases N] [--real]

An answer is right if it equals the expected one exactly. With greedy sampling this holds if, after
each prefix of the expected answer, the most likely next token is the expected one. So one forward
pass judges a case without generation.

Invariants: names, places and numbers are held-back ones, or with `--real` those of real people and
towns. A prompt without any of them does not count, as training may have seen it. Each case is
independent, as the chat template renders it.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from cases import Case, about_passage, about_texts
from passages import Task
from trees import batch, tree_of
from words import RealWords, Words

SHIPPED: Final = Path(__file__).parents[2] / "engine" / "small"
FACTS: Final = (1, 6)


def held_back_cases(
    seed: int, num_cases: int, facts: tuple[int, int] = FACTS, kind: type[Words] = Words
) -> Iterator[list[Case]]:
    """Yield groups of cases that share a passage, until there are `num_cases` of each task.

    Args:
        seed: determines the cases.
        num_cases: number of cases of each task.
        facts: minimum and maximum number of facts of a passage.
        kind: source of the words.
    """
    words = kind(random.Random(f"{seed} evaluation"), is_evaluation=True)
    counts: Counter[Task] = Counter()
    while min(counts[task] for task in Task) < num_cases:
        words.drawn.clear()
        if words.rng.random() < 0.5:
            cases = about_texts(words, 5)
        else:
            cases = about_passage(words, words.rng.randint(*facts), 8)
        selected = []
        for case in cases:
            prompt = case.opening + case.question
            if counts[case.task] < num_cases and any(word in prompt for word in words.drawn):
                counts[case.task] += 1
                selected.append(case)
        if selected:
            yield selected


def accuracy(
    folder: Path,
    num_cases: int,
    seed: int = 1,
    facts: tuple[int, int] = FACTS,
    kind: type[Words] = Words,
) -> tuple[dict[Task, float], list[tuple[Case, str]]]:
    """Return the share of right answers by task, and the wrong cases with the model's answers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    right: Counter[Task] = Counter()
    total: Counter[Task] = Counter()
    wrong = []
    for cases in held_back_cases(seed, num_cases, facts, kind):
        tree = tree_of(cases, tokenizer, random.Random(0), follow_up=0)
        data = batch(iter([tree]), 1, len(tree.ids), torch.float32)
        with torch.inference_mode():
            hidden = model.model(
                input_ids=data.ids,
                position_ids=data.positions,
                attention_mask=data.mask,
                use_cache=False,
            ).last_hidden_state[0]
            best = model.lm_head(hidden[data.sources]).argmax(-1)
        branches = torch.tensor(tree.branches)[data.sources]
        for number, case in enumerate(cases, 1):
            answer, expected = best[branches == number], data.targets[branches == number]
            total[case.task] += 1
            if torch.equal(answer, expected):
                right[case.task] += 1
            else:
                wrong.append((case, tokenizer.decode(answer.tolist(), skip_special_tokens=False)))
    return {task: right[task] / total[task] for task in Task}, wrong


def main() -> None:
    """Parse the arguments, evaluate, and print a line per task."""
    parser = argparse.ArgumentParser(description="held-back accuracy of a model folder")
    parser.add_argument("folder", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--cases", type=int, default=500, help="per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--facts", type=int, nargs=2, default=FACTS, metavar=("LEAST", "MOST"))
    parser.add_argument("--real", action="store_true", help="use names of real people and towns")
    parser.add_argument("--wrong", type=int, default=0, help="number of wrong answers to print")
    options = parser.parse_args()
    kind = RealWords if options.real else Words
    facts = tuple(options.facts)
    shares, wrong = accuracy(options.folder, options.cases, options.seed, facts, kind)
    for task, share in shares.items():
        print(f"{task:<8} {share:6.1%} of {options.cases}")
    for case, answer in wrong[: options.wrong]:
        print(f"\n{case.task}: {case.opening}{case.question}")
        print(f"  expected {case.answer!r}\n  got      {answer!r}")


if __name__ == "__main__":
    main()
