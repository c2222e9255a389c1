"""The mean of the hidden states of a context: the embedding of its text.

A context of an Embed is filled like any other, in one or several steps. Each step adds to a sum the
hidden states of the tokens that no earlier step has added: a token that is computed again after a
preemption counts once. The last step divides the sum by the number of tokens.

Invariant: the context has a separate salt, so that no token's KV comes from another context, and
every token passes through the model.
"""

from __future__ import annotations

from .. import protocol
from ..runner.base import ScheduledSequence
from .context import Context

_SALT = "\0embed %d"
"""A salt that no context of the server has: its salts contain no NUL."""


def fill_of(command: protocol.Embed, capabilities: tuple[str, ...]) -> protocol.Fill:
    """Return the Fill that computes the tokens of an Embed.

    Raises:
        EngineError: `engine.unsupported_embedding` or `engine.empty_context`.
    """
    if "embeddings" not in capabilities:
        raise protocol.EngineError(
            "engine.unsupported_embedding", "this engine was started without --embeddings"
        )
    if not command.tokens:
        raise protocol.EngineError(
            "engine.empty_context", f"context {command.context} has no tokens to embed"
        )
    salt = _SALT % command.context
    return protocol.Fill(command.context, command.tokens, salt=salt, rank=command.rank)


def begin(context: Context) -> None:
    """Sum the hidden states of a context from now on."""
    context.hidden_sum = []
    context.row.pool_from = 0


def add(context: Context, row: ScheduledSequence) -> None:
    """Add the hidden states of a step."""
    if row.pool_from is None or row.hidden_sum is None:
        return
    total = context.hidden_sum
    context.hidden_sum = (
        [a + b for a, b in zip(total, row.hidden_sum, strict=True)] if total else row.hidden_sum
    )
    row.hidden_sum = None
    row.pool_from = max(row.pool_from, row.length)


def embedded(context: Context) -> protocol.Embedded:
    """Return the mean of all tokens."""
    total, num_tokens = context.hidden_sum, len(context.ids)
    assert total and context.row.pool_from == num_tokens, "every token was added once"
    return protocol.Embedded(context.id, [each / num_tokens for each in total])
