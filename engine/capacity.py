"""What a model on a device can hold: the length of contexts and the size of their memory.

By default the caches hold `DEFAULT_CONTEXTS` full contexts in main memory, taking at most
`MEMORY_SHARE` of what is free after loading and is not set aside for attention's own copies. On
an accelerator nobody else wants memory, so they take the same share of all that is free there,
and the rest is left to the tensors of a step. A context is at most what the model was made for,
`DEFAULT_CONTEXT_LEN`, and what the caches hold.

Pure arithmetic over numbers that others measured. Kept true: limits that come out can all be
reached at once, but for the memory that contexts compete for.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from transformers import PretrainedConfig

from conure.kernels import stretch

from . import architecture
from .api import EngineError, Limits

DEFAULT_CONTEXT_LEN: Final = 32_768
DEFAULT_CONTEXTS: Final = 8
MEMORY_SHARE: Final = {"cpu": 0.4, "cuda": 0.85}
KEPT_BYTES: Final = {"cpu": stretch.KEPT_BYTES, "cuda": 0}
"""Set aside for copies of what decoding contexts read."""
STEP_TOKENS: Final = {"cpu": 512, "cuda": 4096}
MAX_SEQUENCES: Final = {"cpu": 16, "cuda": 128}
BLOCK_SIZE: Final = 16
THREAD_BYTES: Final = 8 * 2**20
"""Weights that are enough for a thread."""


class Wanted(NamedTuple):
    """Limits that somebody asked for; None takes what fits."""

    context_len: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    step_tokens: int | None = None
    max_sequences: int | None = None


def check(config: PretrainedConfig, wanted: Wanted) -> None:
    """Refuse what no memory could make true of a model, before its weights are loaded.

    Raises:
        EngineError: `engine.bad_option`.
    """
    for name, number in wanted._asdict().items():
        if number is not None and number < 1:
            raise EngineError("engine.bad_option", f"{name} must be at least 1, got {number}")
    context_len, num_blocks, block_size = wanted[:3]
    longest, reason = architecture.longest(config)
    if context_len is not None and longest is not None and context_len > longest:
        raise EngineError("engine.bad_option", f"context_len is {context_len}, but {reason}")
    if num_blocks is not None:
        _check_fits(context_len, num_blocks, block_size or BLOCK_SIZE)


def threads(num_bytes: int, most: int) -> int:
    """Return how many threads are worth it on a CPU.

    Args:
        num_bytes: Of the model's weights.
        most: Threads that there may be, as `device.num_cores`.

    A small model's operations end sooner than other threads wake. Alone on two cores it is as
    fast with two threads as with one, but where anybody else wants a core the two wait for
    each other in every operation: a step of the built-in model then took a hundred times as long.
    """
    return max(1, min(most, num_bytes // THREAD_BYTES))


def limits(
    config: PretrainedConfig, wanted: Wanted, *, token_bytes: int, free_bytes: int, kind: str
) -> Limits:
    """Return limits that fit the model and the memory.

    Args:
        config: The model's.
        wanted: What was asked for.
        token_bytes: Memory that the KV of one token takes, all layers together.
        free_bytes: Memory that is left on the device.
        kind: Of device, `cpu` or `cuda`.

    Raises:
        EngineError: `engine.bad_option` if what was asked for cannot be.
    """
    check(config, wanted)
    context_len, num_blocks, block_size, step_tokens, max_sequences = wanted
    longest, _ = architecture.longest(config)
    reachable = context_len or min(longest or DEFAULT_CONTEXT_LEN, DEFAULT_CONTEXT_LEN)
    block_size = block_size or BLOCK_SIZE
    if num_blocks is None:
        free_bytes = max(0, free_bytes - KEPT_BYTES[kind])
        num_blocks = int(MEMORY_SHARE[kind] * free_bytes) // (token_bytes * block_size)
        if kind == "cpu":
            num_blocks = min(DEFAULT_CONTEXTS * -(-reachable // block_size), num_blocks)
        num_blocks = max(1, num_blocks)
    _check_fits(context_len, num_blocks, block_size)
    if wanted.num_blocks is not None or wanted.block_size is not None:
        _check_memory(num_blocks, block_size, token_bytes, free_bytes)
    return Limits(
        context_len=min(reachable, num_blocks * block_size),
        block_size=block_size,
        num_blocks=num_blocks,
        step_tokens=step_tokens or STEP_TOKENS[kind],
        max_sequences=max_sequences or MAX_SEQUENCES[kind],
    )


def _check_memory(num_blocks: int, block_size: int, token_bytes: int, free_bytes: int) -> None:
    """Refuse what would be granted now, and end the process when it is written."""
    num_bytes = num_blocks * block_size * token_bytes
    if num_bytes > free_bytes:
        raise EngineError(
            "engine.bad_option",
            f"{num_blocks} blocks of {block_size} tokens take {num_bytes / 2**30:,.2f} GiB, and "
            f"{max(0, free_bytes) / 2**30:,.2f} GiB are free; lower num_blocks or block_size",
        )


def _check_fits(context_len: int | None, num_blocks: int, block_size: int) -> None:
    if context_len is not None and num_blocks * block_size < context_len:
        raise EngineError(
            "engine.bad_option",
            f"context_len {context_len} does not fit into {num_blocks} blocks of {block_size}",
        )
