"""A chain of three calls: find the place, look up its doctor, write a line to the doctor.

Each call reads the output of the one before. Intermediate values do not return to the client.
Start a server first: `conure serve`.
"""

from __future__ import annotations

import sys

from show import ask, show

PROGRAM = {
    "name": "chain",
    "variables": {"report": {"type": "string"}, "directory": {"type": "string"}},
    "nodes": [
        ask("locate", {"input": "report"}, "\n\nWhere did it happen?", into="place"),
        ask(
            "look_up",
            {"input": "directory"},
            "\n\nWho is the doctor in ",
            {"input": "place"},
            "?",
            into="doctor",
        ),
        ask("call", "Ask ", {"input": "doctor"}, " to come to ", {"input": "place"}, ".",
            into="letter"),
    ],
    "outputs": ["place", "doctor", "letter"],
}  # fmt: skip
RUNS = {
    "a fall at the mill": {
        "report": "The inspector was Mira Dolan. It happened in Tarnby. The police came.",
        "directory": "The doctor in Kolvar is Ruth Sandberg. The doctor in Tarnby is Emil Hartson.",
    }
}

if __name__ == "__main__":
    sys.exit(show(PROGRAM, RUNS))
