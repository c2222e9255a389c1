"""Tests of typed decoding."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta, Struct

from conure.server.program.decoding.typed_json import convert_record, decode_record


class Inner(Struct):
    number: int


class Outer(Struct):
    inner: Inner
    others: dict[str, Inner] = {}


FIRST_USES = """
import sys, threading
from msgspec import defstruct
from conure.server.program.decoding.typed_json import convert_record, decode_record

sys.setswitchinterval(1e-6)
CONTENT = {"middle": {"inner": {"x": 1}, "many": [{"x": 2}]}, "inner": {"x": 3}}
BODY = b'{"middle": {"inner": {"x": 1}, "many": [{"x": 2}]}, "inner": {"x": 3}}'
wrong = []
for _ in range(300):
    inner = defstruct("Inner", [("x", int)])
    middle = defstruct("Middle", [("inner", inner), ("many", list[inner])])
    outer = defstruct("Outer", [("middle", middle), ("inner", inner)])
    start = threading.Barrier(4)

    def first_use(number):
        start.wait()
        made = decode_record(BODY, outer) if number % 2 else convert_record(CONTENT, outer)
        if made.middle.many[0].x != 2:
            wrong.append(made)

    threads = [threading.Thread(target=first_use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert not wrong, wrong
"""


def test_json_becomes_a_record() -> None:
    assert decode_record(b'{"inner": {"number": 1}}', Outer) == Outer(Inner(1))
    assert decode_record('{"a": {"number": 1}}', dict[str, Inner]) == {"a": Inner(1)}
    assert convert_record({"inner": {"number": 1}}, Outer) == Outer(Inner(1))


def test_what_does_not_fit_the_type_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        decode_record(b'{"inner": {"number": "1"}}', Outer)
    with pytest.raises(msgspec.ValidationError, match="length <= 3"):
        convert_record("long", Annotated[str, Meta(max_length=3)])
    with pytest.raises(msgspec.DecodeError, match="truncated"):
        decode_record(b'{"inner":', Outer)


def test_threads_may_use_a_type_for_the_first_time_at_once() -> None:
    # With msgspec's own functions the process ends by a segmentation fault here.
    found = subprocess.run(
        [sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr[-2_000:]
