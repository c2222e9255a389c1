"""Limits of an engine: how long contexts may be and how many KV blocks there are.

By default, on a CPU the KV cache holds `DEFAULT_CONTEXTS` contexts of full length, in at most
`MEMORY_SHARE` of the memory that is free after loading. An accelerator is assumed to have no other
users: there the KV cache takes `MEMORY_SHARE["cuda"]` of the free memory, except what recorded
steps take, and the rest is left to the tensors of a step. Several engines of a server divide the
share. The context length is bounded by the model, by `DEFAULT_CONTEXT_LEN` and by the KV cache.

Out of scope: measuring. All functions compute from given numbers.

Invariants: the KV cache holds at least one context of `context_len` tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..models import context_length
from ..models.llama_config import DecoderConfig
from ..protocol import EngineError, EngineLimits

DEFAULT_CONTEXT_LEN: Final = 32_768
DEFAULT_CONTEXTS: Final = 8
MEMORY_SHARE: Final = {"cpu": 0.4, "cuda": 0.85}
RECORDED_SHARE: Final = 0.25
"""Share of the free memory that is left to recorded steps at most. The engine runs with less."""
STEP_TOKENS: Final = {"cpu": 512, "cuda": 4096}
MAX_SEQUENCES: Final = {"cpu": 16, "cuda": 128}
BLOCK_SIZE: Final = 16
THREAD_BYTES: Final = 8 * 2**20
"""Bytes of weights per thread. With fewer, another thread does not pay off."""


class RequestedLimits(NamedTuple):
    """Limits given by the user. None derives the limit from model and memory."""

    context_len: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    step_tokens: int | None = None
    max_sequences: int | None = None


class _FreeMemory(NamedTuple):
    """The free memory of a device."""

    num_bytes: int
    recorded_bytes: int
    """The part of it that is left to recorded steps."""

    @property
    def usable_bytes(self) -> int:
        """Memory for the KV cache and the tensors of a step."""
        return self.num_bytes - self.recorded_bytes

    def __str__(self) -> str:
        text = f"{max(0, self.num_bytes) / 2**30:,.2f} GiB are free"
        if self.recorded_bytes > 0:
            text += f", of which {self.recorded_bytes / 2**30:,.2f} are left to recorded steps"
        return text


def check(config: DecoderConfig, requested: RequestedLimits) -> None:
    """Reject limits that the model can never meet, before its weights are loaded.

    Raises:
        EngineError: `engine.bad_option`.
    """
    for name, number in requested._asdict().items():
        if number is not None and number < 1:
            raise EngineError("engine.bad_option", f"{name} must be at least 1, got {number}")
    context_len, num_blocks, block_size = requested[:3]
    longest, reason = context_length.max_length(config)
    if context_len is not None and longest is not None and context_len > longest:
        raise EngineError("engine.bad_option", f"context_len is {context_len}, but {reason}")
    if num_blocks is not None:
        _check_fits(context_len, num_blocks, block_size or BLOCK_SIZE)


def threads(num_bytes: int, most: int) -> int:
    """Return the number of threads to use on a CPU.

    Operations of a small model finish before other threads wake up. With two idle cores, two
    threads are as fast as one. With other processes on the cores, two threads wait for each
    other in every operation: a step of the built-in model took a hundred times as long.

    Args:
        num_bytes: Size of the model's weights.
        most: Upper bound, as from `device.num_cores`.
    """
    return max(1, min(most, num_bytes // THREAD_BYTES))


def limits(
    config: DecoderConfig,
    requested: RequestedLimits,
    *,
    token_bytes: int,
    free_bytes: int,
    recorded_bytes: int = 0,
    kind: str,
    num_engines: int = 1,
) -> EngineLimits:
    """Return limits that fit the model and its memory.

    Args:
        config: Configuration of the model.
        requested: Limits given by the user.
        token_bytes: Size of one token's KV over all layers.
        free_bytes: Free memory of the device.
        recorded_bytes: Estimated memory of recorded steps, which the KV cache must not take.
        kind: Kind of device, `cpu` or `cuda`.
        num_engines: Engines that share the free memory.

    Raises:
        EngineError: `engine.bad_option` if a requested limit cannot be met, or if free memory holds
            no KV block.
    """
    check(config, requested)
    context_len, num_blocks, block_size, step_tokens, max_sequences = requested
    longest, _ = context_length.max_length(config)
    max_len = context_len or min(longest or DEFAULT_CONTEXT_LEN, DEFAULT_CONTEXT_LEN)
    block_size = block_size or BLOCK_SIZE
    free = _FreeMemory(free_bytes, min(recorded_bytes, int(RECORDED_SHARE * free_bytes)))
    if num_blocks is None:
        own_bytes = int(MEMORY_SHARE[kind] * free.usable_bytes / num_engines)
        num_blocks = own_bytes // (token_bytes * block_size)
        if kind == "cpu":
            num_blocks = min(DEFAULT_CONTEXTS * -(-max_len // block_size), num_blocks)
        if requested.block_size is None:
            _check_free(context_len, max(0, num_blocks) * block_size, free)
        num_blocks = max(1, num_blocks)
    _check_fits(context_len, num_blocks, block_size)
    if requested.num_blocks is not None or requested.block_size is not None:
        _check_memory(num_blocks, block_size, token_bytes, free)
    return EngineLimits(
        context_len=min(max_len, num_blocks * block_size),
        block_size=block_size,
        num_blocks=num_blocks,
        step_tokens=step_tokens or STEP_TOKENS[kind],
        max_sequences=max_sequences or MAX_SEQUENCES[kind],
    )


def _check_memory(num_blocks: int, block_size: int, token_bytes: int, free: _FreeMemory) -> None:
    """Reject block counts beyond free memory, which would fail only when blocks are written."""
    num_bytes = num_blocks * block_size * token_bytes
    if num_bytes > free.usable_bytes:
        raise EngineError(
            "engine.bad_option",
            f"{num_blocks} blocks of {block_size} tokens take {num_bytes / 2**30:,.2f} GiB, and "
            f"{free}; lower num_blocks or block_size",
        )


def _check_free(context_len: int | None, num_tokens: int, free: _FreeMemory) -> None:
    """Reject a context, of one token by default, that free memory cannot hold."""
    if num_tokens < (context_len or 1):
        raise EngineError(
            "engine.bad_option",
            f"{free}; the KV cache may use enough of that "
            f"for {num_tokens:,} tokens, but a context needs {context_len or 1:,}: free some "
            "memory, lower context_len, or choose a smaller model or dtype",
        )


def _check_fits(context_len: int | None, num_blocks: int, block_size: int) -> None:
    if context_len is not None and num_blocks * block_size < context_len:
        raise EngineError(
            "engine.bad_option",
            f"context_len {context_len} does not fit into {num_blocks} blocks of {block_size}",
        )
