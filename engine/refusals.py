"""What an engine refuses, each with its stable code and a message that says what to do.

    engine.busy                    a Fill or Generate while the context generates
    engine.bad_parent              a fork of more tokens than there are, or of what exists
    engine.unknown_parent          a fork of a context that does not exist
    engine.empty_context           a Generate at the end of nothing
    engine.unsupported_constraint  a grammar, where the engine has none
    engine.too_large               a context that no pool of this size can ever hold
    prompt.too_long                a context longer than the model's
    engine.step                    the model raised (made where it happens, in `engine`)

Knows commands, contexts and limits; pure checks without a word about what happens after.
"""

from __future__ import annotations

from . import api
from .context import Context


def check_start(command: api.Fill | api.Generate, context: Context | None) -> None:
    """Refuse a command that its context cannot take now; None is a new context.

    Raises:
        EngineError: if the context generates, or exists and should be forked anew.
    """
    if context is None:
        return
    if context.generation is not None:
        raise api.EngineError(
            "engine.busy", f"context {context.id} is generating; wait until it is finished"
        )
    if command.parent is not None:
        raise api.EngineError(
            "engine.bad_parent", f"context {context.id} exists and cannot be forked anew"
        )


def check_fork(command: api.Fill | api.Generate, parent: Context | None) -> None:
    """Refuse a fork that its parent cannot give.

    Raises:
        EngineError: if the parent does not exist or is shorter than `parent_len`.
    """
    if parent is None:
        raise api.EngineError(
            "engine.unknown_parent",
            f"context {command.context} forks from {command.parent}, which does not exist",
        )
    if not 0 <= command.parent_len <= len(parent.ids):
        raise api.EngineError(
            "engine.bad_parent",
            f"context {command.context} forks from the first {command.parent_len} tokens of "
            f"{command.parent}, which has {len(parent.ids)}",
        )


def check_length(length: int, limits: api.Limits) -> None:
    """Refuse a context of `length` tokens that can never be computed.

    Raises:
        EngineError: if it is longer than a context may be, or than all blocks together.
    """
    if length > limits.context_len:
        raise api.EngineError(
            "prompt.too_long",
            f"{length} tokens do not fit into a context of {limits.context_len}; "
            "shorten the prompt or start the engine with a larger --context-len, if the model "
            "was made for more",
        )
    num_blocks = -(-length // limits.block_size)
    if num_blocks > limits.num_blocks:
        raise api.EngineError(
            "engine.too_large",
            f"{length} tokens need {num_blocks} blocks of {limits.block_size} and the engine "
            f"has {limits.num_blocks} in all; start it with a larger --num-blocks",
        )


def check_generate(
    command: api.Generate, length: int, limits: api.Limits, has_constraints: bool
) -> None:
    """Refuse a Generate at the end of a context of `length` tokens.

    Raises:
        EngineError: if the context is empty or too long, or a constraint is asked for that
            this engine cannot keep.
    """
    if command.constraint is not None and not has_constraints:
        raise api.EngineError(
            "engine.unsupported_constraint", "this engine does not constrain its output"
        )
    if not length:
        raise api.EngineError(
            "engine.empty_context",
            f"context {command.context} has no tokens; a Generate continues at least one",
        )
    check_length(length, limits)
