"""Records what one LLM call reads and writes, for the trace of its program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from conure.engine import protocol

from ...program.errors import ConureError
from ...program.ir import GenerateNode, Json, Sampling
from ...program.status import Problem
from ...prompts.prompt import RenderedPrompt
from ..node_state import NodeState
from ..reporting.trace_records import TracedCall
from .outputs import OutputSpec

if TYPE_CHECKING:
    from ..node_context import NodeContext


class CallRecorder:
    """The text of one call so far, and the records of its outputs."""

    def __init__(self, node_state: NodeState, context: NodeContext) -> None:
        assert isinstance(node_state.node, GenerateNode)
        self._state = node_state
        self._node: GenerateNode = node_state.node
        self._context = context
        ids = node_state.node.prompt_ids
        tokenizer = context.services.model.tokenizer
        self._text = tokenizer.decode(ids) if isinstance(ids, list) else ""
        """The text of a `prompt` up to the current output."""
        self._messages: list[Json] | None = None
        self._started_at = 0.0

    def begin(self, rendered: RenderedPrompt) -> None:
        """Note what is before the next output."""
        self._started_at = self._context.services.clock.now()
        self._add(rendered)

    def restore(self, rendered: RenderedPrompt, text: str, leftover: str) -> None:
        """Note an output that was committed before a restart of the server."""
        self._add(rendered)
        self._add_output(text, leftover)

    def finish(
        self,
        output: OutputSpec,
        report: protocol.Finished,
        sampling: protocol.SamplingParams,
        *,
        prompt_ids: list[int],
        output_ids: list[int],
        num_cached: int,
        value: Json,
        failure: ConureError | None,
    ) -> None:
        """Record an output that an engine has finished.

        Args:
            output: the output.
            report: the engine's final report.
            sampling: the parameters that the engine used.
            prompt_ids: the ids before the output.
            output_ids: the ids of the output.
            num_cached: those of the prompt that were not computed for it.
            value: the value of the output; None if it has none.
            failure: why it has none.
        """
        services = self._context.services
        is_chat = self._messages is not None
        record = TracedCall(
            node=self._node.id,
            job=self._node.job,
            variable=output.variable,
            attempt=self._state.attempt,
            started_at=self._started_at,
            finished_at=services.clock.now(),
            model=services.model.name,
            messages=self._messages,
            tools=self._node.tools if isinstance(self._node.tools, list) else None,
            prompt=None if is_chat else self._text,
            parameters=_parameters(output, sampling),
            text=report.text,
            message=_message(value) if output.form == "message" else None,
            finish_reason=report.reason,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            tokenizer=services.model.tokenizer_hash,
            num_cached=num_cached,
            error=None if failure is None else Problem(code=failure.code, message=failure.message),
        )
        self._context.outbox.record_trace(record)
        self._add_output(report.text, report.leftover)

    def _add(self, rendered: RenderedPrompt) -> None:
        if rendered.messages is not None:
            self._messages = [message.as_json() for message in rendered.messages]
        else:
            self._text += "".join([piece.text for piece in rendered.pieces])

    def _add_output(self, text: str, leftover: str) -> None:
        # The leftover begins the text before the next output.
        self._text += text[: len(text) - len(leftover)]


def _parameters(output: OutputSpec, sampling: protocol.SamplingParams) -> dict[str, Json]:
    given = msgspec.to_builtins(output.sampling)
    parameters = {name: given[name] for name in Sampling.__struct_fields__ if name in given}
    parameters["seed"] = sampling.seed
    parameters["max_tokens"] = sampling.max_tokens
    if output.constraint is not None:
        parameters["constraint"] = msgspec.to_builtins(output.constraint)
    return parameters


def _message(value: Json) -> Json:
    if not isinstance(value, dict):
        return None
    return {name: value[name] for name in ("role", "content", "tool_calls") if name in value}
