"""A trial of batch invariance: the same tokens alone, in pieces and in company, bit by bit.

In 16 bits the order of additions shows in logits, and a matrix library is free to choose it
by the shape of a product. Some do not: then a token's logits are the same whatever else is
in the step. That is tried on the model itself, on the machine that it will run on, before it
is promised.

Knows rows and logits, no model. Kept true: `check` returns where every trial agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from .api import EngineError, Limits
from .runner import Row

UNIT: Final = 16
"""Steps are filled up to multiples of so many tokens. Libraries have other ways for a product
of one row: in oneDNN 18 of 150 random rows came out otherwise alone than together."""
TOKENS: Final = 150
"""Of the context that is tried; longer than a tile of attention."""
PIECES: Final = (1, 7, 64)
"""How its prompt is cut."""
COMPANY: Final = (1, 2, 3, 5, 8, 15, 16, 31, 33, 64, 100, 255, 512)
"""Tokens of strangers beside one of its own."""


def rounded(num: int) -> int:
    """Return the tokens that a step of `num` is filled up to."""
    return -(-num // UNIT) * UNIT


def check(logits: Callable[[Sequence[Row]], Tensor], limits: Limits, num_ids: int) -> None:
    """Try a model; see the head of this file.

    Args:
        logits: Runs rows as one step; returns the logits [T, V] at all of their tokens.
        limits: Of the engine.
        num_ids: Tokens that the model knows.

    Raises:
        EngineError: `engine.bad_option` if some logits depend on what else was in the step.
    """
    size = limits.block_size
    # One half of the blocks is the context's, the other its company's.
    room = limits.num_blocks // 2 * size
    length = min(TOKENS, limits.context_len, limits.step_tokens, room)
    if length < 2:
        raise _refusal("the engine is too small for the trial that shows it")
    ids = [token * 37 % num_ids for token in range(3, 3 + length)]
    blocks = list(range(-(-length // size)))
    others = list(range(len(blocks), len(blocks) * 2))
    wanted = logits([Row(0, ids, 0, length, blocks)])
    for piece in PIECES:
        starts = range(0, length, piece)
        found = [logits([Row(0, ids, at, min(piece, length - at), blocks)]) for at in starts]
        if not torch.equal(torch.cat(found), wanted):
            raise _refusal(f"a prompt in pieces of {piece} gives other logits than a whole one")
    strange = [(token * 101 + 7) % num_ids for token in range(length)]
    for num in COMPANY:
        if num >= limits.step_tokens:
            break
        lengths = [length] * (num // length) + [num % length] * (num % length > 0)
        company = [Row(1, strange, 0, count, others) for count in lengths]
        found = [logits([*company, Row(0, ids, length - 1, 1, blocks)])[-1]]
        found.append(logits([Row(0, ids, length - 1, 1, blocks), *company])[0])
        if not all(torch.equal(one, wanted[-1]) for one in found):
            raise _refusal(f"a token beside {num} others has other logits than alone")


def _refusal(reason: str) -> EngineError:
    return EngineError(
        "engine.bad_option",
        f"batch_invariant cannot be kept here: {reason}; bfloat16 on a CPU that has it may do",
    )
