"""The grammar sandbox: rejected grammars, and hostile ones that it survives."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conure.engine.constraints import grammar
from conure.engine.constraints.sandbox import (
    CPU_S,
    SandboxedGrammarCheck,
    SandboxRequest,
    _read,
    _reply,
)
from conure.engine.protocol import EngineError

from ..constraint_harness import lark, schema

SPARE_S = 0.5
"""CPU time that the kernel may grant beyond the timer."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SandboxedGrammarCheck]:
    sandbox = SandboxedGrammarCheck(["<|im_end|>"])
    sandbox.validate(SandboxRequest(lark('start: "a"')))
    yield sandbox
    sandbox.close()


def cpu_s(sandbox: SandboxedGrammarCheck) -> float:
    """CPU time of all helpers: of the ended ones and of the running one."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    if sandbox.pid is not None:
        fields = Path(f"/proc/{sandbox.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def refusal(
    sandbox: SandboxedGrammarCheck, constraint: str, text: str | None = None
) -> EngineError:
    with pytest.raises(EngineError) as caught:
        sandbox.validate(SandboxRequest(constraint, text))
    return caught.value


def test_valid_grammar_matches_texts(sandbox: SandboxedGrammarCheck) -> None:
    words = lark('start: "yes" | "no" <|im_end|>')
    assert sandbox.validate(SandboxRequest(words)).constraint == words
    assert sandbox.validate(SandboxRequest(words)).matches is None
    assert sandbox.validate(SandboxRequest(words, "yes")).matches is True
    assert sandbox.validate(SandboxRequest(words, "ye")).matches is False
    assert sandbox.validate(SandboxRequest(words, "yess")).matches is False
    assert sandbox.validate(SandboxRequest(lark("start: /[é🦜]+/"), "🦜é")).matches is True


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
def test_invalid_grammar_is_rejected_with_a_reason(
    sandbox: SandboxedGrammarCheck, constraint: str, why: str
) -> None:
    error = refusal(sandbox, constraint)
    assert error.code == "constraint.invalid"
    assert why in error.message
    assert len(error.message) < 400


def test_unenforceable_schema_is_relaxed_and_validates_texts(
    sandbox: SandboxedGrammarCheck,
) -> None:
    unique = schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    verdict = sandbox.validate(SandboxRequest(unique, "[1,2]"))
    assert verdict.matches is True
    assert json.loads(verdict.constraint)["grammars"][0]["json_schema"]["x-guidance"] == {
        "whitespace_flexible": False,
        "lenient": True,
    }
    assert sandbox.validate(SandboxRequest(unique, "[1,1]")).matches is False
    assert sandbox.validate(SandboxRequest(unique, "[1,")).matches is False


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"uniqueItems": True, "items": {"pattern": 5}}, "uniqueItems"),
        ({"not": {"pattern": "("}}, "regex"),
        ({"if": 5}, "5 is not of type"),
        ({"not": {"pattern": "a{99999999999}"}}, "not a JSON schema: OverflowError"),
        ({"$schema": 5, "uniqueItems": True}, "not a JSON schema: AttributeError"),
        ({"$schema": [], "uniqueItems": True}, "not a JSON schema: TypeError"),
        ({"oneOf": "no list"}, ""),
    ],
)
def test_relaxed_schema_must_be_a_valid_schema(
    sandbox: SandboxedGrammarCheck, content: Any, why: str
) -> None:
    before = sandbox.pid
    error = refusal(sandbox, schema(content), "{}")
    assert error.code == "constraint.invalid"
    assert why in error.message
    assert sandbox.pid == before


def test_unexpected_error_rejects_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [MemoryError(), ValueError("x" * 1_000)]

    def fail(compiled: grammar.CompiledGrammar) -> None:
        raise errors.pop()

    monkeypatch.setattr(grammar, "check_first_choice", fail)
    tokenizer, request = grammar.byte_tokenizer([]), SandboxRequest(lark('start: "a"'))
    reply = _reply(tokenizer, request)
    assert reply.code == "constraint.invalid"
    assert "ValueError('xxx" in reply.message
    assert len(reply.message) < 400
    with pytest.raises(MemoryError):
        _reply(tokenizer, request)


def test_dangling_reference_is_rejected(sandbox: SandboxedGrammarCheck) -> None:
    error = refusal(sandbox, schema({"not": {"$ref": "#/nowhere"}}), "{}")
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
def test_hostile_grammar_is_answered_within_its_cpu_time(
    sandbox: SandboxedGrammarCheck, name: str
) -> None:
    assert sandbox.validate(SandboxRequest(lark('start: "a"'), "a")).matches is True
    before = cpu_s(sandbox)
    try:
        sandbox.validate(SandboxRequest(HOSTILE[name]))
    except EngineError as error:
        assert error.code.startswith("constraint.")
    assert cpu_s(sandbox) - before < CPU_S + SPARE_S
    assert sandbox.validate(SandboxRequest(lark('start: "a"'), "a")).matches is True


def test_memory_is_limited(sandbox: SandboxedGrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conure.engine.constraints.sandbox.DEADLINE_S", 60.0)
    before = sandbox.pid
    error = refusal(sandbox, HOSTILE["memory"])
    assert error.code == "constraint.too_complex"
    assert "MiB" in error.message
    assert sandbox.pid is None
    sandbox.validate(SandboxRequest(lark('start: "a"')))
    assert sandbox.pid not in (None, before)


def test_endless_validation_is_killed() -> None:
    impatient = SandboxedGrammarCheck([], cpu_s=0.5)
    impatient.validate(SandboxRequest(lark('start: "a"')))
    slow = schema({"type": "string", "not": {"pattern": "^(?=(a+)+$)"}})
    error = refusal(impatient, slow, '"' + "a" * 60 + 'b"')
    assert error.code == "constraint.too_complex"
    assert "processing the constraint takes more than 0.5 s" in error.message
    assert impatient.pid is None
    impatient.close()


@pytest.mark.parametrize(
    ("used_s", "code"), [(1.7, "constraint.unavailable"), (1.9, "constraint.too_complex")]
)
def test_a_late_helper_blames_the_constraint_if_it_was_busy(
    used_s: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 1.0 + used_s])
    monkeypatch.setattr("conure.engine.constraints.sandbox.DEADLINE_S", 0.1)
    monkeypatch.setattr("conure.engine.constraints.sandbox._cpu_s_of", lambda _: next(times))
    stopped = SandboxedGrammarCheck([])
    stopped._start()
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    assert refusal(stopped, lark('start: "a"')).code == code


@pytest.mark.parametrize("length", [1, 1_000_000], ids=["short", "longer than a pipe"])
def test_a_helper_without_cpu_time_meets_the_deadline(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr("conure.engine.constraints.sandbox.DEADLINE_S", 0.1)
    stopped = SandboxedGrammarCheck([])
    stopped._start()
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    error = refusal(stopped, lark(f'start: "{"a" * length}"'))
    assert error.code == "constraint.unavailable"
    assert "0.1 s" in error.message
    assert stopped.pid is None


def test_too_ambiguous_grammar_is_rejected(
    sandbox: SandboxedGrammarCheck,
) -> None:
    # All options begin with a forced brace, followed by all choices at once.
    options = [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(600)]
    error = refusal(sandbox, schema({"anyOf": options}))
    assert error.code == "constraint.too_complex"
    assert "max is 1000" in error.message


def test_empty_and_long_forced_texts_are_valid(sandbox: SandboxedGrammarCheck) -> None:
    for constraint, text in (
        (lark('start: start "a" | "a"'), "aaa"),
        (lark('start: ""'), ""),
        (lark('start: "a"~30000'), "a" * 30_000),
        (schema({"const": "x" * 5_000}), f'"{"x" * 5_000}"'),
        (schema({"anyOf": [{"$ref": "#"}, {"type": "null"}]}), "null"),
    ):
        assert sandbox.validate(SandboxRequest(constraint, text)).matches is True


class KilledHelpers(SandboxedGrammarCheck):
    """A sandbox whose first helpers are killed as soon as they are ready."""

    def __init__(self, num_killed: int) -> None:
        super().__init__([])
        self.num_killed = num_killed

    def _start(self) -> subprocess.Popen[bytes]:
        process = super()._start()
        if self.num_killed:
            self.num_killed -= 1
            process.send_signal(signal.SIGKILL)
        return process


def test_request_is_sent_again_after_its_helper_was_killed() -> None:
    sandbox = KilledHelpers(1)
    assert sandbox.validate(SandboxRequest(lark('start: "a"'), "a")).matches is True
    sandbox.close()


def test_helper_that_is_killed_twice_says_nothing_about_the_constraint() -> None:
    sandbox = KilledHelpers(2)
    assert refusal(sandbox, lark('start: "a"')).code == "constraint.unavailable"
    assert sandbox.pid is None


def test_helper_that_ended_between_requests_is_replaced(sandbox: SandboxedGrammarCheck) -> None:
    sandbox.validate(SandboxRequest(lark('start: "a"')))
    process = sandbox._process
    assert process is not None
    process.kill()
    process.wait()
    assert sandbox.validate(SandboxRequest(lark('start: "a"'), "a")).matches is True


def test_helper_that_cannot_start_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise BlockingIOError("no process is available")

    monkeypatch.setattr(subprocess, "Popen", fail)
    error = refusal(SandboxedGrammarCheck([]), lark('start: "a"'))
    assert error.code == "constraint.unavailable"
    assert "no process is available" in error.message


def test_helper_exits_when_its_input_closes() -> None:
    lonely = SandboxedGrammarCheck([])
    lonely.validate(SandboxRequest(lark('start: "a"')))
    process = lonely._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    lonely.close()


def test_pipe_with_a_high_file_descriptor_is_read(high_descriptor: int) -> None:
    low, sink = os.pipe()
    try:
        with os.fdopen(os.dup2(low, high_descriptor), "rb") as source:
            os.write(sink, (2).to_bytes(4, "big") + b"ok")
            assert _read(source, None) == b"ok"
    finally:
        os.close(low)
        os.close(sink)
