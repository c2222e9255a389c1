"""A program as data: the frozen records behind the JSON of a submission.

Knows the names and the types of the wire (bounds included), and turns JSON into records.
Refuses to know what a record means: names, cycles and producers are `graph`'s business,
expressions are plain JSON here and are read by `expression`.

Kept true: a decoded record holds no value out of its bounds, and encoding it again gives
JSON that decodes to an equal record.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

Json: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list or dict with string keys."""

Expression: TypeAlias = Any
"""JSON as `expression` reads it: an object is one operator, all else stands for itself."""

MAX_NODES = 10_000
"""Nodes in one submission, and nodes that one session may hold."""
MAX_OUTPUT_TOKENS = 1_000_000

NAME_PATTERN = r"^[A-Za-z_]\w*$(?!\n)"
"""`$` alone would let one newline through."""
Name = Annotated[str, Meta(pattern=NAME_PATTERN, max_length=128)]
"""A variable or a node. Instances of bodies append dotted indices (`name.3.0`)."""
Seconds = Annotated[float, Meta(gt=0, le=7 * 86_400)]
Probability = Annotated[float, Meta(ge=0, le=1)]


class Sampling(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """How the tokens of one output are chosen and when they end."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    """Tokens at most. None: 512, or what the model's context leaves if that is less."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """0 keeps every token."""
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """None: drawn once, journaled, never drawn again."""
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)
    ] = []
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=64)] = []
    ignore_eos: bool = False
    logit_bias: Annotated[
        dict[Annotated[int, Meta(ge=0, lt=2**31)], Annotated[float, Meta(ge=-100, le=100)]],
        Meta(max_length=1_024),
    ] = {}
    """Token ids (as strings in JSON) to what is added to their logits."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Under `as: message`: tell how likely each token was, and this many others beside it."""


class Constraint(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A language that the output must belong to; exactly one field is set.

    JSON comes out compactly, without blanks between its tokens. A `list` is one of strings.
    """

    choices: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | UnsetType = UNSET
    regex: Annotated[str, Meta(max_length=65_536)] | UnsetType = UNSET
    json_schema: dict[str, Json] | bool | UnsetType = UNSET
    type: Literal["string", "int", "float", "bool", "list"] | UnsetType = UNSET
    lark: Annotated[str, Meta(max_length=65_536)] | UnsetType = UNSET


OutputForm: TypeAlias = Literal["text", "value", "message"]


class Output(Sampling, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The output of a chat call: a variable, its sampling, and the form of its value."""

    variable: Name
    constraint: Constraint | None = None
    form: OutputForm | None = field(default=None, name="as")
    """None: `value` under a `type` or `json_schema` constraint, else `text`."""


class Segment(Sampling, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """One piece of a prompt or of a message's content: text, an input, an output or a part.

    Exactly one of `text`, `input`, `output`, `part` is set (checked by `check`), and only
    an output carries sampling fields, `constraint` and `as`.
    """

    text: Annotated[str, Meta(max_length=4_194_304)] | UnsetType = UNSET
    special: bool = False
    """With `text`: the text may yield special tokens. Inputs and outputs never do."""
    input: Expression | UnsetType = UNSET
    """A bare string names a variable; anything else is an expression."""
    output: Name | UnsetType = UNSET
    part: dict[str, Json] | UnsetType = UNSET
    constraint: Constraint | None = None
    form: OutputForm | None = field(default=None, name="as")


class Message(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A chat message, or `{"splice": name}`: a variable that holds one message or a list."""

    role: Annotated[str, Meta(min_length=1, max_length=64)] | UnsetType = UNSET
    content: str | Annotated[list[Segment], Meta(max_length=10_000)] | UnsetType | None = UNSET
    splice: Name | UnsetType = UNSET
    name: str | UnsetType = UNSET
    tool_calls: Annotated[list[Json], Meta(max_length=1_000)] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


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


AnyNode: TypeAlias = Generate | Call | Client | Expr


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
