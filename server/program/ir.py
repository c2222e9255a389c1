"""A program as data: the frozen records behind the JSON of a submission.

Knows the names and the types of the wire (bounds included), and turns JSON into records.
What stands inside a call is in `content`. Refuses to know what a record means: names, cycles
and producers are `graph`'s business, expressions are plain JSON here and are read by
`expression`.

Kept true: a decoded record holds no value out of its bounds, and encoding it again gives
JSON that decodes to an equal record.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

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

__all__ = [
    "MAX_NODES",
    "MAX_OUTPUT_TOKENS",
    "MAX_ROUNDS",
    "MAX_WIDTH",
    "NAME_PATTERN",
    "AnyNode",
    "Append",
    "Call",
    "Client",
    "Constraint",
    "Control",
    "Deadline",
    "Expr",
    "Expression",
    "Generate",
    "Handler",
    "If",
    "Job",
    "Json",
    "Kill",
    "Limits",
    "Loop",
    "Map",
    "Message",
    "Name",
    "Node",
    "Objective",
    "Options",
    "Output",
    "OutputForm",
    "Placed",
    "Probability",
    "Program",
    "Round",
    "Sampling",
    "Seconds",
    "Segment",
    "Submission",
    "Try",
    "Variable",
    "Wait",
    "Yield",
]

MAX_NODES = 10_000
"""Nodes in one submission, bodies included, and nodes that one session may be sent."""
MAX_WIDTH = 10_000
"""Items of one map."""
MAX_ROUNDS = 10_000
"""Rounds of one loop."""
NUM_ROUNDS = 1_000
"""Rounds of a loop that does not say."""

Seconds = Annotated[float, Meta(gt=0, le=7 * 86_400)]


class Node(
    Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="op",
):
    """What every node has, whatever it does."""

    id: Name
    job: Name = "main"
    after: Annotated[list[Name], Meta(max_length=1_000)] = []
    """Nodes that must have ended first, however they ended."""
    when: Expression | UnsetType = UNSET
    """A bare string names a variable. False skips the node."""
    timeout_s: Seconds | None = None
    retries: Annotated[int, Meta(ge=0, le=10)] = 0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    on_error: Literal["fail", "isolate"] | None = None
    """None: what the node's job says."""
    meta: Json = None


class Generate(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="generate",
    tag_field="op",
):
    """One LLM call: a growing `prompt` with outputs in it, or `messages` and an `output`."""

    model: (
        Annotated[str, Meta(min_length=1, max_length=256)]
        | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=16)]
    ) = "default"
    """A name, or a list: any of these."""
    prompt: Annotated[list[Segment], Meta(min_length=1, max_length=10_000)] | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(max_length=10_000)] | UnsetType = UNSET
    output: Output | UnsetType = UNSET
    tools: Annotated[list[Json], Meta(max_length=1_000)] | UnsetType = UNSET
    tool_choice: Json | UnsetType = UNSET
    parallel_tool_calls: bool = True
    """False: an answer holds one tool call at most."""


class Call(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="call",
    tag_field="op",
):
    """A function that is registered on the server."""

    function: Annotated[str, Meta(min_length=1, max_length=128)]
    args: dict[str, Expression] = {}
    output: Name | UnsetType = UNSET


class Client(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="client",
    tag_field="op",
):
    """A step that only the client can run: asked for by an event, answered by PUT."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    args: dict[str, Expression] = {}
    output: Name


class Expr(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="expr",
    tag_field="op",
):
    """A pure computation on JSON values."""

    expr: Expression
    output: Name


class Map(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="map",
    tag_field="op",
):
    """A body for every item of a list, all at once; its width is known when the list is."""

    items: Expression
    """A list. A bare string names a variable."""
    item: Name = field(name="as")
    """What the body calls its item."""
    index: Name | UnsetType = UNSET
    """What the body calls the item's place, from 0."""
    body: Body
    collect: dict[Name, Expression] = {}
    """A variable outside: the name inside whose values it lists, in the order of the items.
    Only instances hold more than names here."""
    max_width: Annotated[int, Meta(ge=0, le=MAX_WIDTH)] = MAX_WIDTH
    """A longer list fails the map."""
    fail: Literal["any", "all"] = "any"
    """`any`: an item that fails fails the map. `all`: it is null, unless every item fails."""


class If(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="if",
    tag_field="op",
):
    """One of two bodies, decided when the condition is known; the other never starts."""

    cond: Expression
    """A bare string names a variable."""
    then: Body = []
    otherwise: Body = field(default_factory=list, name="else")
    merge: dict[Name, tuple[Expression, Expression]] = {}
    """A variable outside: its name after `then` and after `else`, of which one is read. Only
    instances hold more than names here."""


