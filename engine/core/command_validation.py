"""Rejects commands that an engine cannot execute, each with a stable code.

    engine.busy                    Fill or Generate on a context that is generating
    engine.bad_parent              fork beyond the parent's tokens, or into an existing context
    engine.unknown_parent          fork of a context that does not exist
    engine.empty_context           Generate on a context without tokens
    engine.unsupported_constraint  constraint on an engine without grammar support
    engine.too_large               context that does not fit into all blocks together
    engine.unknown_token           token that the model has no embedding for
    prompt.too_long                context longer than the engine's context length
    engine.step                    exception of the model, or NaN logits (raised by `engine`)

All checks are pure functions of commands, contexts and limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import protocol
from .context import Context


def check_start(
    command: protocol.Fill | protocol.GenerateCommand | protocol.Embed, context: Context | None
) -> None:
    """Reject a command that its context cannot execute now. None is a new context.

    Raises:
        EngineError: if the context is generating, or exists and the command forks or embeds it.
    """
    if context is None:
        return
    if isinstance(command, protocol.Embed):
        raise protocol.EngineError(
            "engine.busy", f"context {context.id} already exists; embed in a new context"
        )
    if context.generation is not None:
        raise protocol.EngineError(
            "engine.busy", f"context {context.id} is generating; wait until it is finished"
        )
    if command.parent is not None:
        raise protocol.EngineError(
            "engine.bad_parent",
            f"context {context.id} already exists; only a new context can be forked",
        )


def check_fork(command: protocol.Fill | protocol.GenerateCommand, parent: Context | None) -> None:
    """Reject a fork of a missing parent, or of more tokens than the parent has.

    Raises:
        EngineError: if the parent does not exist or is shorter than `parent_len`.
    """
    if parent is None:
        raise protocol.EngineError(
            "engine.unknown_parent",
            f"context {command.context} forks from {command.parent}, which does not exist",
        )
    if not 0 <= command.parent_len <= len(parent.ids):
        raise protocol.EngineError(
            "engine.bad_parent",
            f"context {command.context} forks from the first {command.parent_len} tokens of "
            f"{command.parent}, which has {len(parent.ids)}",
        )


def check_length(length: int, limits: protocol.EngineLimits) -> None:
    """Reject a context of `length` tokens that can never be computed.

    Raises:
        EngineError: if it exceeds the context length, or does not fit into all blocks.
    """
    if length > limits.context_len:
        raise protocol.EngineError(
            "prompt.too_long",
            f"{length} tokens do not fit into a context of {limits.context_len}; shorten the "
            "prompt, or start the engine with a larger --context-len if the model supports it",
        )
    num_blocks = -(-length // limits.block_size)
    if num_blocks > limits.num_blocks:
        raise protocol.EngineError(
            "engine.too_large",
            f"{length} tokens need {num_blocks} blocks of {limits.block_size} and the engine "
            f"has {limits.num_blocks} in all; start it with a larger --num-blocks",
        )


def check_ids(ids: Sequence[int], num_ids: int) -> None:
    """Reject tokens that the model has no embedding for: they would fail the whole step.

    Raises:
        EngineError: if an id is not below `num_ids`.
    """
    if ids and (highest := max(ids)) >= num_ids:
        raise protocol.EngineError(
            "engine.unknown_token",
            f"the model does not have token {highest}, only ids below {num_ids}; remove it from "
            "the prompt or from the constraint",
        )


def check_generate(
    command: protocol.GenerateCommand,
    length: int,
    limits: protocol.EngineLimits,
    has_constraints: bool,
) -> None:
    """Reject a Generate at the end of a context of `length` tokens.

    Raises:
        EngineError: if the context is empty or too long, or if the command has a constraint
            and this engine does not support constraints.
    """
    if command.constraint is not None and not has_constraints:
        raise protocol.EngineError(
            "engine.unsupported_constraint", "this engine does not support constraints"
        )
    if not length:
        raise protocol.EngineError(
            "engine.empty_context",
            f"context {command.context} has no tokens; fill at least one before generating",
        )
    check_length(length, limits)
