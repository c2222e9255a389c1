"""Responses of `/v1/responses`: complete, or streamed as events.

The sequence number of an event is a function of the answer: a text delta has the number 3 plus the
length of the text up to its end. A client that resumes after a number therefore receives exactly
the missing text, also from a restarted server. A delta that contains the number is cut. The event
of a failure has the highest number, because the text of a failed answer is not kept.

Out of scope: how the text is produced.

Invariant: the numbers of a stream increase, and are the same in every stream of one response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from ...program.ir import Json
from ...program.status import ENDED, Phase, ProgramStatus
from ..problem import PublicError
from .errors import error_body
from .execution import CompletionDelta, CompletionResult, RequestResult

_ID = re.compile(r"resp_([0-9a-z]+)")
_FIRST_TEXT = 3
"""Sequence number of the event before the first delta."""
_FAILURE = 2**31 - 1
"""Sequence number of the event of a failed or cancelled response: higher than that of any text."""


def response_id(program: str) -> str:
    """Return the id of a program's response."""
    return f"resp_{program.removeprefix('p_')}"


def program_of(response: str) -> str | None:
    """Return the program of a response; None if `response` is not the id of a response."""
    found = _ID.fullmatch(response)
    return None if found is None else f"p_{found[1]}"


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response. Repeats the fields of its request."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    """`queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`."""
    background: bool
    error: Json
    incomplete_details: Json
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Json]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float | None
    text: Json
    tool_choice: Json
    tools: list[Json]
    top_logprobs: int | None
    top_p: float | None
    truncation: str = "disabled"
    usage: Json
    user: Json
    metadata: dict[str, str]


class ResponseBuilder:
    """Builds a response and its events.

    Methods that take `after` return only the events with higher sequence numbers.
    """

    def __init__(self, program: str, record: dict[str, Json], created_at: int) -> None:
        """Start a response.

        Args:
            program: id of the response's program.
            record: fields of the request, from `request_record`.
            created_at: Unix time in seconds.
        """
        self._program = program
        self._record = record
        self._created_at = created_at
        self._has_text_item = False

    @property
    def id(self) -> str:
        """Id of the response."""
        return response_id(self._program)

    @property
    def _message_id(self) -> str:
        return f"msg_{self._program.removeprefix('p_')}"

    # --- complete -------------------------------------------------------------------------

    def response(
        self, status: str, result: RequestResult | None = None, error: PublicError | None = None
    ) -> ResponseObject:
        """Return the response with a status, and with the answer or error if there is one."""
        record = self._record
        answer = None if result is None else result.answers[0]
        is_cut = answer is not None and answer.finish_reason == "length"
        failure = None if error is None else error_body(error)
        return ResponseObject(
            id=self.id,
            created_at=self._created_at,
            status="incomplete" if is_cut else status,
            background=record.get("background", False),
            error=None if failure is None else {"code": failure.code, "message": failure.message},
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            instructions=record.get("instructions"),
            max_output_tokens=record.get("max_output_tokens"),
            model=record["model"],
            output=[] if answer is None else self._output(answer),
            parallel_tool_calls=record.get("parallel_tool_calls", True),
            previous_response_id=record.get("previous_response_id"),
            store=record.get("store", True),
            temperature=record.get("temperature", 1.0),
            text=record.get("text", {"format": {"type": "text"}}),
            tool_choice=record.get("tool_choice", "auto"),
            tools=record.get("tools", []),
            top_logprobs=record.get("top_logprobs"),
            top_p=record.get("top_p", 1.0),
            usage=None if result is None else _usage(result),
            user=record.get("user"),
            metadata=record.get("metadata", {}),
        )

    def _output(self, answer: CompletionResult) -> list[Json]:
        """Return the output items of an answer: its text, then its function calls.

        The text item is omitted if the answer consists of calls.
        """
        items = []
        if answer.content or not answer.tool_calls:
            items.append(self._message(answer))
        return items + self._calls(answer)

    def _message(self, answer: CompletionResult) -> dict[str, Json]:
        is_cut = answer.finish_reason == "length" and not answer.tool_calls
        return {
            "type": "message",
            "id": self._message_id,
            "role": "assistant",
            "status": "incomplete" if is_cut else "completed",
            "content": [_text_part(answer.content, answer.logprobs)],
        }

    def _calls(self, answer: CompletionResult) -> list[dict[str, Json]]:
        """Return the items of the function calls. The last one may lack the end of its text."""
        items = []
        for i, call in enumerate(answer.tool_calls):
            arguments = call["function"]["arguments"]
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{self._program.removeprefix('p_')}_{i}",
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": arguments,
                    "status": "completed" if _is_object(arguments) else "incomplete",
                }
            )
        return items

    # --- streamed -------------------------------------------------------------------------

    def start(self, *, after: int) -> bytes:
        """Return the events that precede the first text."""
        response = self.response("in_progress")
        return self._events(
            after,
            (0, "response.created", {"response": response}),
            (1, "response.in_progress", {"response": response}),
        )

    def delta(self, delta: CompletionDelta, *, after: int) -> bytes:
        """Return the events of a text delta; a comment if it adds nothing.

        A delta without text carries the log probabilities that earlier deltas left out. Its
        sequence number is the one after the last text delta, which is reserved for it.
        """
        if not delta.text and not (delta.logprobs and delta.offset):
            return b": ping\n\n"
        opening = b"" if self._has_text_item else self._open_text(after)
        end = delta.offset + len(delta.text)
        begin = max(delta.offset, after - _FIRST_TEXT)
        if delta.text and begin >= end:
            return opening
        logprobs = delta.logprobs if begin == delta.offset else None
        content = {
            **self._text_place(),
            "delta": delta.text[begin - delta.offset :],
            "logprobs": [_without_bytes(token) for token in logprobs or ()],
        }
        number = _FIRST_TEXT + end + (0 if delta.text else 1)
        return opening + self._events(after, (number, "response.output_text.delta", content))

    def end(self, final: RequestResult, *, after: int) -> bytes:
        """Return the events that follow the last text."""
        answer = final.answers[0]
        parts = b""
        number = 2  # without text, these events follow those of `start`
        index = 0
        if answer.content or not answer.tool_calls:
            if not self._has_text_item:
                parts += self._open_text(after)
            number = _FIRST_TEXT + len(answer.content) + 2
            part = _text_part(answer.content, answer.logprobs)
            done = {**self._text_place(), "text": answer.content, "logprobs": part["logprobs"]}
            item = {"output_index": 0, "item": self._message(answer)}
            parts += self._events(
                after,
                (number, "response.output_text.done", done),
                (number + 1, "response.content_part.done", {**self._text_place(), "part": part}),
                (number + 2, "response.output_item.done", item),
            )
            number += 3
            index = 1
        for item in self._calls(answer):
            parts += self._call_events(after, number, index, item)
            number += 4
            index += 1
        response = self.response("completed", final)
        kind = f"response.{response.status}"
        return parts + self._events(after, (number, kind, {"response": response}))

    def fail(self, error: PublicError, *, after: int) -> bytes:
        """Return the event of a response that failed after its stream began."""
        return self._failure(self.response("failed", error=error), after)

    def cancel(self, *, after: int) -> bytes:
        """Return the event of a cancelled response. OpenAI's clients know no event of its own."""
        return self._failure(self.response("cancelled"), after)

    def _failure(self, response: ResponseObject, after: int) -> bytes:
        return self._events(after, (_FAILURE, "response.failed", {"response": response}))

    def _open_text(self, after: int) -> bytes:
        self._has_text_item = True
        item = {
            "type": "message",
            "id": self._message_id,
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        part = {**self._text_place(), "part": _text_part("", None)}
        return self._events(
            after,
            (2, "response.output_item.added", {"output_index": 0, "item": item}),
            (3, "response.content_part.added", part),
        )

    def _call_events(self, after: int, number: int, index: int, call: dict[str, Json]) -> bytes:
        place = {"item_id": call["id"], "output_index": index}
        opened = {**call, "arguments": "", "status": "in_progress"}
        arguments = call["arguments"]
        return self._events(
            after,
            (number, "response.output_item.added", {"output_index": index, "item": opened}),
            (
                number + 1,
                "response.function_call_arguments.delta",
                {**place, "delta": arguments},
            ),
            (
                number + 2,
                "response.function_call_arguments.done",
                {**place, "name": call["name"], "arguments": arguments},
            ),
            (number + 3, "response.output_item.done", {"output_index": index, "item": call}),
        )

    def _text_place(self) -> dict[str, Json]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _events(self, after: int, *events: tuple[int, str, dict[str, Any]]) -> bytes:
        """Encode the events whose number is higher than `after`."""
        return b"".join(
            b"event: %s\ndata: %s\n\n"
            % (
                kind.encode(),
                msgspec.json.encode({"type": kind, "sequence_number": number, **content}),
            )
            for number, kind, content in events
            if number > after
        )


def status_of(phase: Phase) -> str:
    """Return the status of a response from the phase of its program."""
    if phase not in ENDED:
        return "queued" if phase in ("accepted", "waiting", "queued") else "in_progress"
    return {"done": "completed", "cancelled": "cancelled"}.get(phase, "failed")


def created_at_of(status: ProgramStatus) -> int:
    """Return when a program was accepted, as Unix time in seconds."""
    return int(datetime.fromisoformat(status.created_at).timestamp())


def output_items(result: CompletionResult) -> Iterator[dict[str, Json]]:
    """Yield the items that represent an answer in the input of a later request."""
    if result.content:
        yield {"type": "message", "role": "assistant", "content": result.content}
    for call in result.tool_calls:
        function = call["function"]
        yield {
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }


def _text_part(text: str, logprobs: list[Json] | None) -> dict[str, Json]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _without_bytes(token: Json) -> dict[str, Json]:
    """Return a token's log probability in the format of delta events, which have no bytes."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}


def _usage(result: RequestResult) -> dict[str, Json]:
    usage = result.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False
