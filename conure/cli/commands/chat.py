"""`conure chat`: talk to the model of a server.

The conversation is sent to `/v1/chat/completions` with every message. The server keeps the KV cache
of the conversation, so only the new message is computed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec

from conure.adapters.client.connection import address_of

from ..command import CommandError, ExitCode, add_url, connect

TIMEOUT = httpx.Timeout(10.0, read=600.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure chat`."""
    parser.add_argument(
        "message", nargs="?", help="one message; without it, the command reads them line by line"
    )
    add_url(parser)
    parser.add_argument("--model", help="name of the model (default: the server's first)")
    parser.add_argument("--system", help="instructions for the model")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: no limit)")


def run(arguments: argparse.Namespace) -> int:
    """Answer one message, or every line of stdin, until end of file or `/exit`."""
    with connect(arguments.url) as client:
        models = client.models()
    model = str(arguments.model or models[0]["id"])
    notice = next((each.get("notice") for each in models if each["id"] == model), None)
    if notice:
        sys.stderr.write(f"{model}: {notice}\n")
    conversation: list[dict[str, str]] = []
    if arguments.system:
        conversation.append({"role": "system", "content": arguments.system})
    options = {
        key: value
        for key in ("temperature", "max_tokens")
        if (value := getattr(arguments, key)) is not None
    }
    with httpx.Client(base_url=address_of(arguments.url), timeout=TIMEOUT) as http:
        for line in _messages(arguments.message, model):
            conversation.append({"role": "user", "content": line})
            answer = ""
            with contextlib.closing(_answer(http, model, conversation, options)) as pieces:
                for piece in pieces:
                    answer += piece
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            sys.stdout.write("\n")
            conversation.append({"role": "assistant", "content": answer})
    return ExitCode.DONE


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
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


def _answer(
    http: httpx.Client, model: str, conversation: list[dict[str, str]], options: dict[str, Any]
) -> Generator[str, None, None]:
    """Yield the answer in pieces.

    Raises:
        CommandError: if the server refuses the conversation or is lost.
    """
    body = {"model": model, "messages": conversation, "stream": True, **options}
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                raise CommandError(_refusal(response))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    raise CommandError(chunk["error"].get("message", "the answer broke off"))
                for choice in chunk.get("choices", ()):
                    yield choice["delta"].get("content") or ""
                    if choice.get("finish_reason") == "length":
                        sys.stderr.write("\n(cut at the token limit)")
    except httpx.TransportError as exc:
        raise CommandError(f"lost the server: {exc}", ExitCode.UNREACHABLE) from exc


def _refusal(response: httpx.Response) -> str:
    try:
        message: str = msgspec.json.decode(response.read())["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"the server responded with status {response.status_code}"
    return message
