"""An answer, then a critic and follow-up questions that run in parallel.

The critic judges two answers: that of the first call, and one given as an input. All calls read
the same report; the common beginning of their prompts is computed once.

Start a server first: `conure serve`.
"""

from __future__ import annotations

import sys
from typing import Any

from show import ask, show

QUESTION = "Who was the guard?"


def critique(answer: str, *, into: str) -> dict[str, Any]:
    """Return a call that states the right answer, and whether the given one is the same."""
    return ask(
        f"critique_{answer}",
        {"input": "report"},
        f"\n\nThe question was: {QUESTION}\nThe answer was: ",
        {"input": answer},
        "\nWhat is right, and is that the same?",
        into=into,
    )


PROGRAM = {
    "name": "critic",
    "variables": {"report": {"type": "string"}, "claim": {"type": "string"}},
    "nodes": [
        ask("answer_it", {"input": "report"}, f"\n\n{QUESTION}", into="guard"),
        critique("guard", into="verdict"),
        critique("claim", into="verdict_on_claim"),
        ask("ask_place", {"input": "report"}, "\n\nWhere did it happen?", into="place"),
        ask("ask_witnesses", {"input": "report"}, "\n\nList the witnesses.", into="witnesses"),
    ],
    "outputs": ["guard", "verdict", "verdict_on_claim", "place", "witnesses"],
}
RUNS = {
    "a theft": {
        "report": "The guard was Tessa Brook. It happened in Kolvar. "
        "The witnesses were Ruth Sandberg, Emil Hartson and Lena Moritz.",
        "claim": "Emil Hartson",
    }
}

if __name__ == "__main__":
    sys.exit(show(PROGRAM, RUNS))
