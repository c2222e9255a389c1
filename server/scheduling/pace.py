"""How fast the engines of one model work: what a scheduler prices its choices by.

Learned from what engines report, as moving averages; before that, a guess. Only ratios
matter for placement: what filling a token costs beside what holding one costs in every step.

Refuses to know which engine was how fast: engines of one model are taken to be alike.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.1
"""Of a new observation in the average."""
MIN_FILLED = 16
"""Fewer tokens than this measure the fixed cost of a step, not the price of a token."""


@dataclass(slots=True)
class Pace:
    """Seconds that engines take."""

    prompt_token_s: float = 1e-4
    """For a token of a prompt that is filled."""
    step_s: float = 0.02
    """For a step in which every running call gets its next token."""
    held_token_s: float = 1e-6
    """By which such a step is longer for every token that its calls attend to."""

    def learn_fill(self, num_tokens: int, seconds: float) -> None:
        """A prompt was filled."""
        if num_tokens >= MIN_FILLED:
            self.prompt_token_s += WEIGHT * (seconds / num_tokens - self.prompt_token_s)

    def learn_decode(self, num_tokens: int, seconds: float) -> None:
        """An output was decoded."""
        if num_tokens > 0:
            self.step_s += WEIGHT * (seconds / num_tokens - self.step_s)

    def estimate_s(self, num_prompt: int, num_output: int) -> float:
        """How long a call takes once it runs."""
        return num_prompt * self.prompt_token_s + num_output * self.step_s
