"""One Generate under way: what its new ids make of its text, and when it is over.

Knows ids, text, stop strings and the constraint of one output. Refuses to know KV memory,
steps and reports; it writes no id but those that it is handed. Kept true: once `ending` is
set nothing is taken any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from .api import EngineError, Finished, Sampling
from .constraint import Constraint, Verdict
from .detokenizer import Detokenizer

Reason: TypeAlias = Literal["stop", "length"]


class Ending(NamedTuple):
    """Why an output is over."""

    reason: Reason
    stop: str | int | None
    """The stop string or stop token that was found."""


@dataclass(slots=True)
class Generation:
    """A Generate that is under way."""

    sampling: Sampling
    num_prompt: int
    end: int
    """Tokens of the context at which it ends with `length`."""
    stop_ids: frozenset[int]
    """Ids that end it: EOS, unless it is ignored, and the stop tokens."""
    detokenizer: Detokenizer
    eos_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    num_decoded: int = 0
    num_forced: int = 0
    ending: Ending | None = None

    @property
    def is_held(self) -> bool:
        """Its constraint is at work elsewhere: nobody can say what may come next."""
        return self.constraint is not None and self.constraint.is_held

    @property
    def error(self) -> EngineError | None:
        """Why it cannot go on, if it cannot."""
        return None if self.constraint is None or self.is_held else self.constraint.error

    def take(self, ids: list[int], new: Sequence[int]) -> tuple[int, str]:
        """Append new ids to those of the context, up to the one that ends the output.

        Returns:
            How many were appended, and the text that is certain now.
        """
        before = len(ids)
        text = ""
        for token_id in new:
            text += self.push(ids, token_id)
            if self.ending is not None:
                break
        num_taken = len(ids) - before
        constraint = self.constraint
        if (
            constraint is not None
            and not constraint.is_held
            and constraint.is_over
            and self.detokenizer.stop is None
            and num_taken == len(new)
        ):
            text += self.detokenizer.finish() if self.ending is None else ""
            self.ending = Ending("stop", None)
        return num_taken, text

    def push(self, ids: list[int], token_id: int) -> str:
        """Append one id, unless it ends the output; return the text that is certain now."""
        sampling = self.sampling
        if token_id in self.stop_ids:
            is_named = token_id in sampling.stop_token_ids
            self.ending = Ending("stop", token_id if is_named else None)
            return self.detokenizer.finish()
        ids.append(token_id)
        length = len(ids)
        can_stop = length - self.num_prompt >= sampling.min_tokens
        text = self.detokenizer.push(token_id, can_stop=can_stop)
        if self.detokenizer.stop is not None:
            self.ending = Ending("stop", self.detokenizer.stop)
        elif length >= self.end:
            self.ending = Ending("length", None)
        return text if self.ending is None else text + self.detokenizer.finish()

    def mask(self, length: int) -> bytes | None:
        """Which ids the model may say as number `length` of the context; None: any."""
        constraint = self.constraint
        if constraint is None or constraint.is_held:
            return None
        sampling = self.sampling
        if length - self.num_prompt < sampling.min_tokens:
            return constraint.without([*self.eos_ids, *sampling.stop_token_ids])
        if sampling.ignore_eos:
            return constraint.without([*self.eos_ids])
        return constraint.mask

    @property
    def wants_validation(self) -> bool:
        """It is over, and its text is still to be held against what its grammar left out."""
        constraint = self.constraint
        return (
            constraint is not None
            and constraint.is_relaxed
            and constraint.is_valid is None
            and constraint.is_met
            and self.detokenizer.stop is None
        )

    def finished(self, context: int) -> Finished:
        """Return the report of its end."""
        assert self.ending is not None
        detokenizer, constraint = self.detokenizer, self.constraint
        num_kept, leftover = detokenizer.kept()
        verdict: Verdict = "none"
        if constraint is not None:
            verdict = "cut" if detokenizer.stop is not None else constraint.verdict
        return Finished(
            context,
            self.ending.reason,
            detokenizer.text,
            num_kept,
            leftover,
            self.num_decoded,
            self.ending.stop,
            self.num_forced,
            verdict,
        )
