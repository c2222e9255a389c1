"""The outputs of an LLM call: their variables, sampling parameters and values.

Pure functions: from a node to its output specs, and from an engine's final report to a value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from conure.engine import protocol

from ...program.decoding.bodies import decode_json
from ...program.errors import ExpressionError, ProgramError, RunError
from ...program.expressions.values import check_size
from ...program.grammar import grammar_of
from ...program.ir import Constraint, GenerateNode, Json, Output, OutputForm, Sampling, Segment
from ...program.prompt_prefix import output_form
from ...program.seed import seed_of_name, seed_of_retry
from ...program.tools import read_tools
from ...prompts.served_model import EXPECTED_OUTPUT_TOKENS
from ...prompts.tokenizer import Tokenizer
from ...prompts.tool_calls import ToolUse, parse_answer
from ...prompts.tool_format import ToolFormat

_SAMPLING_FIELDS: Final = protocol.SamplingParams.__struct_fields__
_get_sampling: Final = attrgetter(*_SAMPLING_FIELDS)
_COLLECTIONS: Final = tuple(
    each.name for each in msgspec.structs.fields(protocol.SamplingParams) if each.default == ()
)
"""The fields that are lists or mappings in a program."""


class OutputSpec(NamedTuple):
    """One output of a call: its variable, sampling parameters and form."""

    variable: str
    sampling: Sampling
    form: OutputForm
    constraint: Constraint | None = None
    tools: ToolUse | None = None

    @property
    def grammar(self) -> str | None:
        """The constraint in the engine's format."""
        if self.tools is not None:
            return self.tools.grammar(self.constraint)
        return None if self.constraint is None else grammar_of(self.constraint)


class OutputResult(NamedTuple):
    """The result of one slot."""

    variable: str
    value: Json
    text: str
    streamed_text: str
    """The text as streamed to readers: without tool calls."""
    token_ids: list[int]
    epoch: int
    is_truncated: bool = False
    """Whether `max_tokens` or the end of the context cut the text off."""


def output_specs(
    node: GenerateNode, tool_format: ToolFormat | None = None
) -> tuple[OutputSpec, ...]:
    """Return the outputs of a call, one per slot.

    Args:
        node: a checked node.
        tool_format: tool format of the node's model; None ignores the node's tools.
    """
    if isinstance(node.prompt, list):
        return tuple(
            _output_spec(segment.output, segment)
            for segment in node.prompt
            if isinstance(segment.output, str)
        )
    output = node.output
    assert isinstance(output, Output), "checked when the graph was built"
    tools = read_tools(node) if tool_format is not None else None
    use = None if tools is None or tool_format is None else ToolUse(tools, tool_format)
    return (_output_spec(output.variable, output, use),)


def output_lengths(node: GenerateNode) -> list[tuple[str, int]]:
    """Return the variable and the maximum or expected tokens of each output of a checked node."""
    outputs: list[tuple[str, Output | Segment]]
    if isinstance(node.prompt, list):
        outputs = [(each.output, each) for each in node.prompt if isinstance(each.output, str)]
    else:
        assert isinstance(node.output, Output), "checked when the graph was built"
        outputs = [(node.output.variable, node.output)]
    return [(name, each.max_tokens or EXPECTED_OUTPUT_TOKENS) for name, each in outputs]


def _output_spec(
    variable: str, output: Output | Segment, tools: ToolUse | None = None
) -> OutputSpec:
    return OutputSpec(variable, output, output_form(output), output.constraint, tools)


def final_sampling(
    sampling: Sampling, *, max_tokens: int, name: str, num_retries: int = 0
) -> protocol.SamplingParams:
    """Return the engine's sampling parameters, with all defaults resolved.

    Fields are copied by name, so a new sampling parameter needs no change here.

    Args:
        sampling: the parameters of the program.
        max_tokens: the budget that the model's context leaves.
        name: of this output within all programs. A missing seed is a hash of it: it is fixed by
            the journaled program id and therefore the same after a restart.
        num_retries: how often the call was retried. Each retry has another seed, also if the
            program gives one.
    """
    fields: dict[str, Any] = dict(zip(_SAMPLING_FIELDS, _get_sampling(sampling), strict=True))
    fields["max_tokens"] = max_tokens
    fields["min_tokens"] = min(sampling.min_tokens, max_tokens)
    if sampling.seed is None:
        fields["seed"] = seed_of_name(f"{name}/{num_retries}" if num_retries else name)
    elif num_retries:
        fields["seed"] = seed_of_retry(sampling.seed, num_retries)
    for field in _COLLECTIONS:
        value = fields[field]
        fields[field] = tuple(value.items() if isinstance(value, dict) else value)
    return protocol.SamplingParams(**fields)


