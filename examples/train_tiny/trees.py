"""Trees of ids: one passage, read once, under many questions.

All cases about a passage share the tokens of its prompt's beginning. They stand in a row once,
every question and answer behind them as a branch; a mask lets a branch see the beginning
and itself, and positions count as if it stood alone. Loss is on the answers only. So one
pass over a passage teaches as much as one pass per question, for the tokens of one.

Shapes: B rows of a batch - T tokens of a row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cases import Case, about_passage, about_texts
from conure.engine.bytelevel import TURN_END, TURN_START
from passages import Task
from words import Words

FOLLOW_UP: Final = 0.15
"""Share of questions asked in the conversation of the one before."""
WITHOUT_PASSAGE: Final = 0.4
"""Share of trees whose cases have no passage."""
WEIGHTS: Final = {Task.SAME: 4.0, Task.CHECK: 2.0}
"""What a token of an answer counts where one token says all, and names take many."""
PATIENCE: Final = 4
"""Trees that may find no room in a batch before it is taken as full."""


@dataclass(slots=True)
class Tree:
    """Ids with positions, branch (0 is the trunk) and how much they are to be learnt."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], position: int, branch: int, weight: float = 0.0) -> int:
        """Append ids at a position; returns the next position."""
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.branches += [branch] * len(ids)
        self.weights += [weight] * len(ids)
        return position + len(ids)


def trunk(case: Case) -> str:
    """The text with which all prompts of a tree begin, as the chat template renders it."""
    system = f"{TURN_START}system\n{case.system}{TURN_END}\n" if case.system else ""
    return f"{system}{TURN_START}user\n{case.opening}"


def prompt_end(question: str) -> str:
    """What stands between the trunk and the answer."""
    return f"{question}{TURN_END}\n{TURN_START}assistant\n"


def tree_of(
    cases: Sequence[Case],
    tokenizer: Tokenizer,
    rng: random.Random,
    *,
    follow_up: float = FOLLOW_UP,
) -> Tree:
    """The tree of cases that share system text and passage."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    tree = Tree()
    start = position = tree.add(encode(trunk(cases[0])), 0, 0)
    for number, case in enumerate(cases, 1):
        prompt = prompt_end(case.question)
        if number > 1 and case.opening and rng.random() < follow_up:
            branch = tree.branches[-1]
            prompt = f"\n{TURN_START}user\n{prompt}"
        else:
            branch, position = number, start
        position = tree.add(encode(prompt), position, branch)
        weight = WEIGHTS.get(case.task, 1.0)
        position = tree.add(encode(case.answer + TURN_END), position, branch, weight)
    return tree


def trees(words: Words, tokenizer: Tokenizer, most_facts: int) -> Iterator[Tree]:
    """Trees without end, about passages of up to `most_facts` facts."""
    rng = words.rng
    while True:
        if rng.random() < WITHOUT_PASSAGE:
            cases = about_texts(words, 4)
        else:
            cases = about_passage(words, rng.randint(1, most_facts), 10)
        yield tree_of(cases, tokenizer, rng)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step reads."""

    ids: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, 1, T, T], added to attention scores."""
    sources: Tensor
    """Flat indices of the tokens whose next one is to be learnt."""
    targets: Tensor
    """The ids that follow them."""
    weights: Tensor
    """What each counts in the loss."""


def batch(made: Iterator[Tree], num_rows: int, row_len: int, dtype: torch.dtype) -> Batch:
    """Rows filled with whole trees, as they fit; none sees another."""
    shape = (num_rows, row_len)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    owners = torch.full(shape, -1)
    branches = torch.zeros(shape, dtype=torch.long)
    sources: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    used = [0] * num_rows
    owner, num_left_out = 0, 0
    while num_left_out < PATIENCE:
        tree = next(made, None)
        if tree is None:
            break
        size = len(tree.ids)
        if size > row_len:
            continue
        row = next((row for row in range(num_rows) if used[row] + size <= row_len), None)
        if row is None:
            num_left_out += 1
            continue
        start = used[row]
        place = slice(start, start + size)
        ids[row, place] = torch.tensor(tree.ids)
        positions[row, place] = torch.tensor(tree.positions)
        branches[row, place] = torch.tensor(tree.branches)
        owners[row, place] = owner
        for index in range(1, size):
            if tree.weights[index]:
                sources.append(row * row_len + start + index - 1)
                targets.append(tree.ids[index])
                weights.append(tree.weights[index])
        used[row], owner = start + size, owner + 1
    is_seen = torch.ones(row_len, row_len).tril().bool()
    is_seen = is_seen & (owners[:, :, None] == owners[:, None, :])
    is_seen &= (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, -1e9)
    learnt = (torch.tensor(sources), torch.tensor(targets), torch.tensor(weights))
    return Batch(ids, positions, mask[:, None], *learnt)
