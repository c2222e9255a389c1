"""What is said about a running program: status, receipt, and the names of its events.

The records behind `GET /v1/programs/{id}` and its siblings, shared by server and client.
Knows only shapes; who fills them is `execution`'s and `receipt`'s business.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from .ir import Json

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
"""Status of a program, a node or a variable; each uses those that apply to it."""

ENDED: frozenset[str] = frozenset(
    {"done", "failed", "killed", "skipped", "deadline_exceeded", "cancelled"}
)


class Problem(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Why something has no value; also the body of a PUT that reports a failed client step."""

    code: str
    message: str = ""


class Accepted(Struct, frozen=True, kw_only=True):
    """Answer to a submission: the program is on disk."""

    id: str
    status: Phase
    outputs: list[str]
    url: str


class VariableStatus(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A semantic variable: `value` is present exactly when `status` is `done`."""

    status: Phase
    name: str = ""
    value: Json | UnsetType = UNSET
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


class Trace(Struct, frozen=True, kw_only=True):
    """Token ids of one output, under `options.trace`: the prompt is everything before it."""

    variable: str
    prompt_ids: list[TokenId]
    output_ids: list[TokenId]
    reason: str


class NodeStatus(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One node of a program."""

    status: Phase
    op: str = ""
    engine: str | None = None
    why: str = ""
    """Why it runs where and when it does, or why it does not yet."""
    attempt: Count = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: PromptTokens | UnsetType = UNSET
    output_tokens: OutputTokens | UnsetType = UNSET
    prefix_break: bool = False
    """The chat template rewrites turns, so this prompt could only be read as one run of text."""
    constraint_relaxed: bool = False
    """The grammar could not enforce all of a schema; the finished text was held against it."""
    error: Problem | UnsetType = UNSET
    trace: list[Trace] | UnsetType = UNSET
    meta: Json | UnsetType = UNSET


class SharedTokens(Struct, frozen=True, kw_only=True):
    """Prompt tokens whose KV was there already, by the first cause that explains them."""

    static: Count = 0
    """Text of the program that several of its calls start with."""
    dynamic: Count = 0
    """Values that several calls of the program start with."""
    generated: Count = 0
    """What the model itself had decoded."""
    cache: Count = 0
    """Left by earlier programs."""


class ReceiptPromptTokens(Struct, frozen=True, kw_only=True):
    """`logical` = `computed` + all of `shared`; `recomputed` and `discarded` come on top."""

    logical: Count = 0
    computed: Count = 0
    shared: SharedTokens = SharedTokens()
    recomputed: Count = 0
    discarded: Count = 0


class SingleRequests(Struct, frozen=True, kw_only=True):
    """The same calls sent one by one to a server that shares nothing."""

    prompt_tokens: Count = 0
    estimated_s: float = 0.0


class Receipts(Struct, frozen=True, kw_only=True):
    """Receipts of several programs, summed; their seconds too, though programs run side by side."""

    calls: Count = 0
    prompt_tokens: ReceiptPromptTokens = ReceiptPromptTokens()
    output_tokens: OutputTokens = OutputTokens()
    retokenized: Count = 0
    """Generated tokens that a later canonical prompt had to encode differently."""
    round_trips_saved: Count = 0
    wall_s: float = 0.0
    critical_path_s: float = 0.0
    as_single_requests: SingleRequests = SingleRequests()
    kv_block_seconds: float = 0.0


class Receipt(Receipts, frozen=True, kw_only=True):
    """What a program cost: what sums, and what does not."""

    critical_path: list[str] = []
    blocks_held: Count = 0


class UsageReport(Struct, frozen=True, kw_only=True):
    """What a tenant's programs cost that ended on these days (UTC), both included."""

    since: str | None = None
    until: str | None = None
    programs: dict[str, Count] = {}
    """How many, by the status with which they ended."""
    receipts: Receipts = Receipts()


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


class PutValue(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Body of `PUT .../variables/{name}`: exactly one of `value`, `error`, `source`."""

    value: Json | UnsetType = UNSET
    error: Problem | UnsetType = UNSET
    source: str | UnsetType = field(default=UNSET, name="from")
    """Another variable, made by appended nodes, whose value this one takes."""
    request_id: str | None = None
    """Of the `client.requested` that this answers."""


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
    "client.requested",
    "nodes.appended",
    "yield",
    "server.draining",
]


class Event(Struct, frozen=True):
    """One event of a program. `seq` is None for what is not journaled (deltas, draining)."""

    seq: Count | None
    type: EventType
    data: dict[str, Json]
