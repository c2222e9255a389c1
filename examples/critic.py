"""An answer, then a critic of it and follow-up questions, all of these at the same time.

The critic judges two answers: the one of the call before, and one that somebody gave. All
calls read one report; what they begin with alike is computed once. Start a server first:
`conure serve`.
"""

from __future__ import annotations

import sys
from typing import Any

from show import ask, show

QUESTION = "Who was the guard?"


def criticise(answer: str, *, into: str) -> dict[str, Any]:
    """A call that says what is right, and whether an answer to the question is that."""
    return ask(
        f"criticise_{answer}",
        {"input": "report"},
        f"\n\nThe question was: {QUESTION}\nThe answer was: ",
        {"input": answer},
        "\nWhat is right, and is that the same?",
        into=into,
    )


PROGRAM = {
    "name": "critic",
    "variables": {"report": {"type": "string"}, "told": {"type": "string"}},
    "nodes": [
        ask("answer_it", {"input": "report"}, f"\n\n{QUESTION}", into="guard"),
        criticise("guard", into="verdict"),
        criticise("told", into="verdict_on_told"),
        ask("ask_place", {"input": "report"}, "\n\nWhere did it happen?", into="place"),
        ask("ask_witnesses", {"input": "report"}, "\n\nList the witnesses.", into="witnesses"),
    ],
    "outputs": ["guard", "verdict", "verdict_on_told", "place", "witnesses"],
}
RUNS = {
    "a theft": {
        "report": "The guard was Tessa Brook. It happened in Kolvar. "
        "The witnesses were Ruth Sandberg, Emil Hartson and Lena Moritz.",
        "told": "Emil Hartson",
    }
}

if __name__ == "__main__":
    sys.exit(show(PROGRAM, RUNS))
