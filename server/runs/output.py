"""The outputs of a call: which variables they become, how they are sampled, in which form.

Pure: from a node to its targets, from what an engine finished to a value.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from conure.engine import api

from ..program.errors import RunError
from ..program.ir import Generate, Json, Output, OutputForm, Sampling
from ..program.rope import output_form


@dataclass(frozen=True, slots=True)
class Target:
    """One output of a call: which variable, sampled how, in which form."""

    variable: str
    sampling: Sampling
    form: OutputForm


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a slot produced."""

    variable: str
    value: Json
    text: str
    token_ids: list[int]
    epoch: int


def targets(node: Generate) -> tuple[Target, ...]:
    """The outputs of a call, one per slot."""
    if isinstance(node.prompt, list):
        return tuple(
            Target(segment.output, segment, output_form(segment))
            for segment in node.prompt
            if isinstance(segment.output, str)
        )
    output = node.output
    assert isinstance(output, Output), "checked when the graph was built"
    return (Target(output.variable, output, output_form(output)),)


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
    )


def value_of(target: Target, report: api.Finished, *, num_prompt: int, model: str) -> Json:
    """The value of an output that an engine finished.

    Raises:
        RunError: `output.not_json` under `as: value`.
    """
    if target.form == "text":
        return report.text
    if target.form == "value":
        return _parse(target.variable, report.text)
    message: dict[str, Json] = {
        "role": "assistant",
        "content": report.text,
        "finish_reason": report.reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": report.num_decoded,
            "total_tokens": num_prompt + report.num_decoded,
        },
        "model": model,
    }
    if report.stop is not None:
        message["stop"] = report.stop
    return message


def _parse(variable: str, text: str) -> Json:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RunError(
            "output.not_json", f"output {variable} is not JSON ({error}): {text[:80]!r}"
        ) from error
