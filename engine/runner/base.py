"""The runner interface: run one step over packed rows of paged contexts.

The engine core decides which tokens of which contexts run in a step, and in which blocks their KV
is stored. A runner computes the step and samples the next ids. `scripted_runner` and `torch_runner`
implement the interface; this module does not load torch.

A step is *started*, and its ids are *read* later. On a device that computes asynchronously, the
core can start the next step before it reads the ids: rows of that step continue with tokens that
the device has not sampled yet.

Out of scope: ranks, forks, stop strings and text.

Invariants: between steps a runner keeps no state of a context except KV in its blocks, so a context
can be evicted and recomputed in other blocks at any time. Steps take effect in the order in which
they were started: a block can be reused as soon as the last step that uses it was started.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..protocol import EngineLimits, ModelPurpose, SamplingParams, TokenLogprob
from ..sampling.token_counts import TokenBiases, TokenCounts


@dataclass(slots=True)
class ScheduledSequence:
    """The tokens of one context in one step.

    The step computes `ids[start : start + num_new]`, at these positions. The KV of `ids[:start]` is
    in `blocks` already, or an earlier row of the same step writes it: rows may share blocks, and a
    runner stores all keys and values of a layer before it attends. `blocks` covers
    `start + num_new` tokens. The KV of token i is in `blocks[i // block_size]` at offset
    `i % block_size`.
    """

    context: int
    ids: list[int]
    """All tokens of the context. Owned by the core; read-only here."""
    start: int
    num_new: int
    blocks: list[int] | array[int]
    sampling: SamplingParams | None = None
    """Set if the step reaches the end of a generating context and has to sample the next id."""
    num_prompt: int = 0
    """With `sampling`: number of ids before the output of the current Generate."""
    token_counts: TokenCounts | None = None
    """With `sampling`: token counts for penalties; None counts the tokens of the row."""
    biases: TokenBiases | None = None
    """With `sampling`: its `logit_bias`; None converts it again."""
    mask: bytes | None = None
    """With `sampling`: bitmask of the allowed ids, little-endian. Ids beyond the last bit are not
    allowed. It covers EOS and stop ids, too. None allows all ids."""
    logprob: TokenLogprob | None = None
    """Set by the runner if `sampling.logprobs` requests it."""
    pool_from: int | None = None
    """Set if the hidden states of the row are summed: the first position to include."""
    hidden_sum: list[float] | None = None
    """With `pool_from`, set when the step is read: [H] sum over the new tokens from that position
    on; None if the row has no such tokens."""
    previous_id_index: int | None = None
    """Set if the only new token is not in `ids` because the host has not read it yet: its index
    among the ids that the previous step samples."""
    is_deferred: bool = False
    """With `sampling`: `mask` and the tokens that `token_counts` needs are not known before the
    previous step is read. The step is then sampled by `Handle.sample`."""

    @property
    def length(self) -> int:
        """Tokens of the context after the step, without the id that it samples."""
        return self.start + self.num_new


class Handle(Protocol):
    """A started step."""

    @property
    def is_ready(self) -> bool:
        """Whether `read` returns without waiting."""
        ...

    def sample(self) -> None:
        """Start sampling, if any row of the step is deferred.

        Called once, after the previous step was read and before another step is started. `mask`
        and `ids` of the rows are now known. Without deferred rows, does nothing.

        Raises:
            Exception: any error of the launch.
        """
        ...

    def read(self) -> list[int]:
        """Wait for the step; return one id per sampling row, in order. Called once.

        The id is -1 if the logits of the row are NaN. A deferred step must have been sampled.

        Raises:
            Exception: any error of the step since it was started.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that was complete when `start` returned."""

    ids: list[int]

    @property
    def is_ready(self) -> bool:
        """Return True: the step is complete."""
        return True

    def sample(self) -> None:
        """Do nothing: the ids are known."""

    def read(self) -> list[int]:
        """Return the ids."""
        return self.ids


class DeviceLostError(RuntimeError):
    """The device can no longer be used by this process."""


class Runner(Protocol):
    """A model over paged KV memory."""

    model: str
    tokenizer_json: str
    chat_template: str
    special_tokens: dict[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    num_ids: int
    """Ids that the model has an embedding for. The tokenizer may have fewer or more."""
    limits: EngineLimits
    capabilities: tuple[str, ...]
    description: str
    purpose: ModelPurpose = "general"
    aliases: tuple[str, ...] = ()
    """Other names of the model that programs may use."""

    def start(self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]) -> Handle:
        """Copy blocks (source, destination), start the rows, and return a handle to their ids.

        Copies precede all writes. Rows are in the core's order, and a row may attend to KV that an
        earlier row of the same call writes. This method reads the inputs in the rows before it
        returns, but if any row is deferred, `Handle.sample` reads the inputs of sampling. Does not
        wait for earlier steps.

        The core handles EOS. A runner samples EOS like any id, but masks EOS and stop ids while
        fewer than `min_tokens` were generated, and EOS under `ignore_eos`. A row with a `mask`
        gets only ids that the mask allows, whatever its other sampling parameters are.
        """
        ...

    def run(
        self, rows: Sequence[ScheduledSequence], copies: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Start a step and read its ids."""
        return self.start(rows, copies).read()

    def check_device(self) -> None:
        """Wait for the device after a failed step. A runner without a device does nothing.

        Raises:
            DeviceLostError: if the device cannot be used by this process any more.
        """
        return
