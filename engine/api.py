"""The contract between the server and an engine: commands one way, reports the other.

An engine holds *contexts*: token ids with KV memory behind some of them. The server names
contexts (its own increasing integers), fills them with tokens, lets a model generate at
their end, forks them, and frees them. The server owns the only waiting queue; an engine
holds what it was given and orders it strictly by `rank`, lower first.

Knows no torch, no model and no socket: both processes import this file. Refuses to know
programs, variables, tenants (a `salt` is an opaque string) and text beyond what a stop
string and a detokenised delta need.

Kept true: every command names a context that the server allocated; an engine never
invents, renumbers or reuses one. Every accepted Generate ends in exactly one Finished or
Failed, unless the server aborted it, in which case it ends in nothing. A dead connection
ends all contexts at once: `epoch` tells one life of an engine from the next.

    EngineError              what an engine refuses; travels as Failed(code, message)

Two changes to the paper's three calls (OSDI'24, section 7): a context that exists is
continued, so one growing prompt is one context; and the salt of the prefix cache is given
when a context is made, because looking a prefix up needs it as much as keeping one does.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

PROTOCOL_VERSION = 1


class EngineError(Exception):
    """An engine cannot do what a command asked; `code` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Sampling(Struct, frozen=True, array_like=True):
    """How the tokens of one Generate are chosen; every field is final (no server defaults left)."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Noise is a function of (seed, position), so a refilled context samples the same tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit); ids that the model does not have are passed over."""
    logprobs: int | None = None
    """How many of the likeliest ids to tell beside every id; None tells nothing."""


# --- server to engine -------------------------------------------------------------------


class Fill(Struct, frozen=True, array_like=True, tag="fill"):
    """Append tokens to a context, making it first if it is new.

    A new context starts as the first `parent_len` tokens of `parent` (None: empty) and
    shares their KV; the parent may still be filling. For a context that exists, `parent`
    must be None. Answered by one Filled when the context's KV is complete.
    """

    context: int
    tokens: list[int]
    parent: int | None = None
    parent_len: int = 0
    salt: str = ""
    """Which part of the prefix cache a new context reads and, once freed, feeds."""
    rank: float = 0.0


class Generate(Struct, frozen=True, array_like=True, tag="generate"):
    """Let the model continue a context; new contexts fork as in Fill."""

    context: int
    sampling: Sampling
    parent: int | None = None
    parent_len: int = 0
    salt: str = ""
    rank: float = 0.0
    constraint: str | None = None
    """A grammar in llguidance's JSON form; an engine without the capability answers Failed."""
    group: str | None = None
    """Calls of one task group carry one name, so that an engine may batch them together."""


class Free(Struct, frozen=True, array_like=True, tag="free"):
    """Nobody will name this context again; contexts forked from it keep what they share.

    The KV of its first `keep` tokens stays as evictable cache under the context's salt.
    Freeing a context that still runs first aborts it; freeing an unknown one is safe.
    """

    context: int
    keep: int = 0


class Update(Struct, frozen=True, array_like=True, tag="update"):
    """New rank of what runs on a context, and when its KV will be read next."""

    context: int
    rank: float = 0.0
    next_use: float | None = None
    """Server's estimate on any one clock, smaller is sooner. None: nobody knows of a use."""


class Abort(Struct, frozen=True, array_like=True, tag="abort"):
    """Stop what runs on this context and free it, within two steps. Unknown is safe."""

    context: int


class Status(Struct, frozen=True, array_like=True, tag="status"):
    """Ask for a StatusReport."""

    nonce: int


class Ping(Struct, frozen=True, array_like=True, tag="ping"):
    """Ask the engine's own loop, not its socket, for a Pong."""

    nonce: int


class Check(Struct, frozen=True, array_like=True, tag="check"):
    """Ask whether a constraint can be kept, and whether a text keeps it; answered by Checked.

    A Generate under the same constraint then finds it compiled.
    """

    nonce: int
    constraint: str
    text: str | None = None


Command: TypeAlias = Fill | Generate | Free | Update | Abort | Status | Ping | Check


# --- engine to server -------------------------------------------------------------------


