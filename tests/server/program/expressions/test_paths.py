"""Paths of parts: their texts, and that checks write them only for a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from conure.server.program.errors import ProgramError
from conure.server.program.expressions.evaluate import check
from conure.server.program.expressions.paths import Path
from conure.server.program.expressions.value_schema import check_schema, find_violation

LONG = "k" * 1_000


def test_a_path_names_keys_and_indices() -> None:
    assert str(Path(Path(Path("", "a"), 1), "b")) == "a[1].b"
    assert str(Path(Path("nodes[2].expr", "object"), ".x")) == "nodes[2].expr.object..x"
    assert str(Path(Path("", LONG), 3)) == f"{LONG[:80]}[3]"


def test_checks_write_no_path_of_a_valid_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(self: Path) -> str:
        raise AssertionError("the path of a valid part was written")

    monkeypatch.setattr(Path, "__str__", written)
    check({"object": {LONG: [0] * 100}}, "e")
    check({"concat": [{"find": ["a", "b"]}, {"each": [[1], "i", {"var": "i"}]}]}, "e")
    check_schema({"properties": {LONG: {"anyOf": [{"type": "string"}, {"minimum": 1}]}}}, "s")
    schema: dict[str, Any] = {"additionalProperties": {"items": {"type": "integer", "minimum": 0}}}
    assert find_violation({LONG: [0] * 100}, schema) is None


def test_messages_show_the_beginning_of_a_long_key() -> None:
    violation = find_violation({LONG: [0, ""]}, {"additionalProperties": {"items": {"minimum": 1}}})
    assert violation == f"{LONG[:80]}[0] is 0, against `minimum` 1"
    with pytest.raises(ProgramError) as caught:
        check({"object": {LONG: [{LONG: 1}]}}, "e")
    assert caught.value.path == f"e.object.{LONG[:80]}[0].{LONG[:80]}"
    assert len(caught.value.message) < 1_000
    with pytest.raises(ProgramError) as caught:
        check({f"{LONG}{number}": 1 for number in range(100)}, "e")
    assert len(caught.value.message) < 1_200
