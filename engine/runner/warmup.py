"""The steps that are recorded before the first call, so that no call waits for a recording.

A recording depends on the padded number of tokens and on the variant of each attention launch. The
variant follows from the largest number of queries that share a range, from whether a query has
several partials, and from whether a row is longer than a window. The steps here cover the variants
that a serving mix needs, with and without a prompt. A variant that is missing is recorded when a
decode step needs it. A step with a prompt is then not recorded but runs eagerly.

Out of scope: running them.

Invariants: rows write to the scratch block only. They may read arbitrary content.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from ..protocol import EngineLimits
from .base import ScheduledSequence
from .cuda_graphs import bucket_sizes
from .step_inputs import AttentionLayerGroup

MAX_RECORDED_TOKENS: Final = 256
"""Tokens of a step above which launching takes less time than computing."""
SIZE_UNIT: Final = 64
"""Padded sizes above this number of tokens are multiples of it."""


class WarmupStep(NamedTuple):
    """A step to record."""

    size: int
    """Padded number of tokens."""
    rows: list[ScheduledSequence]


def recorded_sizes(limits: EngineLimits) -> tuple[int, ...]:
    """Return the padded numbers of tokens of recorded steps, ascending."""
    decode = bucket_sizes(limits.max_sequences)
    most = min(MAX_RECORDED_TOKENS, limits.step_tokens)
    mixed = {*bucket_sizes(min(most, SIZE_UNIT)), *range(SIZE_UNIT, most + 1, SIZE_UNIT), most}
    return (*decode, *sorted(size for size in mixed if size > limits.max_sequences))


def recorded_size(num_tokens: int, limits: EngineLimits) -> int | None:
    """Return the padded number of tokens of a step, None if it is too large to be recorded."""
    return next((size for size in recorded_sizes(limits) if size >= num_tokens), None)


def warmup_steps(
    limits: EngineLimits, scratch_block: int, groups: Collection[AttentionLayerGroup]
) -> list[WarmupStep]:
    """Return all steps to record, largest first.

    Args:
        limits: Limits of the engine.
        scratch_block: Block of padding tokens.
        groups: The model's layers.
    """
    steps: list[WarmupStep] = []
    for size in reversed(recorded_sizes(limits)):
        batches = prompt_batches(size, limits, scratch_block, groups)
        if size <= limits.max_sequences:
            batches = [*decode_batches(size, limits, scratch_block, groups), *batches]
        steps += [WarmupStep(size, rows) for rows in batches]
    return steps


def decode_batches(
    num_rows: int,
    limits: EngineLimits,
    scratch_block: int,
    groups: Collection[AttentionLayerGroup],
) -> list[list[ScheduledSequence]]:
    """Return decode steps that cover the attention variants of a number of rows.

    One step has rows of one token, without partials. The others combine

    - a number of sharers: rows that share all blocks but the last. The kernels distinguish none,
      two, and those that fill a tile of 64 or of 128 rows; the other rows share nothing.
    - a length: the longest that fits into memory for all rows, each window, and a block more, which
      may have no partials in layers without a window.
    """
    size = limits.block_size
    # Two sharers fill a small tile, more a tile of 64 or of 128 rows.
    sharers = {2, num_rows}
    for group in groups:
        sharers |= {rows * group.kv_heads // group.num_heads for rows in (64, 128)}
    batches = [[ScheduledSequence(0, [0], 0, 1, [scratch_block]) for _ in range(num_rows)]]
    for length in _lengths(limits, groups, num_rows):
        width = -(-length // size) - 1
        if width < 1:
            continue
        ids = [0] * length
        for num_sharers in sorted({0, *(num for num in sharers if 2 <= num <= num_rows)}):
            starts = [0 if row < num_sharers else row * width for row in range(num_rows)]
            tables = [[*range(start, start + width), scratch_block] for start in starts]
            batches.append([ScheduledSequence(0, ids, length - 1, 1, table) for table in tables])
    return batches


def prompt_batches(
    num_tokens: int,
    limits: EngineLimits,
    scratch_block: int,
    groups: Collection[AttentionLayerGroup],
) -> list[list[ScheduledSequence]]:
    """Return steps with a prompt that cover the attention variants up to a number of tokens.

    The prompts fill a small tile, a tile of 64 rows or one of 128. Each runs without context, where
    nothing has partials, and behind the longest context that fits.
    """
    most = min(num_tokens, limits.context_len)
    prompts = {most, 2}
    for group in groups:
        num_sharing = max(1, group.num_heads // group.kv_heads)
        prompts |= {max(2, rows // num_sharing) for rows in (16, 64, 128)}
    batches: list[list[ScheduledSequence]] = []
    for num_new in sorted(num for num in prompts if 2 <= num <= most):
        for length in (num_new, *_lengths(limits, groups, 1)):
            start = (length - num_new) // limits.block_size * limits.block_size
            if start < 0:
                continue
            num_prefix = start // limits.block_size
            num_blocks = -(-(start + num_new) // limits.block_size)
            blocks = [*range(num_prefix), *[scratch_block] * (num_blocks - num_prefix)]
            ids = [0] * (start + num_new)
            batches.append([ScheduledSequence(0, ids, start, num_new, blocks)])
    return batches


def _lengths(
    limits: EngineLimits, groups: Collection[AttentionLayerGroup], num_rows: int
) -> list[int]:
    """Return the lengths of rows that differ in their variants, longest first."""
    size = limits.block_size
    longest = min(limits.context_len, limits.num_blocks // num_rows * size)
    windows = {group.window for group in groups if group.window is not None}
    lengths = {min(length, longest) for window in windows for length in (window, window + size)}
    return sorted({longest, *lengths}, reverse=True)
