"""The records that report on a program: status, variables, receipt and events.

The bodies of `GET /v1/programs/{id}` and related routes, shared by server and clients.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from .content import Json

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]

Phase: TypeAlias = Literal[
    "accepted",
    "waiting",
    "queued",
    "running",
    "done",
    "failed",
    "killed",
    "skipped",
    "deadline_exceeded",
    "cancelled",
]
"""The status of a program, a node or a variable; each uses a subset."""

ENDED: frozenset[str] = frozenset(
    {"done", "failed", "killed", "skipped", "deadline_exceeded", "cancelled"}
)


class Problem(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Why a node or variable has no value; also the error of a client step in a PUT."""

    code: str
    message: str = ""
    cause: str = ""
    """Id of the node in a body whose failure made this node fail; empty if there is none."""


class Accepted(Struct, frozen=True, kw_only=True):
    """The response to a submission: the program is durable."""

    id: str
    status: Phase
    outputs: list[str]
    url: str


class VariableStatus(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A semantic variable: `value` is present if and only if `status` is `done`."""

    status: Phase
    name: str = ""
    value: Json | UnsetType = UNSET
    truncated: bool = False
    """The model's text was cut off by `max_tokens`, or by the end of its context."""
    deadline_missed: bool = False
    """The value was not durable at the deadline of the variable's objective."""
    error: Problem | UnsetType = UNSET


class PromptTokens(Struct, frozen=True, kw_only=True):
    """Prompt tokens of one call: `logical` = `computed` + `shared`."""

    logical: Count = 0
    computed: Count = 0
    shared: Count = 0


class OutputTokens(Struct, frozen=True, kw_only=True):
    """`decoded` by the model, `forced` by a grammar, `discarded` by a kill or a stop."""

    decoded: Count = 0
    forced: Count = 0
    discarded: Count = 0


class NodeStatus(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One node of a program."""

    status: Phase
    op: str = ""
    engine: str | None = None
    why: str = ""
    """Why the node runs on this engine at this time, or why it does not run yet."""
    attempt: Count = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: PromptTokens | UnsetType = UNSET
    output_tokens: OutputTokens | UnsetType = UNSET
    prefix_break: bool = False
    """The chat template rewrites turns, so this prompt has no prefix boundaries inside."""
    constraint_relaxed: bool = False
    """The grammar could not enforce the whole schema; the final text was validated instead."""
    error: Problem | UnsetType = UNSET
    meta: Json | UnsetType = UNSET


class SharedTokens(Struct, frozen=True, kw_only=True):
    """Prompt tokens whose KV was already computed, by the first origin that applies."""

    static: Count = 0
    """Literal text that several calls of the program start with."""
    dynamic: Count = 0
    """Values that several calls of the program start with."""
    generated: Count = 0
    """Text that the model generated."""
    cache: Count = 0
    """KV cache of earlier programs."""


class ReceiptPromptTokens(Struct, frozen=True, kw_only=True):
    """`logical` = `computed` + all of `shared`; `recomputed` and `discarded` are extra."""

    logical: Count = 0
    computed: Count = 0
    shared: SharedTokens = SharedTokens()
    recomputed: Count = 0
    discarded: Count = 0


class SingleRequests(Struct, frozen=True, kw_only=True):
    """An estimate of the same calls as single requests to a server without sharing.

    Assumes that each request is sent when its inputs are ready, and that the network takes no time.
    """

    prompt_tokens: Count = 0
    estimated_s: float = 0.0


class Receipts(Struct, frozen=True, kw_only=True):
    """The sum of the receipts of several programs, including seconds of parallel programs."""

    calls: Count = 0
    prompt_tokens: ReceiptPromptTokens = ReceiptPromptTokens()
    output_tokens: OutputTokens = OutputTokens()
    retokenized: Count = 0
    """Generated tokens that a later canonical prompt encoded differently."""
    round_trips_saved: Count = 0
    wall_s: float = 0.0
    critical_path_s: float = 0.0
    as_single_requests: SingleRequests = SingleRequests()
    kv_block_seconds: float = 0.0


class Receipt(Receipts, frozen=True, kw_only=True):
    """The account of an ended program."""

    critical_path: list[str] = []
    truncated: list[str] = []
    """Variables whose text was cut off by `max_tokens`, or by the end of the model's context."""
    deadlines_missed: list[str] = []
    """Outputs whose value was not durable at the deadline of their objective."""
    blocks_held: Count = 0


class UsageReport(Struct, frozen=True, kw_only=True):
    """The account of a tenant's programs that ended from `since` to `until`, inclusive UTC days."""

    since: str | None = None
    until: str | None = None
    programs: dict[str, Count] = {}
    """The number of programs by their final status."""
    receipts: Receipts = Receipts()


class QuotaUse(Struct, frozen=True, kw_only=True):
    """How much of a quota a program has used."""

    used: Count
    limit: Count


class ProgramStatus(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A program: `receipt` is present once it has ended."""

    id: str
    name: str = field(default="")
    status: Phase
    created_at: str
    finished_at: str | None = None
    outputs: list[str] = []
    variables: dict[str, VariableStatus] = {}
    nodes: dict[str, NodeStatus] = {}
    receipt: Receipt | UnsetType = UNSET
    error: Problem | UnsetType = UNSET
    quotas: dict[str, QuotaUse] | UnsetType = UNSET
    """The keys are `steps`, `nodes`, `live_bytes`, `journal_bytes` and `events`. Present while the
    program runs."""


class ProgramSummary(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One program in a list."""

    id: str
    name: str = field(default="")
    status: Phase
    created_at: str
    finished_at: str | None = None
    calls: Count | None = None
    """LLM calls, once the program has ended."""


class ProgramPage(Struct, frozen=True, kw_only=True):
    """A page of a list of programs, newest first."""

    programs: list[ProgramSummary]
    next: str | None = None
    """The `cursor` of the next page; null on the last one."""


class PutValue(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `PUT .../variables/{name}`: exactly one of `value`, `error`, `from`."""

    value: Json | UnsetType = UNSET
    error: Problem | UnsetType = UNSET
    source: str | UnsetType = field(default=UNSET, name="from")
    """Another variable, written by appended nodes, whose value this variable gets."""
    request_id: str | None = None
    """The `request_id` of the `client.requested` event that this answers."""


EventType: TypeAlias = Literal[
    "program.accepted",
    "program.finished",
    "node.queued",
    "node.started",
    "node.finished",
    "node.restarted",
    "node.delta",
    "node.failed",
    "node.killed",
    "node.skipped",
    "variable.committed",
    "variable.failed",
    "objective.missed",
    "client.requested",
    "nodes.appended",
    "yield",
    "server.draining",
]


class Event(Struct, frozen=True):
    """An event of a program. `seq` is None if it is not journaled (deltas, draining)."""

    seq: Count | None
    type: EventType
    data: dict[str, Json]
    encoded: bytes = b""
    """`data` as JSON, encoded once for all readers; empty if it is not encoded yet."""
