"""A router: a yes-or-no answer decides which question is next.

The other branch never starts. Start a server first: `conure serve`.
"""

from __future__ import annotations

import sys

from show import ask, show

PROGRAM = {
    "name": "router",
    "variables": {"report": {"type": "string"}},
    "nodes": [
        ask("check", {"input": "report"}, "\n\nWas anyone hurt?", into="is_hurt",
            constraint={"choices": ["yes", "no"]}),
        {
            "id": "route",
            "op": "if",
            "cond": {"eq": [{"var": "is_hurt"}, "yes"]},
            "then": [ask("who", {"input": "report"}, "\n\nWho was hurt?", into="person")],
            "else": [ask("why", {"input": "report"}, "\n\nWhat was the cause?", into="cause")],
            "merge": {"answer": ["person", "cause"]},
        },
    ],
    "outputs": ["is_hurt", "answer"],
}  # fmt: skip
RUNS = {
    "an accident with one person hurt": {
        "report": "The accident hurt Jonas Wenk. The cause was a wet rail. The road was closed."
    },
    "an accident with nobody hurt": {
        "report": "The cause was a broken valve. Nobody was hurt. It happened in Malbury."
    },
}

if __name__ == "__main__":
    sys.exit(show(PROGRAM, RUNS))