class Loop(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="loop",
    tag_field="op",
):
    """A body round after round, until a condition holds or the rounds are over."""

    items: Expression | UnsetType = UNSET
    """A list, one round for each. A bare string names a variable."""
    count: Expression | UnsetType = UNSET
    item: Name | UnsetType = field(default=UNSET, name="as")
    index: Name | UnsetType = UNSET
    carry: dict[Name, tuple[Expression, Expression]] = {}
    """A variable: what it is in the first round, and what in the next one, seen from the end of
    a round. Outside it is what it was after the last."""
    body: Body
    until: Expression | UnsetType = UNSET
    """Looked at when a round has ended; true ends the loop."""
    max_iter: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)] = NUM_ROUNDS
    """Rounds after which the loop fails if it would go on."""


class Wait(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="wait",
    tag_field="op",
):
    """Ends when enough of its variables have a value, and lets go who comes `after` it."""

    variables: Annotated[list[Name], Meta(min_length=1, max_length=MAX_NODES)]
    mode: Literal["all", "any"] | Annotated[int, Meta(ge=1, le=MAX_NODES)] = "all"
    """A number: so many of them."""


class Kill(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="kill",
    tag_field="op",
):
    """Ends what writes these variables, or whole jobs; what has ended stays as it is."""

    targets: Annotated[list[Name], Meta(min_length=1, max_length=MAX_NODES)]


class Yield(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="yield",
    tag_field="op",
):
    """Tells readers of the events a value."""

    value: Expression
    mode: Literal["value", "delta", "partial"] = "value"


class Handler(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """What runs instead of a body that failed."""

    codes: Annotated[list[str], Meta(max_length=1_000)] = []
    """Failures that it is for; empty: any."""
    body: Body = []


class Try(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="try",
    tag_field="op",
):
    """A body whose failure runs the body again, or another one."""

    body: Body
    handlers: Annotated[list[Handler], Meta(max_length=1_000)] = []
    merge: dict[Name, list[Expression]] = {}
    """A variable outside: its name in the body and in each handler. Only instances hold more
    than names here."""


class Round(
    Node,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag="round",
    tag_field="op",
):
    """The end of one round of a loop. Only the server makes these."""

    carry: dict[str, Expression] = {}
    """What the variable of the next round is."""
    keeps: dict[str, str] = {}
    """The same variable in this round: its value stays if the next one is absent."""
    until: Expression | UnsetType = UNSET
    more: str = ""
    """The variable that says whether there is another round."""


Body: TypeAlias = Annotated[list["AnyNode"], Meta(max_length=MAX_NODES)]
Control: TypeAlias = Map | If | Loop | Try
"""Nodes that have bodies."""
AnyNode: TypeAlias = Generate | Call | Client | Expr | Control | Wait | Kill | Yield
Placed: TypeAlias = AnyNode | Round
"""What a graph consists of."""


class Variable(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A declared semantic variable."""

    type: Literal["string", "int", "float", "bool", "list", "object", "any"] | None = None
    schema: dict[str, Json] | None = None


class Job(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A region of a program that fails, ends and is killed as one."""

    parent: Name | None = None
    on_error: Literal["fail", "isolate"] = "fail"
    timeout_s: Seconds | None = None


class Limits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds that the program's author sets on it."""

    max_calls: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=10**12)] | None = None


class Program(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A graph of calls joined by semantic variables."""

    name: Annotated[str, Meta(max_length=256)] = ""
    variables: dict[Name, Variable] = {}
    nodes: Annotated[list[AnyNode], Meta(max_length=MAX_NODES)] = []
    jobs: dict[Name, Job] = {}
    outputs: Annotated[list[Name], Meta(max_length=MAX_NODES)] = []
    limits: Limits = Limits()


class Deadline(Struct, frozen=True, forbid_unknown_fields=True):
    """An objective: the output is worth having within this many seconds."""

    deadline_s: Seconds


Objective: TypeAlias = Literal["latency", "throughput", "ttft", "tpot"] | Deadline


class Options(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """How one submission runs."""

    deadline_s: Seconds | None = None
    detach: bool = True
    tokens: Literal["canonical", "kept"] = "canonical"
    trace: bool = False
    """Keep prompt and output token ids of every call in the status."""
    policy: str | None = None
    start: Literal["eager", "demand"] = "eager"
    session: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Programs of one session that follow each other keep the first one's place in line."""


class Submission(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/programs`."""

    program: Program
    inputs: dict[Name, Json] = {}
    objectives: dict[Name, Objective] = {}
    options: Options = Options()
    open: bool = False
    """True: a session, which takes more nodes until it is closed."""


class Append(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/programs/{id}/nodes`."""

    variables: dict[Name, Variable] = {}
    nodes: Annotated[list[AnyNode], Meta(max_length=MAX_NODES)] = []
    inputs: dict[Name, Json] = {}
    outputs: Annotated[list[Name], Meta(max_length=MAX_NODES)] = []
    objectives: dict[Name, Objective] = {}
    close: bool = False
