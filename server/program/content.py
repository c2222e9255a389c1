"""The contents of an LLM call: segments, messages, outputs and constraints.

Out of scope: nodes (`nodes`) and what an expression means (`expressions`).

Invariant: every value of a decoded record is within its bounds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

Json: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list or dict with string keys."""

Expression: TypeAlias = Any
"""JSON as `expressions.evaluate` reads it: an object is an operator, the rest is literal."""

MAX_OUTPUT_TOKENS = 1_000_000
MAX_TEXT = 16 * 1024 * 1024
"""Characters of one literal text: more than a million tokens of English."""

NAME_PATTERN = r"^[A-Za-z_]\w*$(?!\n)"
"""`$` alone would accept a final newline."""
Name = Annotated[str, Meta(pattern=NAME_PATTERN, max_length=128)]
"""A variable or a node. Instances of bodies append indices (`name.3.0`)."""
Probability = Annotated[float, Meta(ge=0, le=1)]


class Sampling(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The sampling parameters of one output."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    """None: what the model's context leaves after the prompt."""
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
    """None: drawn once, and journaled."""
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)
    ] = []
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=64)] = []
    ignore_eos: bool = False
    logit_bias: Annotated[
        dict[Annotated[int, Meta(ge=0, lt=2**31)], Annotated[float, Meta(ge=-100, le=100)]],
        Meta(max_length=1_024),
    ] = {}
    """Token ids (strings in JSON) to a value that is added to their logits."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """With `as: message`: return the log probability of each token and of this number of
    alternatives."""


class Constraint(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A constraint on the text of an output; exactly one field is set.

    JSON is compact, without spaces between its tokens. A `list` is a list of strings.
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
    """One segment of a prompt or of a message's content.

    Exactly one of `text`, `input`, `output`, `part` is set. Only an output has sampling fields,
    `constraint` and `as`.
    """

    text: Annotated[str, Meta(max_length=MAX_TEXT)] | UnsetType = UNSET
    special: bool = False
    """With `text`: control tokens in the text are encoded as such. In inputs and outputs they
    never are."""
    input: Expression | UnsetType = UNSET
    """A bare string names a variable; anything else is an expression."""
    output: Name | UnsetType = UNSET
    part: dict[str, Json] | UnsetType = UNSET
    constraint: Constraint | None = None
    form: OutputForm | None = field(default=None, name="as")


class Message(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A chat message, or `{"splice": name}`: a variable with a message or a list of them."""

    role: Annotated[str, Meta(min_length=1, max_length=64)] | UnsetType = UNSET
    content: str | Annotated[list[Segment], Meta(max_length=10_000)] | UnsetType | None = UNSET
    splice: Expression | UnsetType = UNSET
    """A name; only instances of bodies have expressions here."""
    name: str | UnsetType = UNSET
    tool_calls: Annotated[list[Json], Meta(max_length=1_000)] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


def encoded_size(value: Json) -> int:
    """Return the length of a value: of a string its characters, of another value its JSON."""
    return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
