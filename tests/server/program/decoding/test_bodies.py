"""Decoding of bodies, and the paths and positions in errors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.decoding.bodies import (
    MAX_BODY_BYTES,
    decode_append,
    decode_json,
    decode_submission,
    measure_depth,
)
from conure.server.program.errors import ProgramError
from conure.server.program.graph.graph import Graph
from conure.server.program.ir import Append, Submission

from ....cpu_time import least_cpu_s

PROGRAMS = sorted((Path(__file__).parents[1] / "programs").glob("*.json"))


def refusal(body: bytes, record: Any = Submission) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        decode_json(body, record)
    return caught.value


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_examples_survive_a_round_trip(path: Path) -> None:
    document = json.loads(path.read_text())
    appends = document.pop("append", [])
    submission = decode_submission(json.dumps(document).encode())
    graph = Graph.build(
        submission.program,
        submission.inputs,
        open=submission.open,
        objectives=submission.objectives,
    )
    for append in appends:
        record = decode_append(json.dumps(append).encode())
        assert graph.append(record) == tuple(node["id"] for node in append["nodes"])
        assert decode_append(msgspec.json.encode(record)) == record
    assert decode_submission(msgspec.json.encode(submission)) == submission
    assert len(graph.topological()) == sum(map(len, graph.slots.values())) > 0


NODE = '{"program": {"nodes": [{"id": "a", "op": "expr", "output": "x", "expr": 1}, %s]}}'
BAD_RECORDS = [
    ("[]", None, "Expected `object`"),
    ("{}", None, "missing required field `program`"),
    ('{"program": {}, "extra": 1}', None, "unknown field `extra`"),
    ('{"program": {"nodes": 5}}', "program.nodes", "Expected `array`"),
    (NODE % '{"op": "expr"}', "program.nodes[1]", "missing required field"),
    (NODE % '{"op": "expr", "id": "b c"}', "program.nodes[1].id", "matching regex"),
    (NODE % '{"op": "expr", "id": "b\\n"}', "program.nodes[1].id", "matching regex"),
    (
        NODE % '{"op": "generate", "id": "b", "prompt": [{"output": "y", "temperature": -1}]}',
        "program.nodes[1].prompt[0].temperature",
        "`float` >= 0",
    ),
    ('{"program": {"variables": {"3x": {}}}}', "program.variables", "as a key"),
    (
        '{"program": {"variables": {"a": {}, "b": {"type": "foo"}, "c": {}}}}',
        "program.variables.b.type",
        "Invalid enum value 'foo' at `program.variables.b.type`: the values are `string`, `int`",
    ),
    (
        '{"program": {}, "options": {"strat": "eager"}}',
        "options",
        "unknown field `strat` at `options`: did you mean `start`?",
    ),
    ('{"program": {}, "options": {"x y": 1}}', "options", "the fields are `deadline_s`, `detach`"),
    ('{"nodes": []}', None, "unknown field `nodes`: it is a field of `program`"),
    (
        NODE % '{"op": "generate", "id": "b", "prompt": [{"output": "y"}], "temperature": 1}',
        "program.nodes[1]",
        "unknown field `temperature` at `program.nodes[1]`: it is a field of `prompt`, `output`",
    ),
    (
        '{"program": {"variables": {"a": {}, "b.c": {"type": "foo"}}}}',
        "program.variables",
        "as a key",
    ),
    ('{"program": {}, "objectives": {"a": "fast"}}', "objectives.a", "the values are `latency`"),
    (
        '{"program": {}, "objectives": {"a": "ttft", "b": {"deadline_s": "x"}}}',
        "objectives.b.deadline_s",
        "Expected `float`",
    ),
]


@pytest.mark.parametrize(("body", "path", "words"), BAD_RECORDS)
def test_invalid_fields_are_reported_with_path(body: str, path: str | None, words: str) -> None:
    error = refusal(body.encode())
    assert (error.code, error.path, error.status) == ("program.invalid", path, 400)
    assert words in error.message
    assert "$" not in error.message.replace("\\w*$", "")


def test_unknown_ops_are_refused_with_a_list_of_the_known_ones() -> None:
    error = refusal((NODE % '{"op": "mop", "id": "m"}').encode())
    assert (error.code, error.path) == ("program.unsupported_op", "program.nodes[1].op")
    assert "op `mop` is unknown" in error.message
    assert "did you mean `map`?" in error.message
    far = refusal((NODE % '{"op": "teleport", "id": "m"}').encode())
    assert "generate, call, client, expr, map, if, loop, try, procedure, wait" in far.message
    appended = refusal(b'{"nodes": [{"op": "mop", "id": "m"}]}', Append)
    assert (appended.code, appended.path) == ("program.unsupported_op", "nodes[0].op")


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a"', b"\xff", b'"\xff"', b'{"a": "\xed\xa0\x80"}', b"{} x", b"nul"]
)
def test_invalid_json_is_malformed(body: bytes) -> None:
    assert refusal(body, Any).code == "json.malformed"


def test_malformed_json_is_reported_with_position() -> None:
    assert "line 2, column 8" in refusal(b'{"a": 1,\n  "b": x}', Any).message


@pytest.mark.parametrize("number", ["9" * 25, "-9223372036854775809", "18446744073709551616"])
def test_integers_beyond_64_bits_are_refused(number: str) -> None:
    assert refusal(b'{"a": [1, %s]}' % number.encode(), Any).code == "json.number"
    assert decode_json(b'["%s", 0.%s]' % (number.encode(), b"1" * 30), list)[0] == number
    assert decode_json(b"[18446744073709551615, -9223372036854775808]", Any)[0] == 2**64 - 1


def test_the_size_of_a_body_is_limited() -> None:
    error = refusal(b" " * (MAX_BODY_BYTES + 1), Any)
    assert (error.code, error.status) == ("program.too_large", 413)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"nodes":'])
@pytest.mark.parametrize("count", [70, 5_000, 100_000])
def test_deep_nesting_is_refused_before_parsing(opening: bytes, count: int) -> None:
    assert refusal(b'{"inputs": ' + opening * count).code == "json.too_deep"


def test_64_levels_are_the_limit() -> None:
    assert decode_json(b"[" * 64 + b"]" * 64, Any)
    assert refusal(b"[" * 65 + b"]" * 65, Any).code == "json.too_deep"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 1_000_000,
        b"[]," * 333_333,
        (b"[" * 64 + b"]" * 64) * 7_800,
        b'"",' * 333_333,
        b'["[",' * 200_000,
        b'"' + b'\\"[' * 333_333,
    ],
)
def test_measuring_depth_takes_linear_time(body: bytes) -> None:
    # Measured: 5 to 25 ms. The bound only detects quadratic time.
    assert least_cpu_s(lambda: measure_depth(body)) < 0.5


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text('[]{}"\\ a'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('"[\\a'), inner, max_size=3)
    ),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


@given(VALUES)
def test_measured_depth_equals_parsed_depth(value: Any) -> None:
    body = json.dumps(value).encode()
    assert measure_depth(body) == depth_of(value)
    assert decode_json(body, Any) == value


@given(st.binary(max_size=60) | st.text('{}[]":,abc01\\', max_size=60).map(str.encode))
def test_any_bytes_raise_only_program_errors(body: bytes) -> None:
    for record in (Submission, Any):
        with contextlib.suppress(ProgramError):
            decode_json(body, record)


# --- hostile bodies ---------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 500_000, b'"' * 1_000_000, b'"a' * 500_000])
def test_open_strings_cost_linear_time(body: bytes) -> None:
    # Quadratic time would be more than an hour.
    assert refusal(b'1234567890123456789 "' + body).code in ("json.malformed", "program.invalid")


def test_repeated_keys_are_refused() -> None:
    for body in (
        b'{"program":{"name":"a","name":"b"}}',
        b'{"program":{},"inputs":{"a":{"x":1,"\\u0078":2}}}',
        b'{"program":{},"inputs":{"a":[{"":1},{"":2,"":3}]}}',
    ):
        assert refusal(body).code == "json.duplicate_key"
    for body in (
        b'{"program":{"name":":\\":{"}}',
        b'{"program":{},"inputs":{"a":{"x":1},"b":{"x":"\\\\"},"c":[{"x":1},{"x":":"}]}}',
    ):
        decode_submission(body)


def test_number_of_items_is_bounded() -> None:
    body = b'{"program":{},"inputs":{"a":[' + b"[]," * 200_000 + b"1]}}"
    assert refusal(body).code == "program.too_large"


@pytest.mark.parametrize(
    ("program", "path"),
    [
        ({"variables": {"a": {}, "b": {"typ": 1}, "c": {}}}, "program.variables.b"),
        ({"jobs": {"a": {}, "b": {"timeout_s": -1}}}, "program.jobs.b.timeout_s"),
        (
            {
                "nodes": [
                    {
                        "id": "m",
                        "op": "map",
                        "items": "x",
                        "body": [
                            {"id": "l", "op": "loop", "carry": {"r": [1, 2], "s": 3}, "body": []}
                        ],
                    }
                ]
            },
            "program.nodes[0].body[0].carry.s",
        ),
    ],
)
def test_path_names_the_key_of_an_invalid_item(program: Any, path: str) -> None:
    assert refusal(json.dumps({"program": program}).encode()).path == path
