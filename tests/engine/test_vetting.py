"""The helper process that sees grammars first: what it refuses, and what it survives."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conure.engine.api import EngineError
from conure.engine.vetting import DEADLINE_S, Question, Vetter

from .constrained import lark, schema

SPARE_S = 1.0
"""What a loaded machine may take beyond the deadline."""


@pytest.fixture(scope="module")
def vetter() -> Iterator[Vetter]:
    vetter = Vetter(["<|im_end|>"])
    vetter.ask(Question(lark('start: "a"')))
    yield vetter
    vetter.close()


def refusal(vetter: Vetter, constraint: str, text: str | None = None) -> EngineError:
    begin = time.monotonic()
    with pytest.raises(EngineError) as caught:
        vetter.ask(Question(constraint, text))
    assert time.monotonic() - begin < DEADLINE_S + SPARE_S
    return caught.value


def test_a_grammar_is_said_to_be_one_and_texts_to_match(vetter: Vetter) -> None:
    words = lark('start: "yes" | "no" <|im_end|>')
    assert vetter.ask(Question(words)).constraint == words
    assert vetter.ask(Question(words)).matches is None
    assert vetter.ask(Question(words, "yes")).matches is True
    assert vetter.ask(Question(words, "ye")).matches is False
    assert vetter.ask(Question(words, "yess")).matches is False
    assert vetter.ask(Question(lark("start: /[é🦜]+/"), "🦜é")).matches is True


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (lark("start: ("), "Expected token"),
        (lark("start: /(?=a)b/"), "look-around"),
        (lark(r"start: /(a)\1/"), "backreference"),
        (lark("start: <|other|>"), "special token"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
        (schema({"enum": []}), "nsatisfiable"),
        (schema({"$ref": "http://127.0.0.1:9/schema"}), "not present in a registry"),
        (schema({"$ref": "file:///etc/passwd"}), "not present in a registry"),
        (schema({"$ref": "#/$defs/none"}), "the JSON schema cannot be compiled: Pointer"),
        (schema({"type": 5}), "must be a string or array of strings"),
        (schema({"$ref": "#"}), "no text belongs"),
        (schema({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}), "no text belongs"),
        (lark("start: start"), "no text belongs"),
        (lark("start: a\na: b\nb: a"), "no text belongs"),
        (lark(r"start: /[^\s\S]/"), "no text belongs"),
        ("no grammar at all", "Expected token"),
        ('{"grammars": 5}', ""),
    ],
)
def test_what_is_no_grammar_is_refused_with_a_reason(
    vetter: Vetter, constraint: str, why: str
) -> None:
    error = refusal(vetter, constraint)
    assert error.code == "constraint.invalid"
    assert why in error.message
    assert len(error.message) < 400


def test_what_the_compiler_cannot_enforce_is_relaxed_and_held_against_the_text(
    vetter: Vetter,
) -> None:
    unique = schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    verdict = vetter.ask(Question(unique, "[1,2]"))
    assert verdict.matches is True
    assert json.loads(verdict.constraint)["grammars"][0]["json_schema"]["x-guidance"] == {
        "whitespace_flexible": False,
        "lenient": True,
    }
    assert vetter.ask(Question(unique, "[1,1]")).matches is False
    assert vetter.ask(Question(unique, "[1,")).matches is False


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"uniqueItems": True, "items": {"pattern": 5}}, "uniqueItems"),
        ({"not": {"pattern": "("}}, "regex"),
        ({"if": 5}, "5 is not of type"),
        ({"oneOf": "no list"}, ""),
    ],
)
def test_a_schema_that_would_be_relaxed_has_to_be_a_schema(
    vetter: Vetter, content: Any, why: str
) -> None:
    before = vetter.pid
    error = refusal(vetter, schema(content), "{}")
    assert error.code == "constraint.invalid"
    assert why in error.message
    assert vetter.pid == before


def test_a_reference_to_nowhere_refuses_the_text(vetter: Vetter) -> None:
    error = refusal(vetter, schema({"not": {"$ref": "#/nowhere"}}), "{}")
    assert error.code == "constraint.invalid"


def nested(depth: int) -> Any:
    content: Any = {"type": "string"}
    for _ in range(depth):
        content = {"type": "array", "items": content}
    return content


RULES = "\n".join(f"r{i}: r{i + 1} r{i + 1} | /a/" for i in range(9000))
HOSTILE = {
    "nested parentheses": lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "nested parentheses in a regex": lark("start: /" + "(" * 30_000 + "a" + ")" * 30_000 + "/"),
    "long enumerations": schema(
        {
            "type": "object",
            "properties": {
                f"p{i}": {"enum": [f"value{i}_{j}" for j in range(10_000)]} for i in range(8)
            },
            "required": [f"p{i}" for i in range(8)],
        }
    ),
    "deep schema": '{"grammars":[{"json_schema":'
    + '{"items":' * 20_000
    + "{}"
    + "}" * 20_001
    + "]}",
    "a schema that nests": schema(nested(300)),
    "a reference to itself": schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "references in a circle": schema(
        {
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
                "b": {"allOf": [{"$ref": "#/$defs/a"}]},
            },
            "$ref": "#/$defs/a",
        }
    ),
    "left recursion": lark('start: start start | start "a" | "a"'),
    "recursion without an end": lark('start: a\na: "x" a'),
    "a grammar that says nothing": lark("start: start | a\na: start"),
    "repetitions of repetitions": lark("start: /((((a{1,300}){1,300}){1,300}){1,300}){1,300}/"),
    "a count of states": lark("start: /(a|b)*a(a|b){60000}/"),
    "memory": schema({"type": "integer", "multipleOf": 999_983}),
    "large numbers": schema({"type": "string", "minLength": 2**40, "maxLength": 2**41}),
    "a product of cases": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(6)]}
                for i in range(8)
            ]
        }
    ),
    "many rules": lark(f"start: r0\n{RULES}\nr9000: /b/"),
    "a long constraint": lark('start: "' + "a" * 3_000_000 + '"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_served_or_refused_in_time_and_the_next_one_is_answered(
    vetter: Vetter, name: str
) -> None:
    begin = time.monotonic()
    try:
        vetter.ask(Question(HOSTILE[name]))
    except EngineError as error:
        assert error.code.startswith("constraint.")
    assert time.monotonic() - begin < DEADLINE_S + SPARE_S
    assert vetter.ask(Question(lark('start: "a"'), "a")).matches is True


def test_memory_is_bounded(vetter: Vetter) -> None:
    before = vetter.pid
    error = refusal(vetter, HOSTILE["memory"])
    assert error.code == "constraint.too_complex"
    assert "MiB" in error.message
    assert vetter.pid is None
    vetter.ask(Question(lark('start: "a"')))
    assert vetter.pid not in (None, before)


def test_a_validation_that_does_not_end_is_ended() -> None:
    impatient = Vetter([], deadline_s=0.5)
    impatient.ask(Question(lark('start: "a"')))
    slow = schema({"type": "string", "not": {"pattern": "^(a+)+$"}})
    error = refusal(impatient, slow, '"' + "a" * 60 + 'b"')
    assert error.code == "constraint.too_complex"
    assert "0.5 s" in error.message
    impatient.close()


def test_what_is_too_ambiguous_to_be_begun_is_refused_before_it_runs(vetter: Vetter) -> None:
    # All begin with a forced brace, and behind it stand all ways on at once.
    options = [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(600)]
    error = refusal(vetter, schema({"anyOf": options}))
    assert error.code == "constraint.too_complex"
    assert "max is 1000" in error.message


def test_a_grammar_with_an_empty_or_a_long_way_on_is_one(vetter: Vetter) -> None:
    for constraint, text in (
        (lark('start: start "a" | "a"'), "aaa"),
        (lark('start: ""'), ""),
        (lark('start: "a"~30000'), "a" * 30_000),
        (schema({"const": "x" * 5_000}), f'"{"x" * 5_000}"'),
        (schema({"anyOf": [{"$ref": "#"}, {"type": "null"}]}), "null"),
    ):
        assert vetter.ask(Question(constraint, text)).matches is True


def test_a_helper_that_somebody_ends_is_replaced(vetter: Vetter) -> None:
    vetter.ask(Question(lark('start: "a"')))
    assert vetter.pid is not None
    os.kill(vetter.pid, signal.SIGKILL)
    refusal(vetter, lark('start: "a"'))
    assert vetter.ask(Question(lark('start: "a"'), "a")).matches is True


def test_a_helper_whose_engine_is_gone_exits() -> None:
    lonely = Vetter([])
    lonely.ask(Question(lark('start: "a"')))
    process = lonely._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
    lonely.close()
