"""Tests of output values."""

from __future__ import annotations

import msgspec
import pytest

from conure.engine import protocol
from conure.server.program.errors import RunError
from conure.server.program.ir import GenerateNode, Json
from conure.server.runtime.calls.outputs import output_specs, value_of


def parsed(text: str) -> Json:
    segments = [{"output": "x", "as": "value"}]
    node = msgspec.convert({"op": "generate", "id": "n", "prompt": segments}, GenerateNode)
    report = protocol.Finished(1, "stop", text, 0, "", 0)
    return value_of(output_specs(node)[0], report, num_prompt=0, model="m")


@pytest.mark.parametrize("text", ['{"a": [1, "\\u00e9"]}', "[" * 64 + "]" * 64, str(2**64 - 1)])
def test_output_as_value_is_parsed_json(text: str) -> None:
    assert parsed(text) == msgspec.json.decode(text)


@pytest.mark.parametrize(
    "text",
    ["", "word", "[1", "[" * 65 + "]" * 65, "[" * 983 + "]" * 983, "[" * 10**6, "9" * 40, "1e999"],
)
def test_model_json_has_the_limits_of_client_json(text: str) -> None:
    with pytest.raises(RunError) as caught:
        parsed(text)
    assert caught.value.code == "output.not_json"
