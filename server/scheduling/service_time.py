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
BARE_WEIGHT_DOWN, BARE_WEIGHT_UP = 0.3, 0.02
"""Weights of quicker and slower steps in the average of bare steps, which few prefills prolong."""
SHARED_STEP_CALLS = 8
"""Calls that are assumed to share a decode step."""


@dataclass(slots=True)
class ServiceTimeEstimator:
    """Average durations on the engines of one model, in seconds."""

    prompt_token_s: float = 1e-4
    """Per prefilled prompt token."""
    step_s: float = 0.02
    """Per decode step, in which every running call gets one token."""
    bare_step_s: float = 0.02
    """Per decode step of an engine that prefills nothing meanwhile."""
    held_token_s: float = 1e-6
    """Additional time per decode step for each token that its calls attend to."""

    tokens_per_char: float = 0.25
    """Tokens per character of prompts."""

    def observe_prompt(self, num_chars: int, num_tokens: int) -> None:
        """Update the tokens per character with an encoded prompt."""
        if num_tokens >= MIN_PREFILL_TOKENS and num_chars > 0:
            self.tokens_per_char += WEIGHT * (num_tokens / num_chars - self.tokens_per_char)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Update the averages with finished prefills.

        Args:
            num_tokens: tokens that the engine prefilled, of all calls.
            seconds: time from the first to the last of them.
        """
        if num_tokens >= MIN_PREFILL_TOKENS:
            self.prompt_token_s += WEIGHT * (seconds / num_tokens - self.prompt_token_s)

    def observe_decode(self, num_tokens: int, seconds: float) -> None:
        """Update the averages with a finished output."""
        if num_tokens > 0:
            step_s = seconds / num_tokens
            self.step_s += WEIGHT * (step_s - self.step_s)
            weight = BARE_WEIGHT_DOWN if step_s < self.bare_step_s else BARE_WEIGHT_UP
            self.bare_step_s += weight * (step_s - self.bare_step_s)

    def estimate_s(self, num_prompt: int, num_output: int) -> float:
        """Return the estimated duration of a call once it runs, in seconds."""
        return num_prompt * self.prompt_token_s + num_output * self.step_s

    def estimate_work_s(self, num_prompt: int, num_output: int) -> float:
        """Return the engine time that a call takes from other calls, in seconds.

        A prompt token takes the engine for itself, a decode step serves all running calls.
        """
        decode_s = num_output * self.step_s / SHARED_STEP_CALLS
        return num_prompt * self.prompt_token_s + decode_s
