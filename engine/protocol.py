"""The wire protocol between the server and an engine process.

The server sends commands, the engine sends reports. A frame (see `framing`) carries a list of
commands or the reports of one step. Structs are encoded as msgpack arrays, so the order of
fields is the wire format. Server and engine are always the same version of the code: the
engine is a child process of the server, and the protocol is versioned with the code.
`PROTOCOL_VERSION` only detects a mixed installation.

Contexts. An engine holds *contexts*: token ids with KV for some of them. The server numbers
contexts with increasing integers. It fills a context with tokens, generates at its end, forks
it and frees it. The server owns the only waiting queue; an engine runs what it was given,
strictly by `rank`, lower first.

Out of scope: programs, variables, tenants (a `salt` is an opaque string). This module imports
neither torch nor a model library, because both processes import it.

Invariants: every command names a context number that the server chose; an engine never creates,
renumbers or reuses one. Every accepted Generate ends in exactly one Finished or Failed; an
aborted one ends with an Aborted, a freed one without a report. A closed connection ends all
contexts at once. `epoch` distinguishes one engine process from the next.

Differences from the three calls of the paper (OSDI'24, section 7): a command on an existing
context continues it, so that one growing prompt is one context; and the salt of the prefix cache
is given when a context is created, because reading the cache needs it as much as feeding it.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from msgspec import Struct

PROTOCOL_VERSION = 5

ModelPurpose: TypeAlias = Literal["general", "demonstration", "test"]
"""What the text of a model is for: `general` is an ordinary model, `demonstration` the small
built-in model, which has been trained for one task, and `test` is text without a meaning."""


class EngineError(Exception):
    """An engine cannot execute a command. `code` is stable; sent as `Failed`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class SamplingParams(Struct, frozen=True, array_like=True):
    """How the tokens of one Generate are sampled, and when it ends.

    The counterpart of `Sampling` in the program language. A field that both records have means
    the same in both, so the server copies the fields by name (`__struct_fields__`) and only
    resolves values that depend on the call, such as the default of `max_tokens` and `seed`.
    To add a sampling parameter, add it to both records, to `sampling.batch` and to
    `sampling.sampler`.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Noise is a function of (seed, position), so a recomputed context samples the same tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, amount added to its logit). Ids outside the vocabulary are ignored."""
    logprobs: int | None = None
    """Number of likeliest ids to report with every id; None reports no logprobs."""


# --- server to engine -------------------------------------------------------------------


class Fill(Struct, frozen=True, array_like=True, tag="fill"):
    """Append tokens to a context; create the context if it is new.

    A new context starts with the first `parent_len` tokens of `parent` (None: empty) and shares
    their KV; the parent may still be filling. For an existing context, `parent` must be None.
    Answered by one Filled when all tokens of the context have KV.
    """

    context: int
    tokens: list[int]
    parent: int | None = None
    parent_len: int = 0
    salt: str = ""
    """The part of the prefix cache that a new context reads and, once freed, feeds."""
    rank: float = 0.0


class GenerateCommand(Struct, frozen=True, array_like=True, tag="generate"):
    """Generate at the end of a context. A new context forks as in Fill.

    Answered by any number of Tokens and one Finished.
    """

    context: int
    sampling: SamplingParams
    parent: int | None = None
    parent_len: int = 0
    salt: str = ""
    rank: float = 0.0
    constraint: str | None = None
    """Grammar in llguidance's JSON form. Fails on an engine without the capability."""
    group: str | None = None
    """Name of the task group, so that an engine may batch its calls together."""


class Embed(Struct, frozen=True, array_like=True, tag="embed"):
    """Average the model's last hidden states over the tokens of a new context.

    The context shares no KV with others. Answered by one Embedded, which ends the context. Fails
    on an engine without the capability `embeddings`.
    """

    context: int
    tokens: list[int]
    rank: float = 0.0


class Free(Struct, frozen=True, array_like=True, tag="free"):
    """End a context. Contexts forked from it keep the KV that they share.

    Freeing a running context aborts it first. Freeing an unknown context does nothing.
    """

    context: int
    num_cached_tokens: int = 0
    """The KV of that many first tokens stays cached, evictable, under the context's salt."""
    num_expected_tokens: int = 0
    """The server expects later readers of that many first tokens. They are evicted after all cached
    KV without expected readers."""


class Update(Struct, frozen=True, array_like=True, tag="update"):
    """Set the rank of a context, and when its KV will be read next."""

    context: int
    rank: float = 0.0
    next_use: float | None = None
    """When the server expects to read it. Only the order counts: smaller is sooner.

    None: no known use.
    """


class Abort(Struct, frozen=True, array_like=True, tag="abort"):
    """Stop and free a context within two steps; answered by Aborted."""

    context: int


class Status(Struct, frozen=True, array_like=True, tag="status"):
    """Request a StatusReport."""

    nonce: int


class Ping(Struct, frozen=True, array_like=True, tag="ping"):
    """Request a Pong from the engine's step loop."""

    nonce: int


class ValidateConstraint(Struct, frozen=True, array_like=True, tag="check"):
    """Ask whether a constraint is valid, and whether a text matches it; answered by Checked.

    The constraint is compiled and cached for a Generate that uses it.
    """

    nonce: int
    constraint: str
    text: str | None = None


Command: TypeAlias = (
    Fill | GenerateCommand | Embed | Free | Update | Abort | Status | Ping | ValidateConstraint
)


# --- engine to server -------------------------------------------------------------------


