"""Bodies become records, or errors that say where and why."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.decode import (
    MAX_BODY_BYTES,
    decode_append,
    decode_json,
    decode_submission,
    measure_depth,
)
from conure.server.program.errors import ProgramError
from conure.server.program.graph import Graph
from conure.server.program.ir import Append, Submission

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.json"))


def refusal(body: bytes, record: Any = Submission) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        decode_json(body, record)
    return caught.value


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_example_decodes_builds_and_survives_a_round_trip(path: Path) -> None:
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
        "Invalid enum value 'foo'",
    ),
    (
        '{"program": {}, "objectives": {"a": "ttft", "b": {"deadline_s": "x"}}}',
        "objectives.b.deadline_s",
        "Expected `float`",
    ),
]


@pytest.mark.parametrize(("body", "path", "words"), BAD_RECORDS)
def test_what_is_not_as_it_should_be_is_named_with_its_path(
    body: str, path: str | None, words: str
) -> None:
    error = refusal(body.encode())
    assert (error.code, error.path, error.http_status) == ("program.invalid", path, 400)
    assert words in error.message
    assert "$" not in error.message.replace("\\w*$", "")


def test_an_op_of_the_language_that_is_not_run_yet_is_told_from_one_that_is_none() -> None:
    later = refusal((NODE % '{"op": "procedure", "id": "m"}').encode())
    never = refusal((NODE % '{"op": "mop", "id": "m"}').encode())
    assert later.code == never.code == "program.unsupported_op"
    assert later.path == never.path == "program.nodes[1].op"
    assert "`procedure` belongs to the language" in later.message
    assert "no op `mop`" in never.message
    assert "generate, call, client, expr, map, if, loop, wait, kill, yield, try" in never.message
    appended = refusal(b'{"nodes": [{"op": "procedure", "id": "m"}]}', Append)
    assert (appended.code, appended.path) == ("program.unsupported_op", "nodes[0].op")


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a"', b"\xff", b'"\xff"', b'{"a": "\xed\xa0\x80"}', b"{} x", b"nul"]
)
def test_what_is_not_json_is_malformed(body: bytes) -> None:
    assert refusal(body, Any).code == "json.malformed"


def test_a_malformed_body_is_answered_with_line_and_column() -> None:
    assert "line 2, column 8" in refusal(b'{"a": 1,\n  "b": x}', Any).message


@pytest.mark.parametrize("number", ["9" * 25, "-9223372036854775809", "18446744073709551616"])
def test_integers_beyond_64_bits_are_refused_and_strings_of_digits_are_not(number: str) -> None:
    assert refusal(b'{"a": [1, %s]}' % number.encode(), Any).code == "json.number"
    assert decode_json(b'["%s", 0.%s]' % (number.encode(), b"1" * 30), list)[0] == number
    assert decode_json(b"[18446744073709551615, -9223372036854775808]", Any)[0] == 2**64 - 1


def test_a_body_beyond_the_limit_is_too_large() -> None:
    error = refusal(b" " * (MAX_BODY_BYTES + 1), Any)
    assert (error.code, error.http_status) == ("program.too_large", 413)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"nodes":'])
@pytest.mark.parametrize("count", [70, 5_000, 100_000])
def test_deep_nesting_is_refused_before_it_is_parsed(opening: bytes, count: int) -> None:
    assert refusal(b'{"inputs": ' + opening * count).code == "json.too_deep"


def test_64_levels_pass_and_65_do_not() -> None:
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
def test_the_scan_of_a_megabyte_is_quick_whatever_it_holds(body: bytes) -> None:
    started = time.process_time()
    measure_depth(body)
    # 5 to 25 ms where measured; the bound only tells linear from quadratic.
    assert time.process_time() - started < 0.5


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
def test_the_scan_counts_depth_as_a_parser_would(value: Any) -> None:
    body = json.dumps(value).encode()
    assert measure_depth(body) == depth_of(value)
    assert decode_json(body, Any) == value


@given(st.binary(max_size=60) | st.text('{}[]":,abc01\\', max_size=60).map(str.encode))
def test_whatever_the_bytes_are_only_a_program_error_escapes(body: bytes) -> None:
    for record in (Submission, Any):
        with contextlib.suppress(ProgramError):
            decode_json(body, record)
