"""Nodes of control flow for the tests, and the phases of a program's nodes."""

from __future__ import annotations

from typing import Any

Json = Any


def map_(items: Json, *body: Json, collect: dict[str, str] | None = None, **fields: Json) -> Json:
    node = {"id": "m", "op": "map", "items": items, "as": "x", "body": list(body)}
    return {**node, "collect": collect or {}, **fields}


def loop(*body: Json, **fields: Json) -> Json:
    return {"id": "l", "op": "loop", "body": list(body), **fields}


def if_(cond: Json, then: list[Json], otherwise: list[Json], **merge: list[str]) -> Json:
    return {"id": "c", "op": "if", "cond": cond, "then": then, "else": otherwise, "merge": merge}


def phases(status: Any) -> dict[str, str]:
    return {name: node.status for name, node in status.nodes.items()}
