"""Submissions with a text: compiled once, with the functions of the server."""

from __future__ import annotations

import msgspec
import pytest

from conure.server.language.errors import LanguageError, SourceNameError
from conure.server.language.submission import SourceCompiler
from conure.server.program.decoding.bodies import decode_submission
from conure.server.program.decoding.bounded_json import MAX_ITEMS
from conure.server.program.errors import ProgramError
from conure.server.program.functions import FunctionSignature
from conure.server.program.graph.graph import Graph
from conure.server.program.ir import Options, SourceSubmission, Variable

LOOKUP = FunctionSignature(
    name="lookup", parameters={"key": Variable(), "limit": Variable()}, timeout_s=5
)


def test_functions_of_the_server_can_be_called_by_position() -> None:
    compiler = SourceCompiler([LOOKUP])
    submission, _ = compiler.compile(SourceSubmission(source="yield lookup('a', 2)"))
    (call, _) = submission.program.nodes
    assert getattr(call, "args", None) == {"key": "a", "limit": 2}


def test_a_function_that_the_server_lacks_is_refused() -> None:
    with pytest.raises(SourceNameError, match="unknown function `lookup`"):
        SourceCompiler([]).compile(SourceSubmission(source="yield lookup('a')"))


def test_the_json_is_that_of_the_submission() -> None:
    source = SourceSubmission(source="x: str\nyield gen(x)", inputs={"x": "a"}, name="n")
    submission, body = SourceCompiler([]).compile(source)
    assert decode_submission(body) == submission
    assert submission.program.name == "n"
    assert submission.inputs == {"x": "a"}


def test_the_same_text_is_compiled_once() -> None:
    compiler = SourceCompiler([])
    one, _ = compiler.compile(SourceSubmission(source="yield gen(x)", inputs={"x": "a"}))
    other, _ = compiler.compile(SourceSubmission(source="yield gen(x)", inputs={"x": "b"}))
    assert one.program is other.program
    assert (one.inputs, other.inputs) == ({"x": "a"}, {"x": "b"})
    assert len(compiler._programs) == 1


def test_a_text_that_is_sent_again_gives_the_json_of_the_new_submission() -> None:
    compiler = SourceCompiler([])
    text = "x: str\nwith job():\n    y = gen(x)\n    yield y"
    compiler.compile(SourceSubmission(source=text, inputs={"x": "a"}))
    source = SourceSubmission(
        source=text, inputs={"x": "b"}, objectives={"y": "latency"}, options=Options(detach=False)
    )
    submission, body = compiler.compile(source)
    assert decode_submission(body) == submission
    assert submission.options == Options(detach=False)


def test_a_graph_does_not_change_the_program_that_is_kept() -> None:
    compiler = SourceCompiler([])
    source = SourceSubmission(source="x: str\nfor _ in range(3):\n    x = gen(x)\nyield x")
    submission, body = compiler.compile(source)
    Graph.build(submission.program, {})
    again, again_body = compiler.compile(source)
    assert again_body == body == msgspec.json.encode(again)


def test_program_and_inputs_together_are_bounded() -> None:
    source = SourceSubmission(source="yield len(x)", inputs={"x": [[]] * (MAX_ITEMS - 10)})
    with pytest.raises(ProgramError, match="arrays, objects and keys") as caught:
        SourceCompiler([]).compile(source)
    assert caught.value.code == "program.too_large"


def test_an_invalid_option_gets_the_line_of_the_call() -> None:
    with pytest.raises(LanguageError, match="line 2, column 1: ") as caught:
        SourceCompiler([]).compile(SourceSubmission(source="\nyield gen('a', timeout=-1)"))
    assert caught.value.path == "source:2:1"


def test_the_memory_of_the_programs_that_are_kept_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conure.server.language.submission.CACHED_BYTES", 40_000)
    compiler = SourceCompiler([])
    text = "a" * 1_000
    for number in range(20):
        compiler.compile(SourceSubmission(source=f"yield gen('{number} {text}')"))
    assert 5 <= len(compiler._programs) <= 10
    kept = list(compiler._programs)
    longer = "\n".join(f"yield gen('{text}')" for _ in range(10))
    compiler.compile(SourceSubmission(source=longer))
    assert list(compiler._programs) == kept
