"""Requests contain only numbers that JSON has."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from conure.adapters.client.client_steps import StepRequest, answer_of
from conure.adapters.client.exchange import programs
from conure.adapters.client.exchange.retry import Retry
from conure.adapters.client.json_encoding import encode_json
from conure.server.program.errors import ExpressionError
from conure.server.program.status import PutValue

STEP = StepRequest("request", "node", "name", "output", {}, lambda: None)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [lambda n: n, lambda n: {"a": [None, n]}, lambda n: (1, [n])])
def test_number_that_json_lacks_is_refused(number: float, place: Any) -> None:
    value = place(number)
    for send in (
        lambda: encode_json(value),
        lambda: answer_of(STEP, value),
        lambda: next(programs.submit({"inputs": {"x": value}}, Retry(), key=None)),
    ):
        with pytest.raises(ExpressionError, match=f"{number} is not a JSON number"):
            send()


def test_null_and_encoded_values_are_sent() -> None:
    value = {"a": [None, 1.5], "b": "null"}
    assert msgspec.json.decode(encode_json(value)) == value
    answer = PutValue(value=msgspec.Raw(b"[null]"))
    assert msgspec.json.decode(encode_json(answer))["value"] == [None]
