"""The trace of a program as spans with the attribute names of OpenInference. Pure functions.

A span is a JSON object in the form in which OpenTelemetry's SDKs print spans: `name`, `context`,
`parent_id`, `start_time`, `end_time`, `status_code`, `attributes`. The program is the root, and
every output of an LLM call and every step is its child. Attributes are flat, as the conventions
demand: lists have indices in their names, objects are JSON text. What the conventions do not name
begins with `conure.`.

Source: https://arize-ai.github.io/openinference/spec/
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from ...program.ir import Json
from ...program.status import ENDED, NodeStatus, Problem, ProgramStatus
from ..clock import format_timestamp
from .trace_records import TracedCall, TracedStep, TraceRecord

Span: TypeAlias = dict[str, Json]

_STEPS = frozenset({"generate", "call", "client"})
_KINDS = {"generate": "LLM", "call": "TOOL", "client": "TOOL"}


def program_span(status: ProgramStatus, inputs: Mapping[str, Json], session: str | None) -> Span:
    """Return the root span: inputs, outputs, and the tokens of all calls.

    Args:
        status: the program.
        inputs: the values of its inputs.
        session: its program session.
    """
    outputs = {
        name: variable.value
        for name in status.outputs
        if (variable := status.variables.get(name)) is not None and variable.value is not UNSET
    }
    attributes: dict[str, Json] = {
        **_content("input", dict(inputs)),
        **_content("output", outputs),
        "conure.program": status.id,
        "conure.status": status.status,
    }
    if session is not None:
        attributes["session.id"] = session
    if status.receipt is not UNSET:
        prompt, output = status.receipt.prompt_tokens, status.receipt.output_tokens
        completion = output.decoded + output.forced
        attributes |= _token_counts(prompt.logical, completion, prompt.logical - prompt.computed)
    return _span(
        status.id,
        name=status.name or "program",
        kind="CHAIN",
        key="",
        start=status.created_at,
        end=status.finished_at,
        problem=None if status.error is UNSET else status.error,
        attributes=attributes,
        is_over=status.status in ENDED,
    )


def record_span(program: str, seq: int, record: TraceRecord, *, token_ids: bool) -> Span:
    """Return the span of one record.

    Args:
        program: id of the program.
        seq: the sequence number of the record.
        record: an output of a call, or a step.
        token_ids: include the token ids of a call.
    """
    match record:
        case TracedCall():
            attributes, problem, name = _call_attributes(record), record.error, record.node
            if token_ids:
                attributes["conure.prompt_token_ids"] = record.prompt_ids
                attributes["conure.output_token_ids"] = record.output_ids
                attributes["conure.tokenizer"] = record.tokenizer
            kind, started_at = "LLM", record.started_at
        case TracedStep():
            attributes = {
                "tool.name": record.name,
                **_content("input", record.args),
                **_content("output", record.value),
                "conure.attempt": record.attempt,
            }
            problem, name, kind, started_at = None, record.name, "TOOL", record.started_at
        case _:
            attributes, problem, name = {}, record.reason, record.node
            kind, started_at = "LLM", record.finished_at
    return _span(
        program,
        name=name,
        kind=kind,
        key=str(seq),
        start=format_timestamp(started_at),
        end=format_timestamp(record.finished_at),
        problem=problem,
        attributes={"graph.node.id": record.node, "conure.job": record.job, **attributes},
    )


def unfinished_spans(status: ProgramStatus, recorded: Container[str]) -> Iterator[Span]:
    """Yield the spans of calls and steps that started, and ended without a result.

    Their content is not recorded, and their times are not known.

    Args:
        status: the program.
        recorded: nodes whose failure is recorded.
    """
    for node_id, node in status.nodes.items():
        is_failed = node.attempt and node.status in ENDED - {"done"}
        if node.op in _STEPS and is_failed and node_id not in recorded:
            yield _span(
                status.id,
                name=node_id,
                kind=_KINDS[node.op],
                key=f"node/{node_id}",
                start=None,
                end=None,
                problem=_problem_of(node),
                attributes={"graph.node.id": node_id, "conure.status": node.status},
            )


def error_line(problem: Problem) -> Span:
    """Return the last line of a trace that cannot be read to its end."""
    return {"error": msgspec.to_builtins(problem)}


def _problem_of(node: NodeStatus) -> Problem:
    return Problem(code=f"node.{node.status}") if node.error is UNSET else node.error


def _span(
    program: str,
    *,
    name: str,
    kind: str,
    key: str,
    start: str | None,
    end: str | None,
    problem: Problem | None,
    attributes: dict[str, Json],
    is_over: bool = True,
) -> Span:
    root = _hex(program, 8)
    is_ok = "OK" if is_over else "UNSET"
    if problem is not None:
        attributes = {
            **attributes,
            "exception.type": problem.code,
            "exception.message": problem.message,
        }
    return {
        "name": name,
        "context": {
            "trace_id": _hex(program, 16),
            "span_id": _hex(f"{program}/{key}", 8) if key else root,
        },
        "parent_id": root if key else None,
        "start_time": start,
        "end_time": end,
        "status_code": is_ok if problem is None else "ERROR",
        "attributes": {"openinference.span.kind": kind, **attributes},
    }


def _call_attributes(record: TracedCall) -> dict[str, Json]:
    attributes: dict[str, Json] = {
        "llm.system": "conure",
        "llm.model_name": record.model,
        "llm.invocation_parameters": _json(record.parameters),
        "llm.finish_reason": record.finish_reason,
        **_token_counts(len(record.prompt_ids), len(record.output_ids), record.num_cached),
        "conure.variable": record.variable,
        "conure.attempt": record.attempt,
    }
    for index, tool in enumerate(record.tools or ()):
        attributes[f"llm.tools.{index}.tool.json_schema"] = _json(tool)
    if record.messages is None:
        attributes["llm.prompts.0.prompt.text"] = record.prompt or ""
        attributes["llm.choices.0.completion.text"] = record.text
    else:
        answer = record.message or {"role": "assistant", "content": record.text}
        attributes |= _messages("llm.input_messages", record.messages)
        attributes |= _messages("llm.output_messages", [answer])
    return attributes | {"output.value": record.text, "output.mime_type": "text/plain"}


def _messages(prefix: str, messages: Sequence[Json]) -> dict[str, Json]:
    attributes: dict[str, Json] = {}
    for index, message in enumerate(messages):
        start = f"{prefix}.{index}.message"
        for name in ("role", "content", "name", "tool_call_id"):
            if message.get(name) is not None:
                attributes[f"{start}.{name}"] = message[name]
        for number, call in enumerate(message.get("tool_calls") or ()):
            attributes |= _tool_call(f"{start}.tool_calls.{number}.tool_call", call)
    return attributes


def _tool_call(prefix: str, call: Json) -> dict[str, Json]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {f"{prefix}.function.arguments": _json(call)}
    arguments = function.get("arguments")
    found = {
        f"{prefix}.id": call.get("id"),
        f"{prefix}.function.name": function.get("name"),
        f"{prefix}.function.arguments": (
            arguments if isinstance(arguments, str) else _json(arguments)
        ),
    }
    return {name: value for name, value in found.items() if value is not None}


def _token_counts(prompt: int, completion: int, cached: int) -> dict[str, Json]:
    return {
        "llm.token_count.prompt": prompt,
        "llm.token_count.completion": completion,
        "llm.token_count.total": prompt + completion,
        "llm.token_count.prompt_details.cache_read": cached,
    }


def _content(side: str, value: Json) -> dict[str, Json]:
    if isinstance(value, str):
        return {f"{side}.value": value, f"{side}.mime_type": "text/plain"}
    return {f"{side}.value": _json(value), f"{side}.mime_type": "application/json"}


def _json(value: Json) -> str:
    return msgspec.json.encode(value).decode()


def _hex(text: str, num_bytes: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()