class Limits(Struct, frozen=True):
    """What fits into an engine."""

    context_len: int
    """Tokens of one context at most, prompt and output together."""
    block_size: int
    num_blocks: int
    step_tokens: int
    """Tokens of one step at most."""
    max_sequences: int
    """Contexts that decode in one step at most."""


class Hello(Struct, frozen=True, tag="hello"):
    """First frame of an engine: who it is and how text becomes its tokens."""

    protocol: int
    epoch: int
    model: str
    tokenizer_json: str
    tokenizer_hash: str
    chat_template: str
    """Jinja source; empty where the model has none."""
    special_tokens: dict[str, str]
    """Names that templates use (`bos_token`, `eos_token`, ...) to their text."""
    bos_id: int | None
    """Id that starts every prompt, or None where the model wants none."""
    eos_ids: list[int]
    limits: Limits
    capabilities: list[str]
    """Of `tokens`, `logprobs`, `constraints`, `parts`, ...: what it can do beyond greedy text."""
    description: str = ""


class Filled(Struct, frozen=True, array_like=True, tag="filled"):
    """The KV of everything in the context is there; counts since the last Filled of it."""

    context: int
    computed: int
    """Tokens that went through the model for the first time."""
    shared: int
    """Tokens whose KV was taken from the parent or from another live context."""
    cached: int
    """Tokens whose KV was taken from evictable cache."""
    recomputed: int = 0
    """Tokens computed again, after eviction or preemption."""


class Chance(Struct, frozen=True, array_like=True):
    """How likely the model found an id, before penalties, bias, constraint and temperature."""

    logprob: float
    """Natural logarithm. 0 for an id that a constraint forced: no model was asked."""
    top: list[tuple[int, float]] = []
    """The likeliest ids with theirs, likeliest first."""


class Tokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """New output of one Generate in this step. Text lags behind ids while a stop string or
    a character is incomplete.
    """

    context: int
    ids: list[int]
    text: str
    chances: list[Chance] = []
    """One for each id, where the Generate asked for logprobs."""


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """A Generate is over. Its context now ends after the first `num_kept` generated ids."""

    context: int
    reason: Literal["stop", "length"]
    """`stop`: EOS, a stop token or a stop string. `length`: max_tokens or the context's end."""
    text: str
    """The whole output: neither stop string nor EOS belongs to it."""
    num_kept: int
    """Generated ids that lie wholly inside `text`."""
    leftover: str
    """Tail of `text` after those ids: what a stop string cut out of the middle of a token."""
    num_decoded: int
    """Ids that the model produced, those thrown away at the end included."""
    stop: str | int | None = None
    """The stop string or token id that ended it, None for EOS, length or a finished grammar."""
    num_forced: int = 0
    """Ids that a constraint forced without asking the model."""
    constraint: Literal["none", "met", "relaxed", "cut", "broken"] = "none"
    """`met`: the text belongs to the constraint's language. `relaxed`: the grammar could not
    enforce all of it, but the finished text was held against it. `cut`: length or a stop
    string ended the text before it did. `broken`: relaxed, and the text turned out wrong."""


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """A command could not be done; its context is freed."""

    context: int
    code: str
    message: str


class StatusReport(Struct, frozen=True, array_like=True, tag="status"):
    """What an engine holds: blocks are counted in exactly one of free, held and cached."""

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
    """The engine's loop is alive."""

    nonce: int


class Checked(Struct, frozen=True, array_like=True, tag="checked"):
    """What a Check found: `code` is empty where the constraint can be kept."""

    nonce: int
    code: str = ""
    message: str = ""
    is_relaxed: bool = False
    """Parts of it are enforced by looking at the finished text only."""
    matches: bool | None = None
    """Whether the text keeps it; None without a text."""


Report: TypeAlias = Filled | Tokens | Finished | Failed | StatusReport | Pong | Checked


class Commands(Struct, frozen=True, array_like=True):
    """One frame from the server; commands are applied in order."""

    commands: list[Command]


class Step(Struct, frozen=True, array_like=True):
    """One frame from an engine: everything that one step brought about.

    Also sent without a step, when there is something to report (a Pong, a failure).
    """

    epoch: int
    number: int
    num_free: int
    num_cached: int
    reports: list[Report]
