"""Prompts written as one text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.decoding.bodies import decode_submission
from conure.server.program.errors import ProgramError
from conure.server.program.nodes import GenerateNode


def decode(prompt: str, **output: Any) -> GenerateNode:
    node = {"id": "n", "op": "generate", "prompt": prompt, "output": {"variable": "x", **output}}
    body = msgspec.json.encode({"program": {"nodes": [node]}})
    (decoded,) = decode_submission(body).program.nodes
    assert isinstance(decoded, GenerateNode)
    return decoded


def parts(prompt: str) -> list[Any]:
    """Return the segments: text, `(input,)` or `[output]`."""
    found: list[Any] = []
    for segment in decode(prompt).prompt or []:
        if isinstance(segment.text, str):
            found.append(segment.text)
        elif isinstance(segment.output, str):
            found.append([segment.output])
        else:
            found.append((segment.input,))
    return found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Name it:", ["Name it:", ["x"]]),
        ("A {{a}}{{ b }}.", ["A ", ("a",), ("b",), ".", ["x"]]),
        ("{{x}} is it, {{a}}", [["x"], " is it, ", ("a",)]),
        ('{{{{a}} {"k": {"v": 1}}', ['{{a}} {"k": {"v": 1}}', ["x"]]),
        ("", [["x"]]),
    ],
)
def test_names_in_double_braces_are_variables(prompt: str, expected: list[Any]) -> None:
    assert parts(prompt) == expected


def test_the_output_keeps_its_sampling() -> None:
    node = decode("Hi {{x}}", max_tokens=3, seed=1, constraint={"choices": ["a"]}, **{"as": "text"})
    assert node.prompt
    output = node.prompt[1]
    assert (output.max_tokens, output.seed, output.form) == (3, 1, "text")
    assert output.constraint is not None


def test_a_decoded_node_has_segments_in_its_json() -> None:
    encoded = msgspec.json.encode(decode("Hi {{a}}"))
    assert b"{{" not in encoded
    assert msgspec.json.decode(encoded, type=GenerateNode) == decode("Hi {{a}}")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a {{ b", "not followed by a name"),
        ("{{x}}{{x}}", "occurs 2 times"),
        ("{{}}", "character 0"),
    ],
)
def test_malformed_text_is_refused(prompt: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words) as caught:
        decode(prompt)
    assert (caught.value.code, caught.value.path) == ("program.invalid", "program.nodes[0]")


def test_text_without_an_output_is_refused() -> None:
    body = b'{"program": {"nodes": [{"id": "n", "op": "generate", "prompt": "Hi"}]}}'
    with pytest.raises(ProgramError, match="needs an `output`"):
        decode_submission(body)


@given(st.text(alphabet="{}x a", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parts(text)
    except ProgramError:
        return
    assert found.count(["x"]) == 1
    literal = "".join(part for part in found if isinstance(part, str))
    assert literal.count("{") <= text.count("{")
