"""The records of a trace: what the calls of a program read and wrote, under `options.trace`.

Out of scope: where they are stored, and the format in which they are exported.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from ...program.content import Json
from ...program.status import Problem, TokenId


class TracedCall(Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="kind"):
    """One LLM output that an engine has finished, with the prompt before it."""

    node: str
    job: str
    variable: str
    attempt: int = 0
    started_at: float
    """When the call became ready, in Unix seconds, like every time of a trace."""
    finished_at: float
    model: str
    messages: list[Json] | None = None
    """The messages of a chat call, as the chat template received them."""
    tools: list[Json] | None = None
    prompt: str | None = None
    """The text before the output, if the call has a `prompt`."""
    parameters: dict[str, Json]
    """Sampling parameters and constraint. `seed` and `max_tokens` are those that were used."""
    text: str
    """The whole output as the model wrote it."""
    message: Json = None
    """The answer as text and tool calls, if the output of the chat call is read as a message."""
    finish_reason: str
    prompt_ids: list[TokenId]
    """The token ids that the model read."""
    output_ids: list[TokenId]
    """The token ids that the model wrote, without the one that ended the output."""
    tokenizer: str
    """Hash of the tokenizer of these ids."""
    num_cached: int = 0
    """Prompt tokens that were not computed for this output."""
    error: Problem | None = None
    """Why the finished text is not a value."""


class TracedStep(Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="kind"):
    """One call of a function, on the server or the client, that has returned."""

    node: str
    job: str
    name: str
    attempt: int = 0
    started_at: float
    finished_at: float
    args: dict[str, Json]
    value: Json


class UntracedCall(Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="kind"):
    """A call whose record did not fit into the program's quota."""

    node: str
    job: str
    finished_at: float
    reason: Problem


TraceRecord: TypeAlias = TracedCall | TracedStep | UntracedCall
