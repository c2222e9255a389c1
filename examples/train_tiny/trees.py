"""Trees of token ids: one passage followed by the questions about it.

All cases about a passage share the beginning of their prompts, the trunk. It occurs once in a row,
followed by each question and answer as a branch. A mask lets a branch attend to the trunk and to
itself, and its positions continue those of the trunk. The loss is on the answers only. One pass
over a tree therefore equals one pass per question, for a fraction of the tokens.

Shapes: B rows of a batch, T tokens of a row.
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
from conure.engine.text.byte_tokenizer import TURN_END, TURN_START
from passages import Task
from words import Words

FOLLOW_UP: Final = 0.15
"""Share of questions that continue the conversation of the question before."""
WITHOUT_PASSAGE: Final = 0.4
"""Share of trees whose cases have no passage."""
WEIGHTS: Final = {Task.SAME: 4.0, Task.CHECK: 2.0}
"""Loss weights of tasks whose answers are short; 1 for other tasks."""
MAX_UNFIT: Final = 4
"""Number of trees that do not fit before a batch counts as full."""


@dataclass(slots=True)
class Tree:
    """Token ids with their positions, branches (0 is the trunk) and loss weights."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], position: int, branch: int, weight: float = 0.0) -> int:
        """Append ids at a position; return the next position."""
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.branches += [branch] * len(ids)
        self.weights += [weight] * len(ids)
        return position + len(ids)


def trunk(case: Case) -> str:
    """Return the common beginning of a tree's prompts, as the chat template renders it."""
    system = f"{TURN_START}system\n{case.system}{TURN_END}\n" if case.system else ""
    return f"{system}{TURN_START}user\n{case.opening}"


def prompt_end(question: str) -> str:
    """Return the text between the trunk and the answer."""
    return f"{question}{TURN_END}\n{TURN_START}assistant\n"


def tree_of(
    cases: Sequence[Case],
    tokenizer: Tokenizer,
    rng: random.Random,
    *,
    follow_up: float = FOLLOW_UP,
) -> Tree:
    """Return the tree of cases that share a system prompt and a passage."""

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


def trees(words: Words, tokenizer: Tokenizer, max_facts: int) -> Iterator[Tree]:
    """Yield trees about passages of up to `max_facts` facts, without end."""
    rng = words.rng
    while True:
        if rng.random() < WITHOUT_PASSAGE:
            cases = about_texts(words, 4)
        else:
            cases = about_passage(words, rng.randint(1, max_facts), 10)
        yield tree_of(cases, tokenizer, rng)


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a training step."""

    ids: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, 1, T, T], added to attention scores."""
    sources: Tensor
    """Flat indices of the tokens that predict a target."""
    targets: Tensor
    """The ids to predict."""
    weights: Tensor
    """Loss weights of the targets."""


def batch(source: Iterator[Tree], num_rows: int, row_len: int, dtype: torch.dtype) -> Batch:
    """Fill rows with complete trees, which do not attend to each other."""
    shape = (num_rows, row_len)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    owners = torch.full(shape, -1)
    branches = torch.zeros(shape, dtype=torch.long)
    sources: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    used = [0] * num_rows
    owner, num_unfit = 0, 0
    while num_unfit < MAX_UNFIT:
        tree = next(source, None)
        if tree is None:
            break
        size = len(tree.ids)
        if size > row_len:
            continue
        row = next((row for row in range(num_rows) if used[row] + size <= row_len), None)
        if row is None:
            num_unfit += 1
            continue
        start = used[row]
        span = slice(start, start + size)
        ids[row, span] = torch.tensor(tree.ids)
        positions[row, span] = torch.tensor(tree.positions)
        branches[row, span] = torch.tensor(tree.branches)
        owners[row, span] = owner
        for index in range(1, size):
            if tree.weights[index]:
                sources.append(row * row_len + start + index - 1)
                targets.append(tree.ids[index])
                weights.append(tree.weights[index])
        used[row], owner = start + size, owner + 1
    is_visible = torch.ones(row_len, row_len).tril().bool()
    is_visible = is_visible & (owners[:, :, None] == owners[:, None, :])
    is_visible &= (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    mask = torch.zeros(is_visible.shape, dtype=dtype).masked_fill(~is_visible, -1e9)
    loss_terms = (torch.tensor(sources), torch.tensor(targets), torch.tensor(weights))
    return Batch(ids, positions, mask[:, None], *loss_terms)
