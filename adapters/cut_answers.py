"""The message about an answer that was cut by its maximum length."""

from __future__ import annotations


def cut_message(num_tokens: int | None, before: str) -> str:
    """Return the message about an answer that was cut.

    Args:
        num_tokens: length of the answer; None if unknown.
        before: what did not happen before the end, such as "it was complete".
    """
    count = "" if num_tokens is None else f" after {num_tokens} tokens"
    return (
        f"the answer was cut{count} before {before} (finish_reason 'length'); raise max_tokens, or "
        "shorten the prompt if the model's context is full"
    )