class EngineLimits(Struct, frozen=True):
    """Capacity of an engine."""

    context_len: int
    """Maximum tokens of one context, prompt and output together."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    step_tokens: int
    """Maximum tokens of one step."""
    max_sequences: int
    """Maximum contexts of one step."""


class HelloVersion(Struct, frozen=True, tag="hello"):
    """The field that a Hello of any protocol version has."""

    protocol: int


class Hello(Struct, frozen=True, tag="hello"):
    """First frame of an engine: its model, tokenizer and limits."""

    protocol: int
    epoch: int
    model: str
    tokenizer_json: str
    tokenizer_hash: str
    chat_template: str
    """Jinja source; empty if the model has no template."""
    special_tokens: dict[str, str]
    """Names that templates use (`bos_token`, `eos_token`, ...) and their text."""
    bos_id: int | None
    """Id that starts every prompt, or None if the model needs none."""
    eos_ids: list[int]
    num_ids: int
    """Ids that the model has an embedding for. The tokenizer may have fewer or more."""
    limits: EngineLimits
    capabilities: list[str]
    """Features beyond greedy text: `tokens`, `logprobs`, `constraints`, `embeddings`, ..."""
    description: str = ""
    purpose: ModelPurpose = "general"
    aliases: tuple[str, ...] = ()
    """Other names of the model that programs may use."""


class Filled(Struct, frozen=True, array_like=True, tag="filled"):
    """All tokens of the context have KV. Counts are those since its last Filled."""

    context: int
    computed: int
    """Tokens that went through the model for the first time."""
    shared: int
    """Tokens whose KV was shared with the parent or with another live context."""
    cached: int
    """Tokens whose KV was found in the evictable cache."""
    recomputed: int = 0
    """Tokens computed again after eviction or preemption."""


class Embedded(Struct, frozen=True, array_like=True, tag="embedded"):
    """Result of an Embed. Its context no longer exists."""

    context: int
    values: list[float]
    """[H] mean over all tokens of the hidden states that the output layer reads."""


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Logprob of an id before penalties, bias, constraint and temperature."""

    logprob: float
    """Natural logarithm. 0 for a forced id: the model was not run."""
    top: list[tuple[int, float]] = []
    """The likeliest ids with their logprobs, likeliest first."""


class Tokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """New output of one Generate in this step.

    Text is delayed relative to ids while a stop string or a character is incomplete.
    """

    context: int
    ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = []
    """One per id, if the Generate requested logprobs."""


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """A Generate has ended. Its context now ends after the first `num_kept` generated ids."""

    context: int
    reason: Literal["stop", "length"]
    """`stop`: EOS, a stop token or a stop string. `length`: `max_tokens` or the context length."""
    text: str
    """The whole output, without stop string and EOS."""
    num_kept: int
    """Generated ids whose text is entirely in `text`."""
    leftover: str
    """Tail of `text` after those ids, if a stop string begins in the middle of a token."""
    num_decoded: int
    """Ids that the model sampled, including those discarded at the end."""
    stop: str | int | None = None
    """The stop string or stop token; None for EOS, length or a complete grammar."""
    num_forced: int = 0
    """Ids that the constraint forced without running the model."""
    constraint: Literal["none", "met", "relaxed", "cut", "broken"] = "none"
    """`met`: the text matches the constraint. `relaxed`: the grammar could not enforce the whole
    constraint, and the finished text was validated and matches. `broken`: relaxed, and the text
    does not match. `cut`: length or a stop string ended the text before it matched."""


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """A command could not be executed. Its context is freed."""

    context: int
    code: str
    message: str


class Aborted(Struct, frozen=True, array_like=True, tag="aborted"):
    """An Abort was applied. Counts are those of the Generate that it stopped, or 0 without one.

    The tokens may exceed those in reports of Tokens: the engine drops reports that it has not sent.
    """

    context: int
    num_decoded: int = 0
    """Ids that the model sampled, including one that a step in flight still samples."""
    num_forced: int = 0


class StatusReport(Struct, frozen=True, array_like=True, tag="status"):
    """What an engine holds. Every block counts as exactly one of free, held and cached."""

    nonce: int
    num_blocks: int
    num_free: int
    num_held: int
    """Blocks that live contexts refer to."""
    num_cached: int
    """Blocks that only the evictable cache refers to."""
    num_contexts: int
    num_steps: int
    num_computed_tokens: int
    num_shared_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_decoded_tokens: int


class Pong(Struct, frozen=True, array_like=True, tag="pong"):
    """The engine's step loop is alive."""

    nonce: int


CONSTRAINT_FAULTS: Final = frozenset(
    {"constraint.invalid", "constraint.too_large", "constraint.too_complex"}
)
"""Codes that a constraint causes. After any other code, the same constraint may be accepted."""


class Checked(Struct, frozen=True, array_like=True, tag="checked"):
    """Result of a ValidateConstraint. `code` is empty if the constraint is valid."""

    nonce: int
    code: str = ""
    message: str = ""
    is_relaxed: bool = False
    """Parts of the constraint are only enforced by validating the finished text."""
    matches: bool | None = None
    """Whether the text matches; None without a text."""


ContextReport: TypeAlias = Filled | Embedded | Tokens | Finished | Failed | Aborted
Report: TypeAlias = ContextReport | StatusReport | Pong | Checked


# --- frames -----------------------------------------------------------------------------


class Commands(Struct, frozen=True, array_like=True):
    """One frame from the server. Commands are applied in order."""

    commands: list[Command]


class StepReport(Struct, frozen=True, array_like=True):
    """One frame from an engine: all reports of one step.

    Also sent without a step if there is something to report (a Pong, a failure).
    """

    epoch: int
    number: int
    """Steps that the engine has started; the last one may still run."""
    num_free: int
    num_cached: int
    num_tokens: int
    """Tokens that the engine has computed since it started, of prompts and outputs."""
    is_idle: bool
    """Whether the engine waits for a command before its next step."""
    reports: list[Report]