def value_of(
    target: OutputSpec,
    report: protocol.Finished,
    *,
    num_prompt: int,
    model: str,
    num_cached: int = 0,
    name: str = "",
    logprobs: Json = None,
) -> Json:
    """Return the value of an output that an engine has finished.

    Args:
        target: the output.
        report: the engine's final report.
        num_prompt: tokens before the output.
        num_cached: those whose KV was not computed for this output.
        model: name of the model.
        name: name of the output within all programs; ids of tool calls are derived from it.
        logprobs: `logprobs_of` its tokens, for the `logprobs` field of a message.

    Raises:
        RunError: `output.invalid` if the text violates its constraint, which can happen if the
            engine enforces only parts of it. Under `as: value`, and for choices as text:
            `output.incomplete` if the text was cut before it satisfied the constraint. Under
            `as: value`: `output.not_json` if it is not JSON within the limits of values.
    """
    if report.constraint == "broken":
        raise RunError(
            "output.invalid",
            f"output {target.variable} does not satisfy its schema: {_excerpt(report.text)}. While "
            "the model writes, only a part of this schema is enforced (not uniqueItems, contains, "
            "dependentRequired, not, or alternatives that overlap): simplify it, or give the node "
            "`retries`",
        )
    # The beginning of a choice is not a choice, and a program would take another branch for it.
    has_choices = target.constraint is not None and target.constraint.choices is not UNSET
    is_cut = report.constraint == "cut" and (target.form == "value" or has_choices)
    if is_cut and target.form != "message":
        raise RunError("output.incomplete", _cut_message(target, report))
    if target.form == "text":
        return report.text
    if target.form == "value":
        return _parse(target.variable, report.text)
    return _message(
        target,
        report,
        num_prompt=num_prompt,
        num_cached=num_cached,
        model=model,
        name=name,
        logprobs=logprobs,
    )


def _message(
    target: OutputSpec,
    report: protocol.Finished,
    *,
    num_prompt: int,
    num_cached: int,
    model: str,
    name: str,
    logprobs: Json,
) -> Json:
    content: str = report.text
    calls: list[Json] = []
    if target.tools is not None:
        content, calls = parse_answer(report.text, target.tools, name=name)
    is_complete = bool(calls) and report.reason != "length"
    message: dict[str, Json] = {
        "role": "assistant",
        "content": content,
        "finish_reason": "tool_calls" if is_complete else report.reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": report.num_decoded + report.num_forced,
            "total_tokens": num_prompt + report.num_decoded + report.num_forced,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
        "model": model,
    }
    if calls:
        message["tool_calls"] = calls
    if report.stop is not None:
        message["stop"] = report.stop
    if logprobs is not None:
        message["logprobs"] = logprobs
    return message


def logprobs_of(
    tokenizer: Tokenizer, ids: list[int], logprobs: list[protocol.TokenLogprob]
) -> list[Json]:
    """Return the log-probabilities of tokens in OpenAI's format, one entry per token."""

    def token_entry(token_id: int, logprob: float) -> dict[str, Json]:
        raw = tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode(errors="replace"),
            # JSON cannot represent -inf; OpenAI's API uses this number.
            "logprob": max(logprob, -9999.0),
            "bytes": list(raw),
        }

    return [
        {
            **token_entry(token_id, logprob.logprob),
            "top_logprobs": [token_entry(*each) for each in logprob.top],
        }
        for token_id, logprob in zip(ids, logprobs, strict=True)
    ]


class ShownTokens:
    """Holds the log-probabilities of tokens until the whole text of the token was reported.

    An engine holds text back that may be the beginning of a stop string. If the string follows, the
    value contains neither the text nor its tokens.
    """

    def __init__(self) -> None:
        self._held: deque[dict[str, Json]] = deque()
        self._num_hidden_bytes = 0
        """Bytes of text beyond that of the returned tokens."""

    def add(self, entries: Iterable[dict[str, Json]], text: str) -> list[Json]:
        """Add the entries of tokens, from `logprobs_of`, and text; return the complete entries."""
        self._held += entries
        self._num_hidden_bytes += len(text.encode())
        shown: list[Json] = []
        while self._held and len(self._held[0]["bytes"]) <= self._num_hidden_bytes:
            entry = self._held.popleft()
            self._num_hidden_bytes -= len(entry["bytes"])
            shown.append(entry)
        return shown


def _parse(variable: str, text: str) -> Json:
    try:
        # The same limits as for client values: both are processed in the same way.
        value: Json = decode_json(text.encode(), Any)
        check_size(value)
    except (ProgramError, ExpressionError, UnicodeError) as error:
        raise RunError(
            "output.not_json", f"output {variable} is not JSON ({error}): {_excerpt(text)}"
        ) from error
    return value


def _cut_message(target: OutputSpec, report: protocol.Finished) -> str:
    """Return what was cut, by what, and what to set instead."""
    what, bounds = _shape_of(target.constraint)
    advice = f"raise max_tokens{bounds}"
    num_tokens = report.num_decoded + report.num_forced
    limit = target.sampling.max_tokens
    if isinstance(report.stop, str):
        cause, advice = "a stop string", "remove it; a constraint ends by itself"
    elif limit is None or num_tokens < limit:
        cause = f"the end of the model's context after {num_tokens} tokens"
        advice = f"shorten the prompt{bounds}"
    else:
        cause = f"max_tokens={limit}"
    return (
        f"output {target.variable} was cut off by {cause} before {what} was complete: {advice}. "
        f"It has no partial value; the text was {_excerpt(report.text)}"
    )


def _shape_of(constraint: Constraint | None) -> tuple[str, str]:
    """Return what a constraint describes, and how a schema can allow less."""
    if constraint is not None and constraint.choices is not UNSET:
        return "one of its choices", ""
    schema = None if constraint is None else constraint.json_schema
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "array":
        least = ', or bound the list, as schema={"type": "array", "maxItems": 3, "items": '
        return "its list", f'{least}{{"type": "string", "maxLength": 40}}}}'
    if kind == "object":
        return "its object", ", or bound its texts by maxLength and its lists by maxItems"
    return "what its constraint describes", ", or bound the lengths in the constraint"


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
