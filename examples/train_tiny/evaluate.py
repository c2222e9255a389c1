"""Says how often a model folder answers rightly, with words that training never saw.

    python examples/train_tiny/evaluate.py [FOLDER] [--cases N] [--real]

An answer is right if it is the expected one, letter for letter, and ends there. Asked of a
greedy model that is the same as: behind every part of the right answer the likeliest next
token is the right one. So one forward pass judges a case, and nothing is generated.

Kept true: names, places and numbers are held-back ones, or with `--real` those of people and
towns; a prompt without any, which training may have seen, does not count; every case stands
alone, as the chat template renders it.
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
    """Groups of cases about one passage, until there are `num_cases` of every task.

    Args:
        seed: Decides the cases.
        num_cases: How many of every task.
        facts: The least and the most that a passage is made of.
        kind: Of words.
    """
    words = kind(random.Random(f"{seed} evaluation"), is_evaluation=True)
    counts: Counter[Task] = Counter()
    while min(counts[task] for task in Task) < num_cases:
        words.drawn.clear()
        if words.rng.random() < 0.5:
            cases = about_texts(words, 5)
        else:
            cases = about_passage(words, words.rng.randint(*facts), 8)
        wanted = []
        for case in cases:
            prompt = case.opening + case.question
            if counts[case.task] < num_cases and any(word in prompt for word in words.drawn):
                counts[case.task] += 1
                wanted.append(case)
        if wanted:
            yield wanted


def accuracy(
    folder: Path,
    num_cases: int,
    seed: int = 1,
    facts: tuple[int, int] = FACTS,
    kind: type[Words] = Words,
) -> tuple[dict[Task, float], list[tuple[Case, str]]]:
    """The share of right answers by task, and the wrong ones with what the model preferred."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    right: Counter[Task] = Counter()
    total: Counter[Task] = Counter()
    wrong = []
    for cases in held_back_cases(seed, num_cases, facts, kind):
        tree = tree_of(cases, tokenizer, random.Random(0), follow_up=0)
        read = batch(iter([tree]), 1, len(tree.ids), torch.float32)
        with torch.inference_mode():
            hidden = model.model(
                input_ids=read.ids,
                position_ids=read.positions,
                attention_mask=read.mask,
                use_cache=False,
            ).last_hidden_state[0]
            best = model.lm_head(hidden[read.sources]).argmax(-1)
        branches = torch.tensor(tree.branches)[read.sources]
        for number, case in enumerate(cases, 1):
            said, expected = best[branches == number], read.targets[branches == number]
            total[case.task] += 1
            if torch.equal(said, expected):
                right[case.task] += 1
            else:
                wrong.append((case, tokenizer.decode(said.tolist(), skip_special_tokens=False)))
    return {task: right[task] / total[task] for task in Task}, wrong


def main() -> None:
    """Reads the arguments, evaluates, prints a line per task."""
    parser = argparse.ArgumentParser(description="held-back accuracy of a model folder")
    parser.add_argument("folder", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--cases", type=int, default=500, help="per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--facts", type=int, nargs=2, default=FACTS, metavar=("LEAST", "MOST"))
    parser.add_argument("--real", action="store_true", help="names of people and towns")
    parser.add_argument("--wrong", type=int, default=0, help="print so many wrong answers")
    options = parser.parse_args()
    kind = RealWords if options.real else Words
    facts = tuple(options.facts)
    shares, wrong = accuracy(options.folder, options.cases, options.seed, facts, kind)
    for task, share in shares.items():
        print(f"{task:<8} {share:6.1%} of {options.cases}")
    for case, said in wrong[: options.wrong]:
        print(f"\n{case.task}: {case.opening}{case.question}\n  wanted {case.answer!r}\n  {said!r}")


if __name__ == "__main__":
    main()
