"""From what an engine finished to the value of an output."""

from __future__ import annotations

import msgspec
import pytest

from conure.engine import api
from conure.server.program.errors import RunError
from conure.server.program.ir import Generate, Json
from conure.server.runs.output import targets, value_of


def parsed(text: str) -> Json:
    segments = [{"output": "x", "as": "value"}]
    node = msgspec.convert({"op": "generate", "id": "n", "prompt": segments}, Generate)
    report = api.Finished(1, "stop", text, 0, "", 0)
    return value_of(targets(node)[0], report, num_prompt=0, model="m")


@pytest.mark.parametrize("text", ['{"a": [1, "\\u00e9"]}', "[" * 64 + "]" * 64, str(2**64 - 1)])
def test_an_output_as_value_is_its_json(text: str) -> None:
    assert parsed(text) == msgspec.json.decode(text)


@pytest.mark.parametrize(
    "text",
    ["", "word", "[1", "[" * 65 + "]" * 65, "[" * 983 + "]" * 983, "[" * 10**6, "9" * 40, "1e999"],
)
def test_what_no_client_could_send_is_no_json_of_a_model_either(text: str) -> None:
    with pytest.raises(RunError) as caught:
        parsed(text)
    assert caught.value.code == "output.not_json"
