"""State of one running Generate: its text, and when it ends.

Out of scope: KV memory, steps and reports.

Invariants: no id is appended once `finish_reason` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..constraints.state import ConstraintOutcome, ConstraintState
from ..protocol import EngineError, Finished, SamplingParams
from ..text.detokenizer import Detokenizer

Reason: TypeAlias = Literal["stop", "length"]


class FinishReason(NamedTuple):
    """Why an output ended."""

    reason: Reason
    stop: str | int | None
    """The stop string or stop token that was found."""


@dataclass(slots=True)
class GenerationState:
    """A Generate that has not finished."""

    sampling: SamplingParams
    num_prompt: int
    end: int
    """Context length at which the output ends with `length`."""
    stop_ids: frozenset[int]
    """Ids that end the output: stop tokens, and EOS unless it is ignored."""
    detokenizer: Detokenizer
    eos_ids: frozenset[int] = frozenset()
    constraint: ConstraintState | None = None
    num_decoded: int = 0
    num_forced: int = 0
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The stop token or EOS that ended the output. It is not part of the text."""
    is_validating: bool = False
    """Whether the finished text is or was validated against a relaxed constraint."""

    @property
    def is_blocked(self) -> bool:
        """Whether a worker thread is busy with the constraint, so the next mask is unknown."""
        return self.constraint is not None and self.constraint.is_busy

    @property
    def error(self) -> EngineError | None:
        """The error of the constraint, if the output fails.

        Once an output has ended, failing to advance over its last token does not matter; failing to
        validate its text does.
        """
        constraint = self.constraint
        if constraint is None or constraint.is_busy:
            return None
        return constraint.error if self.finish_reason is None or self.is_validating else None

    def append(self, ids: list[int], new: Sequence[int]) -> tuple[int, str]:
        """Append new ids to those of the context, up to the id that ends the output.

        Returns:
            The number of appended ids, and the text that is final now.
        """
        before = len(ids)
        text = ""
        for token_id in new:
            text += self.append_token(ids, token_id)
            if self.finish_reason is not None:
                break
        num_appended = len(ids) - before
        if num_appended == len(new):
            text += self.end_if_complete()
        return num_appended, text

    def end_if_complete(self) -> str:
        """End the output with `stop` if its grammar is complete; `stop` also replaces `length`.

        Returns:
            The text that is final now.
        """
        constraint, reason = self.constraint, self.finish_reason
        if (
            constraint is None
            or constraint.is_busy
            or constraint.error is not None
            or not constraint.is_complete
            or (reason is not None and reason.reason == "stop")
        ):
            return ""
        self.finish_reason = FinishReason("stop", None)
        return self._end_text() if reason is None else ""

    def append_token(self, ids: list[int], token_id: int) -> str:
        """Append one id unless it is in `stop_ids`. Return the text that is final now."""
        sampling = self.sampling
        if token_id in self.stop_ids:
            is_stop_token = token_id in sampling.stop_token_ids
            self.finish_reason = FinishReason("stop", token_id if is_stop_token else None)
            self.stop_id = token_id
            return self._end_text()
        ids.append(token_id)
        length = len(ids)
        can_stop = length - self.num_prompt >= sampling.min_tokens
        text = self.detokenizer.push(token_id, can_stop=can_stop)
        if self.detokenizer.stop is None and length < self.end:
            return text
        # `_end_text` replaces this reason if a stop string was found.
        self.finish_reason = FinishReason("length", None)
        return text + self._end_text()

    def _end_text(self) -> str:
        """Return the withheld text. If a stop string was found, it becomes the reason."""
        text = self.detokenizer.finish()
        if self.detokenizer.stop is not None:
            self.finish_reason = FinishReason("stop", self.detokenizer.stop)
            self.stop_id = None
        return text

    def must_advance(self, token_id: int) -> bool:
        """Return whether the constraint must consume a sampled id.

        A stop token is not part of the text. A special one may be part of the grammar: it is
        consumed if the grammar does not allow an end before it.
        """
        if token_id not in self.stop_ids:
            return True
        constraint = self.constraint
        return (
            constraint is not None
            and not constraint.is_satisfied
            and not self.detokenizer.has_text(token_id)
        )

    def mask(self, length: int) -> bytes | None:
        """Return the ids allowed at position `length` of the context, or None for any id."""
        constraint = self.constraint
        if constraint is None or constraint.is_busy:
            return None
        sampling = self.sampling
        if length - self.num_prompt < sampling.min_tokens:
            return constraint.mask_without([*self.eos_ids, *sampling.stop_token_ids])
        if sampling.ignore_eos:
            return constraint.mask_without([*self.eos_ids])
        return constraint.mask

    @property
    def is_cut(self) -> bool:
        """Whether the text ends before the last token that the constraint has consumed."""
        if self.constraint is None:
            return False
        num_complete, _ = self.detokenizer.split_at_text_end()
        if self.stop_id is not None and not self.detokenizer.has_text(self.stop_id):
            num_complete += 1
        return num_complete < self.constraint.num_tokens

    @property
    def needs_validation(self) -> bool:
        """Whether the finished text must be validated against a relaxed constraint."""
        constraint = self.constraint
        return (
            constraint is not None
            and constraint.is_relaxed
            and constraint.is_valid is None
            and constraint.is_satisfied
            and not self.is_cut
        )

    def report(self, context: int) -> Finished:
        """Return the report that the output has ended."""
        assert self.finish_reason is not None
        detokenizer, constraint = self.detokenizer, self.constraint
        num_kept, leftover = detokenizer.split_at_text_end()
        outcome: ConstraintOutcome = "none"
        if constraint is not None:
            outcome = "cut" if self.is_cut else constraint.outcome
        return Finished(
            context,
            self.finish_reason.reason,
            detokenizer.text,
            num_kept,
            leftover,
            self.num_decoded,
            self.finish_reason.stop,
            self.num_forced,
            outcome,
        )
