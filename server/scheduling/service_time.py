"""Moving averages of how fast the engines of one model work, used to estimate the duration of
calls.

The averages start from a guess and are updated from what engines report. Placement depends on
ratios only: the cost of prefilling a token against the cost of holding one in every step.

Out of scope: differences between engines. All engines of one model are assumed to be equally fast.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.1
"""Weight of a new observation in the average."""
MIN_PREFILL_TOKENS = 16
"""Shorter prefills measure the fixed cost of a step rather than the cost of a token."""


@dataclass(slots=True)
class ServiceTimeEstimator:
    """Average durations on the engines of one model, in seconds."""

    prompt_token_s: float = 1e-4
    """Per prefilled prompt token."""
    step_s: float = 0.02
    """Per decode step, in which every running call gets one token."""
    held_token_s: float = 1e-6
    """Additional time per decode step for each token that its calls attend to."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Update the averages with a finished prefill."""
        if num_tokens >= MIN_PREFILL_TOKENS:
            self.prompt_token_s += WEIGHT * (seconds / num_tokens - self.prompt_token_s)

    def observe_decode(self, num_tokens: int, seconds: float) -> None:
        """Update the averages with a finished output."""
        if num_tokens > 0:
            self.step_s += WEIGHT * (seconds / num_tokens - self.step_s)

    def estimate_s(self, num_prompt: int, num_output: int) -> float:
        """Return the estimated duration of a call once it runs, in seconds."""
        return num_prompt * self.prompt_token_s + num_output * self.step_s
