"""Extraction to JSON: the output follows a schema and is a JSON value, not a text.

Start a server first: `conure serve`.
"""

from __future__ import annotations

import sys

from show import ask, show

SCHEMA = {
    "type": "object",
    "properties": {"inspector": {"type": "string"}, "place": {"type": "string"}},
    "required": ["inspector", "place"],
    "additionalProperties": False,
}
PROGRAM = {
    "name": "extraction",
    "variables": {"report": {"type": "string"}},
    "nodes": [
        ask("extract", {"input": "report"},
            '\n\nGive JSON with the keys "inspector" and "place".',
            into="found", constraint={"json_schema": SCHEMA}),
        {"id": "take", "op": "expr", "output": "who",
         "expr": {"get": [{"var": "found"}, "inspector"]}},
    ],
    "outputs": ["found", "who"],
}  # fmt: skip
RUNS = {
    "a report": {
        "report": "The place was Malbury. The damage was 340 crowns. The inspector was Mira Dolan."
    }
}

if __name__ == "__main__":
    sys.exit(show(PROGRAM, RUNS))
