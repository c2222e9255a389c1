"""The outputs of a call: which variables they become, how they are sampled, in which form.

Pure: from a node to its targets, from what an engine finished to a value.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from conure.engine import api

from ..program.decode import decode_json
from ..program.errors import ExpressionError, ProgramError, RunError
from ..program.grammar import grammar_of
from ..program.ir import Constraint, Generate, Json, Output, OutputForm, Sampling, Segment
from ..program.rope import output_form
from ..program.tools import read_tools
from ..program.value import check_size
from ..prompts.tokenizer import Tokenizer
from ..prompts.tool_calls import ToolUse, read_answer
from ..prompts.tool_format import ToolFormat


class Target(NamedTuple):
    """One output of a call: which variable, sampled how, in which form."""

    variable: str
    sampling: Sampling
    form: OutputForm
    constraint: Constraint | None = None
    tools: ToolUse | None = None

    @property
    def grammar(self) -> str | None:
        """The constraint as an engine wants it."""
        if self.tools is not None:
            return self.tools.grammar(self.constraint)
        return None if self.constraint is None else grammar_of(self.constraint)


class Outcome(NamedTuple):
    """What a slot produced."""

    variable: str
    value: Json
    text: str
    told: str
    """Of the text, what readers of its deltas get: all but tool calls."""
    token_ids: list[int]
    epoch: int


def targets(node: Generate, tool_format: ToolFormat | None = None) -> tuple[Target, ...]:
    """The outputs of a call, one per slot.

    Args:
        node: a checked node.
        tool_format: of its model. None: what it says of tools is left out.
    """
    if isinstance(node.prompt, list):
        return tuple(
            _target(segment.output, segment)
            for segment in node.prompt
            if isinstance(segment.output, str)
        )
    output = node.output
    assert isinstance(output, Output), "checked when the graph was built"
    tools = read_tools(node) if tool_format is not None else None
    use = None if tools is None or tool_format is None else ToolUse(tools, tool_format)
    return (_target(output.variable, output, use),)


def _target(variable: str, output: Output | Segment, tools: ToolUse | None = None) -> Target:
    return Target(variable, output, output_form(output), output.constraint, tools)


def final_sampling(sampling: Sampling, *, max_tokens: int, name: str) -> api.Sampling:
    """The engine's record: no defaults are left open in it.

    Args:
        sampling: what the program says.
        max_tokens: what the model's context allows of it.
        name: of this output in this program; a seed that is not given is a hash of it. So it
            is drawn with the program's id, journaled with that, and never drawn again.
    """
    seed = sampling.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    return api.Sampling(
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=seed,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logit_bias=tuple(sampling.logit_bias.items()),
        logprobs=sampling.logprobs,
    )


def value_of(
    target: Target,
    report: api.Finished,
    *,
    num_prompt: int,
    model: str,
    name: str = "",
    logprobs: Json = None,
) -> Json:
    """The value of an output that an engine finished.

    Args:
        target: the output.
        report: its end.
        num_prompt: tokens before it.
        model: who wrote it.
        name: of the output among all programs; ids of tool calls are made of it.
        logprobs: what a message tells about its tokens (`logprobs_of`).

    Raises:
        RunError: `output.invalid` if the text breaks its constraint, which happens where an
            engine could enforce only parts of it; under `as: value` `output.incomplete` if
            it was cut before the constraint was satisfied, `output.not_json` if it is no
            JSON that fits our values.
    """
    if report.constraint == "broken":
        raise RunError(
            "output.invalid",
            f"output {target.variable} does not satisfy its schema: {_excerpt(report.text)}",
        )
    if target.form == "text":
        return report.text
    if target.form == "value":
        if report.constraint == "cut":
            cause = "a stop string" if isinstance(report.stop, str) else "max_tokens"
            raise RunError(
                "output.incomplete",
                f"output {target.variable} was ended by {cause} before it satisfied its "
                f"constraint: {_excerpt(report.text)}",
            )
        return _parse(target.variable, report.text)
    content: str = report.text
    calls: list[Json] = []
    if target.tools is not None:
        content, calls = read_answer(report.text, target.tools, name=name)
    is_whole = bool(calls) and report.reason != "length"
    message: dict[str, Json] = {
        "role": "assistant",
        "content": content,
        "finish_reason": "tool_calls" if is_whole else report.reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": report.num_decoded + report.num_forced,
            "total_tokens": num_prompt + report.num_decoded + report.num_forced,
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


def logprobs_of(tokenizer: Tokenizer, ids: list[int], chances: list[api.Chance]) -> Json:
    """How likely each token was, in OpenAI's shape."""

    def told(token_id: int, logprob: float) -> dict[str, Json]:
        raw = tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode(errors="replace"),
            # JSON has no infinity; this is OpenAI's word for it.
            "logprob": max(logprob, -9999.0),
            "bytes": list(raw),
        }

    content = [
        {**told(token_id, chance.logprob), "top_logprobs": [told(*each) for each in chance.top]}
        for token_id, chance in zip(ids, chances, strict=True)
    ]
    return {"content": content}


def _parse(variable: str, text: str) -> Json:
    try:
        # The limits of what clients send: a model's JSON goes the same ways afterwards.
        value: Json = decode_json(text.encode(), Any)
        check_size(value)
    except (ProgramError, ExpressionError, UnicodeError) as error:
        raise RunError(
            "output.not_json", f"output {variable} is not JSON ({error}): {_excerpt(text)}"
        ) from error
    return value


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
