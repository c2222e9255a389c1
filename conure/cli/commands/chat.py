"""`conure chat`: talk to the model of a server.

The conversation is sent to `/v1/chat/completions` with every message. The server keeps the KV cache
of the conversation, so only the new message is computed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import httpx
import msgspec

from conure.adapters.client.connection import address_of
from conure.adapters.client.exchange.models import find_named
from conure.server.program.decoding.typed_json import decode_record
from conure.server.program.decoding.unicode_text import is_unicode

from ..command import CommandError, ExitCode, UsageError, add_url, connect
from ..shown_notices import is_first_time
from ..terminal import json_line

TIMEOUT = httpx.Timeout(10.0, read=600.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure chat`."""
    parser.add_argument(
        "message", nargs="?", help="one message; without it, the command reads them line by line"
    )
    add_url(parser)
    parser.add_argument("--model", help="name of the model (default: the server's first)")
    parser.add_argument("--system", help="instructions for the model")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: 1)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: no limit)")
    parser.add_argument(
        "--json", action="store_true", help="print each answer as one line of JSON when it is whole"
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer one message, or every line of stdin, until end of file or `/exit`."""
    if not math.isfinite(arguments.temperature or 0.0):
        raise UsageError(f"--temperature is {arguments.temperature}; it must be a finite number")
    with connect(arguments.url) as client:
        models = client.models()
    model = str(arguments.model or models[0]["id"])
    named = find_named(models, model)
    notice = None if named is None else named.get("notice")
    if notice and is_first_time(f"{model}: {notice}"):
        sys.stderr.write(f"{model}: {notice}\n")
    messages: list[dict[str, str]] = []
    if arguments.system:
        messages.append({"role": "system", "content": arguments.system})
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    for key in ("temperature", "max_tokens"):
        if (value := getattr(arguments, key)) is not None:
            body[key] = value
    if arguments.json:
        body["stream_options"] = {"include_usage": True}
    with httpx.Client(base_url=address_of(arguments.url), timeout=TIMEOUT) as http:
        for line in _messages(arguments.message, model):
            messages.append({"role": "user", "content": line})
            answer = _print_answer(http, body, as_json=arguments.json)
            messages.append({"role": "assistant", "content": answer})
    return ExitCode.DONE


def _print_answer(http: httpx.Client, body: Mapping[str, Any], *, as_json: bool) -> str:
    """Print the answer to a conversation, and return its text."""
    answer, finish_reason, usage = "", None, None
    with contextlib.closing(_chunks(http, body)) as chunks:
        for chunk in chunks:
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                answer += piece
                finish_reason = choice.get("finish_reason") or finish_reason
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    if as_json:
        line = {"content": answer, "finish_reason": finish_reason, "usage": usage}
        sys.stdout.write(json_line({"model": body["model"], **line}))
        sys.stdout.flush()
        return answer
    sys.stdout.write("\n")
    if finish_reason == "length":
        sys.stderr.write("(cut at the token limit)\n")
    return answer


def _messages(message: str | None, model: str) -> Iterator[str]:
    if message is not None:
        yield message
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        sys.stderr.write(f"{model}; /exit or Ctrl-D ends the conversation\n")
    while True:
        if is_terminal:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = _line_of_stdin()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


def _line_of_stdin() -> str:
    """Return the next line; an empty text at the end of file.

    Raises:
        UsageError: if the line is not UTF-8.
    """
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as exc:
        raise UsageError("a line of stdin is not UTF-8 text") from exc
    if not is_unicode(line):  # as Python reads such a line in the locale C
        raise UsageError("a line of stdin is not UTF-8 text")
    return line


def _chunks(http: httpx.Client, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Yield the chunks of the answer to a conversation.

    Raises:
        CommandError: if the server refuses the conversation or is lost.
    """
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                raise CommandError(_refusal(response))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                chunk = decode_record(data, dict[str, Any])
                if "error" in chunk:
                    raise CommandError(chunk["error"].get("message", "the answer broke off"))
                yield chunk
    except httpx.TransportError as exc:
        raise CommandError(f"lost the server: {exc}", ExitCode.UNREACHABLE) from exc


def _refusal(response: httpx.Response) -> str:
    try:
        message: str = msgspec.json.decode(response.read())["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"the server responded with status {response.status_code}"
    return message
