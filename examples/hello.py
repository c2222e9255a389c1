"""The smallest client: a program of two calls, where the second reads the output of the first.

Start a server first: `conure serve`.
"""

from __future__ import annotations

import sys

from conure import Client, ConureError

PROGRAM = {
    "name": "find-and-join",
    "variables": {"report": {"type": "string"}},
    "nodes": [
        {
            "id": "find",
            "op": "generate",
            "messages": [
                {"role": "system", "content": "You read reports."},
                {
                    "role": "user",
                    "content": [{"input": "report"}, {"text": "\n\nList the guests."}],
                },
            ],
            "output": {"variable": "guests", "max_tokens": 64, "temperature": 0},
        },
        {
            "id": "say",
            "op": "generate",
            "messages": [
                {
                    "role": "user",
                    "content": [{"text": "Repeat this sentence: The guests were "},
                                {"input": "guests"}, {"text": "."}],
                },
            ],
            "output": {"variable": "sentence", "max_tokens": 64, "temperature": 0},
        },
    ],
    "outputs": ["guests", "sentence"],
}  # fmt: skip
REPORT = "The cook was Pavel Orlin. The guests were Mira Dolan, Jonas Wenk and Ruth Sandberg."


def main() -> int:
    """Submit the program and print its values as they become available."""
    try:
        with Client() as client:
            for model in client.models()[:1]:
                print(f"model {model['id']}: {model.get('description') or 'no description'}")
            print(f"report: {REPORT}")
            run = client.submit(PROGRAM, inputs={"report": REPORT})
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
