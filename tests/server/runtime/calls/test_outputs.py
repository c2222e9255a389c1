"""Tests of output values."""

from __future__ import annotations

import msgspec
import pytest

from conure.engine import protocol
from conure.server.program.errors import RunError
from conure.server.program.ir import GenerateNode, Json, Sampling
from conure.server.program.seed import seed_of_answer
from conure.server.runtime.calls.outputs import final_sampling, output_specs, value_of


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


@pytest.mark.parametrize("given", [None, 7])
def test_each_retry_has_a_seed_of_its_own(given: int | None) -> None:
    def seed(num_retries: int) -> int:
        sampling = Sampling(seed=given)
        return final_sampling(sampling, max_tokens=9, name="p/x/0", num_retries=num_retries).seed

    seeds = [seed(num_retries) for num_retries in range(4)]
    assert given in (None, seeds[0])
    assert len({*seeds, *(seed_of_answer(seeds[0], index) for index in range(1, 4))}) == 7
    assert [seed(num_retries) for num_retries in range(4)] == seeds
