"""Shared code of the examples: run a program, print its inputs, outputs and receipt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from conure import Client, ConureError, Receipt

GREEDY: dict[str, Any] = {"max_tokens": 48, "temperature": 0}


def ask(node: str, *parts: str | dict[str, Any], into: str, **output: Any) -> dict[str, Any]:
    """Return a generate node with one user message: strings are text, `{"input": name}` a value."""
    content = [{"text": part} if isinstance(part, str) else part for part in parts]
    return {
        "id": node,
        "op": "generate",
        "messages": [{"role": "user", "content": content}],
        "output": {"variable": into, **GREEDY, **output},
    }


def cost(receipt: Receipt) -> str:
    """Return the costs of a program in one line."""
    prompt = receipt.prompt_tokens
    return (
        f"{receipt.calls} calls, {prompt.computed} of {prompt.logical} prompt tokens "
        f"computed, {receipt.wall_s:.2f} s"
    )


def run_example(name: str, example: Callable[[Client], None]) -> int:
    """Run an example and print an error as one line. Return the exit code."""
    try:
        with Client() as client:
            example(client)
    except ConureError as problem:
        print(f"{name}: {problem}", file=sys.stderr)
        return 1
    return 0


def show(program: Mapping[str, Any], runs: Mapping[str, Mapping[str, str]]) -> int:
    """Submit a program once per set of inputs. Return the exit code."""

    def submit(client: Client) -> None:
        for title, inputs in runs.items():
            print(title)
            run = client.submit(program, inputs=dict(inputs))
            for name, value in inputs.items():
                print(f"  {name}: {value}")
            for name, value in run.result().items():
                text = value if isinstance(value, str) else json.dumps(value)
                print(f"  {name} = {text}")
            print(f"  {cost(run.receipt())}\n")

    return run_example(program["name"], submit)
