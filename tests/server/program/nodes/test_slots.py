"""The slots of nodes, and what every kind must define."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conure.server.program.ir import AnyNode, RoundEndNode
from conure.server.program.nodes import NODE_KINDS, Node

FIRST = {"first": [{"var": "x"}, 1]}


def tolerant(node: dict[str, Any]) -> list[bool]:
    decoded: Node = msgspec.convert(node, AnyNode)
    return [slot.tolerates_missing for slot in decoded.make_slots()]


def expr(expression: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "n", "op": "expr", "expr": expression, "output": "y", **fields}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (expr({"var": "x"}), [False]),
        (expr([{"concat": ["a", FIRST]}]), [True]),
        (expr({"object": {"k": FIRST}}), [True]),
        (expr({"lit": FIRST}), [False]),
        (expr({"object": {"first": {"var": "x"}}}), [False]),
        (expr({"var": "first"}, id="first"), [False]),
        (expr(1, when=FIRST), [True]),
        (
            {
                "id": "n",
                "op": "generate",
                "prompt": [{"input": FIRST}, {"output": "a"}, {"input": "x"}, {"output": "b"}],
            },
            [True, False],
        ),
        ({"id": "n", "op": "wait", "variables": ["x"]}, [False, True]),
        (
            {"id": "n", "op": "map", "items": "x", "as": "i", "body": [expr(FIRST, id="e")]},
            [False, True],
        ),
        ({"id": "n", "op": "if", "cond": FIRST}, [True, True, True]),
    ],
)
def test_slots_declare_whether_they_tolerate_missing_values(
    node: dict[str, Any], expected: list[bool]
) -> None:
    assert tolerant(node) == expected


def test_the_end_of_a_round_tolerates_missing_values() -> None:
    (slot,) = RoundEndNode(id="l.0", carry={"v.1": {"var": "x"}}, more="l.0.more").make_slots()
    assert slot.tolerates_missing


@pytest.mark.parametrize("kind", NODE_KINDS.values(), ids=NODE_KINDS)
def test_every_kind_defines_its_slots_and_renaming(kind: type[Node]) -> None:
    assert kind._make_slots is not Node._make_slots
    assert kind._renamed_fields is not Node._renamed_fields
