"""The records of an explanation: the body of `POST /v1/programs/explain`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ..procedures import PinnedPrefix
from ..status import Count, OutputTokens, PromptTokens, Receipt


class KnownTokens(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The tokens of a text. Parts of the text may be unknown before the run."""

    tokens: Count = 0
    """Tokens of the literal text and of known values."""
    values: list[str] = []
    """Variables whose values add an unknown number of tokens."""


class ExplainedNode(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One node. A call has the fields from `objective` on."""

    id: str
    op: str
    inside: str | None = None
    """The node whose body contains it."""
    job: str = "main"
    reads: list[str] = []
    writes: list[str] = []
    after: list[str] = []
    objective: Literal["latency", "throughput"] | None = None
    group: str | None = None
    """Its task group: calls that are scheduled as a unit."""
    calls_after: Count = 0
    """Calls after this one on the longest path to an output."""
    times: Count = 1
    """How often it runs at most, retries included."""
    prompt: KnownTokens | UnsetType = UNSET
    max_output_tokens: Count = 0
    actual_prompt: PromptTokens | UnsetType = UNSET
    """Prompt tokens of the run, summed over all instances."""
    actual_output: OutputTokens | UnsetType = UNSET
    actual_runs: Count = 0


class Edge(Struct, frozen=True, kw_only=True, rename={"source": "from", "target": "to"}):
    """`target` waits for `source`."""

    source: str
    target: str


class SharedSpan(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The beginning of a prompt that several calls have in common."""

    calls: list[str]
    times: Count
    """How many prompts begin with it, with all items of maps."""
    prefix: KnownTokens
    saved_tokens: Count
    """Known tokens that are computed once instead of `times` times."""


class WorstCase(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Upper bounds, if every loop runs all its rounds and every map has its greatest width."""

    calls: Count
    output_tokens: Count
    prompt_tokens: Count
    """Tokens if no prefix is shared; those of one output are at most the model's context."""


class Advice(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Something that is allowed but probably a mistake, with what to do."""

    code: str
    """`variable.unread`, `input.unread`, `node.dead`, `prompt.trailing`, `prompt.order`,
    `program.no_outputs`."""
    message: str
    node: str | None = None
    fix: str = ""
    saves_tokens: Count = 0
    """Prompt tokens that the fix saves, as far as they are known."""


class ProgramExplanation(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a program will do; with `receipt`, what it did."""

    name: str = ""
    version: str
    """Hash of the program; a stored procedure with the same program has this version."""
    outputs: dict[str, str] = {}
    """Every output with its objective."""
    nodes: list[ExplainedNode] = []
    edges: list[Edge] = []
    groups: dict[str, list[str]] = {}
    """Task groups with their calls."""
    shared: list[SharedSpan] = []
    worst_case: WorstCase
    advice: list[Advice] = []
    pins: dict[str, PinnedPrefix] = {}
    """The pinned prefixes of the stored procedures among its nodes, by `name@version`."""
    receipt: Receipt | UnsetType = UNSET
