"""The records of a submission: a program with its inputs, objectives and options.

The kinds of nodes are in `nodes`, the contents of a call in `content`.

Out of scope: what a record means. Names, cycles and producers are checked by `graph`, expressions
(plain JSON here) by `expressions.evaluate`.

Invariants: every value of a decoded record is within its bounds. The JSON of a record decodes to an
equal record.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from .content import (
    MAX_OUTPUT_TOKENS,
    NAME_PATTERN,
    Constraint,
    Expression,
    Json,
    Message,
    Name,
    Output,
    OutputForm,
    Probability,
    Sampling,
    Segment,
)
from .nodes import (
    AnyNode,
    CallNode,
    ClientNode,
    Control,
    ExprNode,
    GenerateNode,
    GraphNode,
    IfNode,
    KillNode,
    LoopNode,
    MapNode,
    Node,
    ProcedureNode,
    RoundEndNode,
    TryNode,
    WaitNode,
    YieldNode,
)
from .nodes.base import MAX_NODES, Seconds
from .nodes.control.loop import MAX_ROUNDS
from .nodes.control.map import MAX_WIDTH
from .nodes.control.try_ import Handler

__all__ = [
    "MAX_NODES",
    "MAX_OUTPUT_TOKENS",
    "MAX_ROUNDS",
    "MAX_TITLE_CHARS",
    "MAX_WIDTH",
    "NAME_PATTERN",
    "AnyNode",
    "Append",
    "CallNode",
    "ClientNode",
    "Constraint",
    "Control",
    "Deadline",
    "ExprNode",
    "Expression",
    "GenerateNode",
    "GraphNode",
    "Handler",
    "IfNode",
    "Job",
    "Json",
    "KillNode",
    "Limits",
    "LoopNode",
    "MapNode",
    "Message",
    "Name",
    "Node",
    "Objective",
    "Options",
    "Output",
    "OutputForm",
    "Probability",
    "ProcedureNode",
    "Program",
    "RoundEndNode",
    "Sampling",
    "Seconds",
    "Segment",
    "SourceSubmission",
    "Submission",
    "TryNode",
    "Variable",
    "WaitNode",
    "YieldNode",
]

MAX_TITLE_CHARS = 256
"""Characters of the name of a program."""


class Variable(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A declared semantic variable."""

    type: Literal["string", "int", "float", "bool", "list", "object", "any"] | None = None
    schema: dict[str, Json] | None = None
    """A JSON Schema that every value matches, of the keywords in `expressions.value_schema`."""
    default: Json | UnsetType = UNSET
    """The value of an input that the submission does not give."""
    description: Annotated[str, Meta(max_length=4_096)] = ""


class Job(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Nodes that are cancelled together and share an error policy."""

    parent: Name | None = None
    """The job that contains this job."""
    on_error: Literal["fail", "isolate"] = "fail"
    """`fail`: a failed node ends the program. `isolate`: only the nodes that read the failed node's
    value are skipped."""
    timeout_s: Seconds | None = None
    """Seconds from the start of the job's first node. Nodes of the job that have not ended by then
    fail."""


class Limits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Limits set by the author of a program."""

    max_calls: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=10**12)] | None = None


class Program(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A graph of nodes connected by semantic variables."""

    name: Annotated[str, Meta(max_length=MAX_TITLE_CHARS)] = ""
    variables: dict[Name, Variable] = {}
    nodes: Annotated[list[AnyNode], Meta(max_length=MAX_NODES)] = []
    jobs: dict[Name, Job] = {}
    outputs: Annotated[list[Name], Meta(max_length=MAX_NODES)] = []
    limits: Limits = Limits()


class Deadline(Struct, frozen=True, forbid_unknown_fields=True):
    """An objective: the output is needed within this number of seconds."""

    deadline_s: Seconds


Objective: TypeAlias = Literal["latency", "throughput", "ttft", "tpot"] | Deadline
"""The goal for an output. `ttft` (time to the first token), `tpot` (time per output token) and
deadlines count as `latency`."""


class Options(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one submission."""

    deadline_s: Seconds | None = None
    """The program ends with `deadline_exceeded` if it takes longer than this."""
    detach: bool = True
    """False: cancel the program if, for some time, no client follows it or waits for a value."""
    tokens: Literal["canonical", "kept"] = "canonical"
    """`canonical`: every prompt is tokenised as one text. `kept` is not supported yet."""
    trace: bool = False
    """Record what every call reads and writes, texts and token ids, for the program's trace."""
    policy: str | None = None
    """The scheduling policy that the program needs; a server with another one rejects it."""
    start: Literal["eager", "demand"] = "eager"
    """`demand`: run only the nodes whose values a client requests."""
    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Consecutive programs of one session are queued as if submitted with the first one."""
    idle_timeout_s: Seconds | None = None
    """Cancel the program if, for this time, no client has sent a request for it and none of its
    nodes was queued or running."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Share cached KV only with programs of the tenant that have the same salt."""
    clip_outputs: bool = False
    """Reduce `max_tokens` to what the context leaves; otherwise such a call fails with
    `prompt.too_long`."""
    require_inputs: bool | None = None
    """True: refuse the submission if an input that the program reads or may read has neither a
    value nor a default, instead of waiting for the value. Null means false. `Client.run` sends true
    unless the caller sets this option."""


class Submission(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/programs`."""

    program: Program
    id: Annotated[str, Meta(pattern=r"^p_[0-9a-f]{24}$")] | None = None
    """Chosen by the client, which can then append nodes before it receives the response. Default:
    chosen by the server."""
    inputs: dict[Name, Json] = {}
    objectives: dict[Name, Objective] = {}
    options: Options = Options()
    open: bool = False
    """True: the program accepts more nodes until it is closed."""


class SourceSubmission(
    Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """The body of `POST /v1/programs` with a program as text; see `docs/language.md`."""

    source: Annotated[str, Meta(max_length=1_000_000)]
    language: Literal["decoder", "template"] = "decoder"
    """`decoder`: Python's syntax. `template`: text with slots `{{...}}`."""
    name: Annotated[str, Meta(max_length=MAX_TITLE_CHARS)] = ""
    """The name of the program."""
    inputs: dict[Name, Json] = {}
    objectives: dict[Name, Objective] = {}
    options: Options = Options()


class Append(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/programs/{id}/nodes`."""

    variables: dict[Name, Variable] = {}
    nodes: Annotated[list[AnyNode], Meta(max_length=MAX_NODES)] = []
    inputs: dict[Name, Json] = {}
    outputs: Annotated[list[Name], Meta(max_length=MAX_NODES)] = []
    objectives: dict[Name, Objective] = {}
    close: bool = False
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Identifies the request. The program applies the first request with an id, and answers later
    ones as if it had applied them. A client whose answer was lost can therefore repeat the
    request."""
