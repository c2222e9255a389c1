"""The smallest client: a program of two calls, the second reading what the first wrote.

Start a server first: `conure serve`.
"""

from __future__ import annotations

import sys

from conure.adapters.client import Client
from conure.server.program.errors import ConureError

PROGRAM = {
    "name": "write-and-check",
    "variables": {"task": {"type": "string"}},
    "nodes": [
        {
            "id": "write",
            "op": "generate",
            "messages": [
                {"role": "system", "content": "You write short Python functions."},
                {"role": "user", "content": [{"text": "Write: "}, {"input": "task"}]},
            ],
            "output": {"variable": "code", "max_tokens": 64, "temperature": 0},
        },
        {
            "id": "check",
            "op": "generate",
            "messages": [
                {"role": "system", "content": "You write one test for a function."},
                {"role": "user", "content": [{"text": "Test this:\n"}, {"input": "code"}]},
            ],
            "output": {"variable": "test", "max_tokens": 64, "temperature": 0},
        },
    ],
    "outputs": ["code", "test"],
}


def main() -> int:
    """Submits the program and prints its values as they come."""
    try:
        with Client() as client:
            for model in client.models()[:1]:
                print(f"model {model['id']}: {model.get('description') or 'no description'}")
            run = client.submit(PROGRAM, inputs={"task": "reverse a list"})
            print(f"program {run.id}")
            for name in run.outputs:
                print(f"{name}: {run.get(name)!r}")
            receipt = run.receipt()
    except ConureError as problem:
        print(f"hello: {problem}", file=sys.stderr)
        return 1
    print(f"{receipt.calls} calls in {receipt.wall_s:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
