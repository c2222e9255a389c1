"""Planned calls and events for tests."""

from __future__ import annotations

from typing import Any

from conure.adapters.speculation.planned_call import PlannedCall
from conure.server.program.ir import Json
from conure.server.program.status import Event


def node(variable: str, *segments: Json, **output: Json) -> dict[str, Json]:
    content = segments[0] if isinstance(segments[0], str) else list(segments)
    return {
        "id": f"{variable}_call",
        "op": "generate",
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "output": {"variable": variable, "as": "message", **output},
    }


def call(variable: str, reads: set[str], *segments: Json) -> PlannedCall:
    return PlannedCall(f"at {variable}", variable, node(variable, *segments), frozenset(reads))


def content(variable: str) -> Json:
    return {"input": {"get": [{"var": variable}, "content"]}}


def event(kind: Any, **data: Json) -> Event:
    return Event(1, kind, {"program": "p", **data})


def committed(variable: str, text: str) -> Event:
    return event("variable.committed", variable=variable, value={"content": text})
