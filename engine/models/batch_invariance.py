"""Check of batch invariance: the same tokens alone, in chunks and in a batch, bit by bit.

In 16 bits, logits depend on the order of additions, which a matrix library may choose by the shape
of a product. Some libraries give each token the same logits in every batch. This module tests that
on the loaded model and this machine before an engine offers `batch_invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from ..protocol import EngineError, EngineLimits
from ..runner.base import ScheduledSequence

UNIT: Final = 16
"""Steps are padded to multiples of this many tokens. Libraries treat products of one row
differently: in oneDNN, 18 of 150 random rows gave other results alone than together."""
TOKENS: Final = 150
"""Length of the tested context; longer than an attention tile."""
CHUNKS: Final = (1, 7, 64)
"""Tested sizes of prefill chunks."""
NUM_OTHERS: Final = (1, 2, 3, 5, 8, 15, 16, 31, 33, 64, 100, 255, 512)
"""Tested numbers of other tokens in a batch."""


def padded_size(num: int) -> int:
    """Return the tokens that a step of `num` is padded to."""
    return -(-num // UNIT) * UNIT


def check(
    logits: Callable[[Sequence[ScheduledSequence]], Tensor], limits: EngineLimits, num_ids: int
) -> None:
    """Check that logits do not depend on the batch.

    Args:
        logits: Runs rows as one step; returns the logits [T, V] at all tokens.
        limits: Limits of the engine.
        num_ids: Size of the vocabulary.

    Raises:
        EngineError: `engine.bad_option` if some logits depend on the batch.
    """
    size = limits.block_size
    # Half of the blocks is for the context, half for the other tokens.
    capacity = limits.num_blocks // 2 * size
    length = min(TOKENS, limits.context_len, limits.step_tokens, capacity)
    if length < 2:
        raise _refusal("the engine's limits are too small for the check")
    ids = [token * 37 % num_ids for token in range(3, 3 + length)]
    blocks = list(range(-(-length // size)))
    other_blocks = list(range(len(blocks), len(blocks) * 2))
    expected = logits([ScheduledSequence(0, ids, 0, length, blocks)])
    for chunk in CHUNKS:
        starts = range(0, length, chunk)
        found = [
            logits([ScheduledSequence(0, ids, start, min(chunk, length - start), blocks)])
            for start in starts
        ]
        if not torch.equal(torch.cat(found), expected):
            raise _refusal(
                f"a prompt in chunks of {chunk} tokens gives other logits than in one step"
            )
    other_ids = [(token * 101 + 7) % num_ids for token in range(length)]
    for num in NUM_OTHERS:
        if num >= limits.step_tokens:
            break
        lengths = [length] * (num // length) + [num % length] * (num % length > 0)
        batch = [ScheduledSequence(1, other_ids, 0, count, other_blocks) for count in lengths]
        found = [logits([*batch, ScheduledSequence(0, ids, length - 1, 1, blocks)])[-1]]
        found.append(logits([ScheduledSequence(0, ids, length - 1, 1, blocks), *batch])[0])
        if not all(torch.equal(each, expected[-1]) for each in found):
            raise _refusal(f"a token in a batch with {num} others gives other logits than alone")


def _refusal(reason: str) -> EngineError:
    return EngineError(
        "engine.bad_option",
        f"batch_invariant is not possible here: {reason}; try bfloat16 on a CPU that supports it",
    )
