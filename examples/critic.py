"""An answer, then a critic of it and follow-up questions, all of these at the same time.

All calls read one report; what they begin with alike is computed once. Start a server
first: `conure serve`.
"""

from __future__ import annotations

import sys

from show import ask, show

QUESTION = "Who was the guard?"
PROGRAM = {
    "name": "critic",
    "variables": {"report": {"type": "string"}},
    "nodes": [
        ask("answer_it", {"input": "report"}, f"\n\n{QUESTION}", into="guard"),
        ask(
            "criticise",
            {"input": "report"},
            f"\n\nThe question was: {QUESTION}\nThe answer was: ",
            {"input": "guard"},
            "\nIs that right?",
            into="is_right",
            constraint={"choices": ["yes", "no"]},
        ),
        ask("ask_place", {"input": "report"}, "\n\nWhere did it happen?", into="place"),
        ask("ask_witnesses", {"input": "report"}, "\n\nList the witnesses.", into="witnesses"),
    ],
    "outputs": ["guard", "is_right", "place", "witnesses"],
}
RUNS = {
    "a theft": {
        "report": "The guard was Tessa Brook. It happened in Kolvar. "
        "The witnesses were Ruth Sandberg, Emil Hartson and Lena Moritz.",
    }
}

if __name__ == "__main__":
    sys.exit(show(PROGRAM, RUNS))
